"""Which deletion vector each data file has (v3). Each version of the key index stores this as a log, so that a commit
writes only what it changes, and not the vectors of the whole table.

A part of the log says, for some data files, which vector they have now, or that they have none. A part never changes. A
new part absorbs older parts that aren't much larger. So each part is at least twice as large as the next one, there are
about log2(n) parts, and a file's entry is written about log2(n) times.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_INLINE = 64
"""A part with at most this many data files is stored in the version's manifest. A file of its own would cost one more
request for each commit.
"""

Vector = Mapping[str, Any]
"""The `ContentFileParser` JSON of a deletion vector."""


@dataclass(frozen=True)
class _Part:
    """:param vectors: data file -> its vector, or None.
    :param name: name of the part's file. None if the part is in the manifest, or isn't stored yet.
    :param crc32: checksum of the file.
    """

    vectors: Mapping[str, Vector | None]
    name: str | None = None
    crc32: int = 0


@dataclass(frozen=True)
class DeletionVectors:
    """Data file -> vector. Immutable. The oldest part comes first."""

    parts: tuple[_Part, ...] = ()

    def get(self, path: str) -> Vector | None:
        """The vector of a data file; None if it has none."""
        for part in reversed(self.parts):
            if path in part.vectors:
                return part.vectors[path]
        return None

    def changed(self, changes: Mapping[str, Vector | None]) -> "DeletionVectors":
        """A copy with new vectors for some data files. None removes a file's vector."""
        # removing the vector of a file that has none changes nothing
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
        """Names of the files that hold the parts."""
        return (part.name for part in self.parts if part.name is not None)

    def stored(self, prefix: str, write: Callable[[str, bytes], None]) -> "DeletionVectors":
        """Write all parts that aren't small into files. Returns the same vectors with the files' names.

        :param prefix: beginning of the names of new files.
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
        """JSON for the version's manifest. Call this on what `stored` returns."""
        return [
            {"vectors": part.vectors} if part.name is None else {"name": part.name, "crc32": part.crc32}
            for part in self.parts
        ]

    @classmethod
    def from_json(cls, parts: list[dict[str, Any]], read: Callable[[str], bytes]) -> "DeletionVectors":
        """The reverse of `to_json`.

        :param read: returns the content of a file.
        :raises ValueError: a file's content isn't what was written.
        """
        return cls(tuple(_part(part, read) for part in parts))


def _part(part: Mapping[str, Any], read: Callable[[str], bytes]) -> _Part:
    if "vectors" in part:
        return _Part(part["vectors"])
    content = read(part["name"])
    if zlib.crc32(content) != part["crc32"]:
        raise ValueError(f"{part['name']} is damaged")
    return _Part(json.loads(content), part["name"], part["crc32"])
