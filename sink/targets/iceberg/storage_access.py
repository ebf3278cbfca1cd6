"""The properties with which tasks reach a table's files: its FileIO's, and credentials that a REST catalog vends."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sink.errors import TableError

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


OWN_CLIENTS = ("S3FileIO", "GCSFileIO", "ResolvingFileIO")
"""Classes of Iceberg's Java library that follow these properties. Hadoop's clients don't."""
_REFUSED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "s3": {"s3.sse.type": ("none", "s3"), "s3.acl": ()},
    "gs": {"gcs.encryption-key": ()},
}
"""Scheme -> property of Iceberg's Java clients -> the values that change nothing of what Python's clients do."""


def check_storage(name: str, location: str, properties: _Properties) -> None:
    """:param name: of the table.
    :param location: of its files.
    :param properties: of its FileIO, also those that the catalog answers.
    :raises TableError: data files, which Python writes, would be encrypted or readable in another way than the
        metadata, which Java writes.
    """
    for scheme, refused in _REFUSED.items():
        for option, harmless in refused.items() if location.startswith(scheme) else ():
            value = properties.get(option)
            if value is not None and value.lower() not in harmless:
                shown = "" if "key" in option else f"={value}"
                raise TableError(
                    f"{name}: {option}{shown} would hold for its metadata only: data files are written by PyArrow, "
                    "which doesn't know it. Leave it out, and let the bucket encrypt and own its files by default."
                )
