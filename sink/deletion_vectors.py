"""Which deletion vector each data file has (v3), as versions of the key index keep it: a log, so that a commit writes
what it changes, not what the table holds.

A part of the log says of some data files which vector they have now, or that they have none. A part is never changed. A
new one takes in those before it that aren't much larger. So each is at least twice as large as the next one, there are
about log2(n) of them, and a file's vector is written about as often as that.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_INLINE = 64
"""A part of so few data files is in the version's manifest: a file of its own would cost one more request a commit."""

Vector = Mapping[str, Any]
"""The `ContentFileParser` JSON of a deletion vector."""


@dataclass(frozen=True)
class _Part:
    """:param name: of its file; None if it has none, or none yet."""

    vectors: Mapping[str, Vector | None]
    name: str | None = None
    crc32: int = 0


@dataclass(frozen=True)
class DeletionVectors:
    """Data file -> vector. Immutable; oldest part first."""

    parts: tuple[_Part, ...] = ()

    def get(self, path: str) -> Vector | None:
        """The vector of a data file; None if it has none."""
        for part in reversed(self.parts):
            if path in part.vectors:
                return part.vectors[path]
        return None

    def changed(self, changes: Mapping[str, Vector | None]) -> "DeletionVectors":
        """With other vectors, or none, for some data files."""
        # of files that have no vector, there is nothing to take back
        changes = {path: vector for path, vector in changes.items() if vector is not None or self.get(path) is not None}
        if not changes:
            return self
        parts = list(self.parts)
        while parts and len(parts[-1].vectors) < 2 * len(changes):
            changes = {**parts.pop().vectors, **changes}
        if not parts:
            changes = {path: vector for path, vector in changes.items() if vector is not None}
        return DeletionVectors((*parts, _Part(changes)))

    @property
    def files(self) -> Iterator[str]:
        """Names of the files that the parts are in."""
        return (part.name for part in self.parts if part.name is not None)

    def stored(self, prefix: str, write: Callable[[str, bytes], None]) -> "DeletionVectors":
        """The same, with all but small parts in files.

        :param prefix: of the names of new files.
        :param write: writes content under a name.
        """
        parts = list(self.parts)
        for number, part in enumerate(parts):
            if part.name is None and len(part.vectors) > _INLINE:
                content = json.dumps(part.vectors).encode()
                parts[number] = replace(part, name=f"{prefix}-{number}.json", crc32=zlib.crc32(content))
                write(f"{prefix}-{number}.json", content)
        return DeletionVectors(tuple(parts))

    def to_json(self) -> list[dict[str, Any]]:
        """For the manifest, after `stored`."""
        return [
            {"vectors": part.vectors} if part.name is None else {"name": part.name, "crc32": part.crc32}
            for part in self.parts
        ]

    @classmethod
    def from_json(cls, parts: list[dict[str, Any]], read: Callable[[str], bytes]) -> "DeletionVectors":
        """:param read: gives the content of a file.

        :raises ValueError: a file isn't what was written.
        """
        return cls(tuple(_part(part, read) for part in parts))


def _part(part: Mapping[str, Any], read: Callable[[str], bytes]) -> _Part:
    if "vectors" in part:
        return _Part(part["vectors"])
    content = read(part["name"])
    if zlib.crc32(content) != part["crc32"]:
        raise ValueError(f"{part['name']} is damaged")
    return _Part(json.loads(content), part["name"], part["crc32"])
