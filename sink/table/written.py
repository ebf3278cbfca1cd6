"""An attempt at a micro-batch: from which state of the table it starts, and what its tasks wrote, summed up for the
commit and the log.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from changelog.amounts import amount, amounts, sized
from changelog.decoding import Stated
from changelog.rows import BadRecord, RowKind
from deltawriters import TableSpec
from deltawriters.keyindex import IndexSlice
from sink.results import IndexPart, TaskResult
from sink.routing import KeyHash
from sink.sources.source import Work

log = logging.getLogger("rowdelta")


@dataclass(frozen=True)
class Begun:
    """The state from which an attempt to write a micro-batch starts.

    :param operation: id of the attempt.
    :param spec: the table for which files are written.
    :param empty: whether the table has no rows.
    :param global_deletes: see `DeltaOptions`.
    :param index: the key index of the table's rows, if it has one.
    :param sequence: sequence number of the runs that the tasks add to the index.
    :param hash: how the index hashes keys, if there is one.
    :param started: when the attempt began (`time.monotonic`).
    :param opening: the `opening` of the dead-letter table (`DeadLetters`).
    :param letters: the last commit of the table's bad records (`DeadLetters.operation`).
    :param work: see `TableBatch`.
    :param absent_before: see `DeltaOptions`.
    :param index_seconds: how long it took to bring the index up to the table.
    """

    operation: str
    spec: TableSpec
    empty: bool
    global_deletes: bool
    index: IndexSlice | None
    sequence: int
    hash: KeyHash | None
    started: float
    opening: int
    letters: str | None
    index_seconds: float = 0.0
    work: Work = "micro-batch"
    absent_before: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """What the tasks of an attempt wrote (`sink.spark.tasks.write.run`), before its commit.

    :param begun: the state for which they wrote.
    :param seconds: from the beginning of the attempt to the end of its tasks.
    :param files: data and delete files, as `ContentFileParser` JSON.
    :param dead_letters: files of the dead-letter table, likewise.
    :param dead_letter_paths: their paths.
    :param rows: number of changes, by kind.
    :param snapshot_partitions: see `sink.spark.snapshots.SnapshotRows`.
    :param streamed_partitions: likewise.
    :param repeated_partitions: those in which rows of a snapshot come after other rows of the micro-batch.
    :param undecoded: number of bad records with `BadRecord.DECODER_FAILED`, by the exception that the format raised.
    :param records: number of rows in files, by the files' content.
    :param index: each task's part of the key index.
    :param left: number of removals that left another row of their key in place (`deltawriters.moves.Settled`).
    :param untold: likewise.
    :param late: number of changes that weren't applied, since the table has later ones of their keys.
    :param ignored: number of deletes that weren't applied, since the table is to keep all rows.
    :param truncates: how often the source emptied the table. The files then have all rows that it has now.
    :param tasks: number of tasks.
    :param contents: number of files of the table and their bytes, by content.
    :param observed: what the messages have and the table can't store (`changelog.observed_types.Observed`).
    :param stated: keys and tables that the messages state.
    """

    begun: Begun
    seconds: float
    files: list[str]
    dead_letters: list[str]
    dead_letter_paths: list[str]
    rows: dict[str, int]
    records: dict[str, int]
    bytes: int
    bad_by_class: dict[str, int]
    undecoded: dict[str, int]
    samples: list[str]
    snapshot_partitions: set[int]
    streamed_partitions: set[int]
    repeated_partitions: set[int]
    peak_memory: int
    index: list[IndexPart]
    left: int
    untold: int
    late: int
    ignored: int
    truncates: int
    tasks: int
    contents: Mapping[str, tuple[int, int]]
    observed: Mapping[str, str]
    stated: Stated

    @property
    def bad(self) -> int:
        return sum(self.bad_by_class.values())

    @property
    def counts(self) -> dict[str, int]:
        """For people: changes by kind, each TRUNCATE, and late changes and deletes that were left out."""
        others = {"TRUNCATE": self.truncates, "late": self.late, "ignored": self.ignored}
        return {name: count for name, count in others.items() if count} | self.rows

    def undecoded_since(self, before: int) -> int:
        """How many successive records the format has failed on (`BadRecord.DECODER_FAILED`).

        :param before: the count before this micro-batch. The count starts again at 0 if the format could read a record.
        """
        failed = self.bad_by_class.get(BadRecord.DECODER_FAILED, 0)
        others = self.truncates or self.late or self.ignored or any(self.rows.values())
        return 0 if others or self.bad > failed else before + failed

    @property
    def read(self) -> int:
        """About how many records there were. Most records of updates have both the row before and the row after."""
        return (
            sum(self.rows.values())
            - self.rows.get(RowKind.UPDATE_BEFORE.short, 0)
            + self.late
            + self.ignored
            + self.bad
        )

    def failing_alike(self, most: int) -> str | None:
        """The exception that the format raised on so many records that it is at fault, rather than they: on more than
        `most`, which are at least half of all. Of fewer, `undecoded_since` keeps count over micro-batches: a few wrong
        records must not stop a table for good, and change files can't be cut into smaller micro-batches.
        """
        for exception, count in self.undecoded.items():
            if count > most and 2 * count >= self.read:
                return exception
        return None

    def shown(self, *, copies: bool) -> str:
        """Text for the log: changes, files, deletes, facts from the key index, bad records.

        :param copies: files with earlier rows are replaced, so that these rows aren't deleted by position.
        """
        rows = " ".join(f"{kind} {count:,}" for kind, count in self.counts.items() if count) or "no changes"
        earlier = 0 if copies else sum(map(self.keys, ("updated", "deleted", "duplicates")))
        bad = f", {amount(self.bad, 'dead letter')}" if self.bad else ""
        moved = f"; {amount(self.left, 'row')} stayed whose key another row left" if self.left else ""
        records = amounts(
            {
                "row": self.records["DATA"],
                "equality delete": self.records["EQUALITY_DELETES"],
                "position delete": self.records["POSITION_DELETES"] + earlier,
            },
            none="nothing to write",
        )
        files = f"{amount(len(self.files), 'file')}, {sized(self.bytes)}: {records}" if self.files else records
        return f"{rows} | {files}{self._shown_keys()}{moved}{bad}"

    def _shown_keys(self) -> str:
        """What the key index says about the micro-batch's keys."""
        if not self.index:
            return ""
        names = {
            "inserted": "new",
            "updated": "updated",
            "deleted": "deleted",
            "absent": "inserted and deleted within the micro-batch, or never there",
            "duplicates": "duplicate rows removed",
            "completed": "completed from the table's rows",
        }
        found = ", ".join(f"{count:,} {shown}" for name, shown in names.items() if (count := self.keys(name)))
        return f"; keys: {found}" if found else ""

    @property
    def probe_seconds(self) -> float:
        """That the tasks, all together, took to look keys up."""
        return float(sum(part.probe_seconds for part in self.index))

    def keys(self, name: str) -> int:
        return sum(part.keys[name] for part in self.index)

    @property
    def metrics(self) -> dict[str, int]:
        """Numbers about the work, by the names that Delta has for those of an update."""
        return {
            "scanTimeMs": int(self.begun.index_seconds * 1000),
            "rewriteTimeMs": int((self.seconds - self.begun.index_seconds) * 1000),
            "numSourceRows": sum(self.rows.values()),
            "numTargetRowsInserted": self.keys("inserted"),
            "numTargetRowsUpdated": self.keys("updated"),
            "numTargetRowsDeleted": self.keys("deleted"),
        }


