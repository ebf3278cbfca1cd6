"""Versions of a key index: what a commit names to say which index belongs to it."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deltawriters.keyindex.hashing import random_base
from deltawriters.keyindex.runs import RunInfo
from deltawriters.keyindex.vector_log import DeletionVectors

_FORMAT = 3
_FORMER = 2
"""Its runs are all as large ones are now."""
_HASHED = "3 "
"""Before the bases, in an index whose two hashes are polynomials."""


def new_encoding(keys: str) -> str:
    """How a new index hashes keys: `3 <base of the high hash> <base of the low hash>: <keys>`.

    :param keys: the columns, types and buckets on which the hashes depend (`Table.key_encoding`).
    """
    return f"{_HASHED}{random_base():016x} {random_base():016x}: {keys}"


class IndexLostError(Exception):
    """A part of the index is missing or damaged."""


@dataclass(frozen=True)
class IndexVersion:
    """The content of a version manifest.

    :param encoding: how keys are hashed. With another encoding the runs are useless. See `new_encoding`.
    :param sequence: sequence of the newest run.
    :param runs: the runs.
    :param dead: data file -> sequence. Entries of older runs that point into the file are void.
    :param vectors: deletion vectors of the data files (v3).
    :param parquet_deletes: data file -> Parquet position delete files that apply to it, in a table that was v2 before.
        As soon as the file gets a vector, readers ignore them.
    :param truncates: the order values of TRUNCATEs, in hexadecimal digits, ascending. What is below the last one is
        late. Only a table with history needs the others.
    :param deleted: this sink's files of deleted keys (`deltawriters.tombstones`): name, and number of keys.
    :param merged: names of those whose keys are in another one by now. They are for a table that is rolled back.
    :param others: names of other sinks' files of deleted keys that are in the runs.
    """

    encoding: str
    sequence: int = 0
    runs: tuple[RunInfo, ...] = ()
    dead: Mapping[str, int] = field(default_factory=dict)
    vectors: DeletionVectors = field(default_factory=DeletionVectors)
    parquet_deletes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    truncates: tuple[str, ...] = ()
    deleted: tuple[tuple[str, int], ...] = ()
    merged: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def bases(self) -> tuple[int, int]:
        """Bases of the high and of the low hashes."""
        high, low = self.encoding.removeprefix(_HASHED).partition(": ")[0].split()
        return int(high, 16), int(low, 16)

    def is_encoded(self, keys: str) -> bool:
        """Whether its keys are hashed in the way that this release has, and are those that `keys` describes."""
        return self.encoding.startswith(_HASHED) and self.encoding.partition(": ")[2] == keys

    def to_json(self) -> bytes:
        """The manifest: a line with the format and the checksum of the rest, and then the rest."""
        parts = {"runs": [run.to_json() for run in self.runs], "vectors": self.vectors.to_json()}
        body = json.dumps(self.__dict__ | parts).encode()
        return json.dumps({"format": _FORMAT, "crc32": zlib.crc32(body)}).encode() + b"\n" + body

    @classmethod
    def from_json(cls, text: bytes, read: Callable[[str], bytes]) -> "IndexVersion":
        """The reverse of `to_json`.

        :param read: returns the content of a file of deletion vectors.
        :raises IndexLostError: the manifest is damaged, or has another format.
        """
        try:
            line, _, body = text.partition(b"\n")
            head = json.loads(line)
            if head["format"] not in (_FORMAT, _FORMER) or head["crc32"] != zlib.crc32(body):
                raise IndexLostError("the version's manifest is damaged, or of another format")
            values = json.loads(body)
            values["runs"] = tuple(RunInfo.from_json(run) for run in values["runs"])
            values["deleted"] = tuple((name, rows) for name, rows in values.get("deleted", ()))
            values |= {name: tuple(values.get(name, ())) for name in ("truncates", "merged", "others")}
            values["vectors"] = DeletionVectors.from_json(values["vectors"], read)
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise IndexLostError(f"the version's manifest can't be read: {error}") from None
