"""The properties with which tasks reach a table's files: its FileIO's, and credentials that a REST catalog vends."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_EXPIRES = re.compile(r"expires-at(-ms)?(\.|$)")
"""`s3.session-token-expires-at-ms`, `gcs.oauth2.token-expires-at`, `adls.sas-token-expires-at-ms.<account>`; all are
milliseconds since 1970.
"""

_UNTOLD = 1800.0
"""After so many seconds, vended credentials are renewed that don't say when they expire. Most live an hour."""

_Properties = Mapping[str, str]


@dataclass(frozen=True)
class StorageAccess:
    """The catalog's answer when it loaded a table.

    :param loaded_at: seconds since 1970.
    :param properties: properties of the table's FileIO.
    :param credentials: prefix of locations -> properties for these locations (`storage-credentials` of a REST catalog).
    """

    loaded_at: float
    properties: _Properties = field(repr=False)
    credentials: Sequence[tuple[str, _Properties]] = field(default=(), repr=False)

    def at(self, location: str) -> dict[str, str]:
        """The properties for files in a folder. The longest prefix wins, as in Iceberg's own FileIO."""
        folder = f"{location.rstrip('/')}/"
        fitting = [(prefix, config) for prefix, config in self.credentials if folder.startswith(prefix)]
        _, vended = max(fitting, key=lambda found: len(found[0]), default=("", {}))
        return {**self.properties, **vended}

    def is_running_out(self, now: float) -> bool:
        """Whether credentials have expired, or half of their time is over. Tasks may need them for a while."""
        all_properties = [self.properties, *(config for _, config in self.credentials)]
        ends = [
            int(value) / 1000
            for properties in all_properties
            for name, value in properties.items()
            if _EXPIRES.search(name) and value.isdecimal()
        ]
        if not ends:
            return bool(self.credentials) and now >= self.loaded_at + _UNTOLD
        return now >= self.loaded_at + (min(ends) - self.loaded_at) / 2