def sum_up(
    begun: Begun, tasks: int, results: Sequence[TaskResult], observed: Mapping[str, str], stated: Stated
) -> Written:
    """Add up the results of all tasks, which have just ended. See `Written`."""
    rows: dict[str, int] = {}
    bad, undecoded = Counter[str](), Counter[str]()
    records = {"DATA": 0, "EQUALITY_DELETES": 0, "POSITION_DELETES": 0}
    contents: dict[str, tuple[int, int]] = {}
    for result in results:
        for content, (count, size) in result.contents.items():
            files, total = contents.get(content, (0, 0))
            contents[content] = files + count, total + size
        for kind, count in result.rows.items():
            rows[kind] = rows.get(kind, 0) + count
        for content, count in result.records.items():
            records[content] += count
        bad.update(result.bad)
        undecoded.update(result.undecoded)
    last_snapshot = [found for result in results for found in result.last_snapshot]
    first_streamed: dict[int, int] = {}
    for p, place in (found for result in results for found in result.first_streamed):
        first_streamed[p] = min(place, first_streamed.get(p, place))
    return Written(
        begun,
        time.monotonic() - begun.started,
        files=[file for result in results for file in result.files],
        dead_letters=[file for result in results for file in result.dead_letters],
        dead_letter_paths=[path for result in results for path in result.dead_letter_paths],
        rows=rows,
        records=records,
        bytes=sum(size for _, size in contents.values()),
        bad_by_class=dict(bad),
        undecoded=dict(undecoded),
        samples=[sample for result in results for sample in result.samples][:3],
        snapshot_partitions={p for result in results for p in result.snapshot_partitions},
        streamed_partitions={p for result in results for p in result.streamed_partitions},
        repeated_partitions={p for p, place in last_snapshot if p in first_streamed and first_streamed[p] < place},
        index=[result.index for result in results if result.index is not None],
        contents=contents,
        left=sum(result.left for result in results),
        untold=sum(result.untold for result in results),
        late=sum(result.late for result in results),
        ignored=sum(result.ignored for result in results),
        # each task gets every TRUNCATE
        truncates=max((result.truncates for result in results), default=0),
        peak_memory=max((result.peak_memory for result in results), default=0),
        tasks=tasks,
        observed=observed,
        stated=stated,
    )
