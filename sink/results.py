"""What tasks tell: plain values, which go to the driver as JSON. They know no Spark."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from changelog.decoding import Fact, SnapshotMark, Stated
from deltawriters.keyindex import RunInfo


@dataclass(frozen=True)
class IndexPart:
    """A task's part of the key index.

    :param runs: of the keys that the task wrote.
    :param merged: of earlier runs that it merged.
    :param old_rows: the keys' earlier rows (`deltawriters.old_rows.tell`).
    :param new_vectors: what has deletes of rows in the task's own data files, by their paths.
    :param keys: number of keys, by what became of them.
    :param completed_from: paths of the data files that have the rows on which changes build.
    :param probe_seconds: that it took to look keys up.
    :param deleted: files of deleted keys (`deltawriters.tombstones`): name, and number of keys.
    :param truncates: the order values with which the source emptied its table, in hexadecimal digits. Empty in an index
        without order values.
    :param depends_on_others: what was written for some keys is right only if others write no row of them before the
        commit.
    """

    runs: list[RunInfo]
    merged: list[RunInfo]
    old_rows: list[dict[str, Any]]
    new_vectors: dict[str, Any]
    keys: dict[str, int]
    completed_from: list[str]
    probe_seconds: float
    deleted: list[tuple[str, int]] = field(default_factory=list)
    truncates: list[str] = field(default_factory=list)
    depends_on_others: bool = False

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        runs = {name: [RunInfo.from_json(run) for run in json[name]] for name in ("runs", "merged")}
        return cls(**{**json, **runs, "deleted": [(name, rows) for name, rows in json["deleted"]]})


@dataclass(frozen=True)
class TaskResult:
    """What a task wrote.

    :param files: data and delete files, as JSON in the format's terms.
    :param rows: number of changes, by kind.
    :param records: number of rows in files, by the files' content.
    :param contents: number of files and their bytes, by content.
    :param truncates: how often the source emptied the table.
    :param left: number of removals that left another row of their key in place (`deltawriters.moves.Settled`).
    :param untold: likewise.
    :param late: number of changes whose order value was below what the table holds for their key.
    :param ignored: number of removals that weren't applied.
    :param bad: number of bad records, by class.
    :param undecoded: number of those with `BadRecord.DECODER_FAILED`, by the exception that the format raised.
    :param samples: a few of them, for people.
    :param dead_letters: files of the dead-letter table, as JSON, and `dead_letter_paths` are their paths.
    :param snapshot_partitions: see `sink.spark.snapshots.SnapshotRows`.
    :param streamed_partitions: likewise.
    :param last_snapshot: likewise, as pairs.
    :param first_streamed: likewise, as pairs.
    :param peak_memory: of the task's process, in bytes.
    :param index: None if the table has no key index.
    """

    files: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    records: dict[str, int] = field(default_factory=dict)
    contents: dict[str, tuple[int, int]] = field(default_factory=dict)
    truncates: int = 0
    left: int = 0
    untold: int = 0
    late: int = 0
    ignored: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    undecoded: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    dead_letters: list[str] = field(default_factory=list)
    dead_letter_paths: list[str] = field(default_factory=list)
    snapshot_partitions: list[int] = field(default_factory=list)
    streamed_partitions: list[int] = field(default_factory=list)
    last_snapshot: list[tuple[int, int]] = field(default_factory=list)
    first_streamed: list[tuple[int, int]] = field(default_factory=list)
    peak_memory: int = 0
    index: IndexPart | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        index = None if json["index"] is None else IndexPart.from_json(json["index"])
        return cls(**{**json, "index": index})


@dataclass(frozen=True)
class ShareResult:
    """What a task wrote of one of several tables.

    :param table: its `TableSection.id`.
    :param observed: what the table can't store (`changelog.observed_types.Observed`).
    :param stated: what the messages state.
    """

    table: str
    written: TaskResult
    observed: Mapping[str, str]
    stated: Stated

    def to_json(self) -> dict[str, Any]:
        # JSON has no tuples as names
        stated = [(asdict(said) if isinstance(said, SnapshotMark) else said, at) for said, at in self.stated.items()]
        return {**vars(self), "written": self.written.to_json(), "stated": stated}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        stated: dict[Fact, tuple[int, int]] = {}
        for fact, (partition, offset) in json["stated"]:
            made = SnapshotMark(**fact) if isinstance(fact, dict) else fact if isinstance(fact, str) else tuple(fact)
            stated[made] = partition, offset
        return cls(json["table"], TaskResult.from_json(json["written"]), json["observed"], stated)
