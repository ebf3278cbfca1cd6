"""Compares a table with its source while both may change.

There is no moment at which both are read. So a round finds out which keys may have changed between its two readings,
and leaves them to the next round:

1. E is where the topic ends. A change that is in the topic before E was made before step 2.
2. The source is read: a snapshot. Only keys and hashes are kept, in Spark, so that its transaction is short.
3. All that the snapshot saw gets into the topic, before E' or at E'. The sink passes E'.
4. S is the table's state then, and P its position. The keys of all messages from E to P are left out, since the
   snapshot and S may differ in them. All other keys are the same in both, or source and table differ.

The first round compares the whole table by checksums. Later ones compare single keys: those that were left out, and
those that differed. A key that differs counts only if it differs in two rounds, since a message may have been late.
When nothing changes, the first round finds nothing to leave out, and there is no other one.

If a message from E to P is a TRUNCATE, any key may have changed: the round says nothing, and is done again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.amounts import amount
from changelog.rows import PREFIX
from sink.databases.conversion import Conversion, Kind, Selected, conversion
from sink.databases.reading import Keys, wait_for_delivery
from sink.errors import ConfigError, RowdeltaError, TemporaryError, summary
from sink.sources.source import Position
from sink.sources.topics import Offsets
from sink.spark.expressions import quoted
from sink.spark.job_errors import JOB_ERRORS
from sink.spark.progress import Line, progress
from sink.spark.versions import to_arrow, try_cast
from sink.table.sink_state import position_in
from sink.table.table_plan import TablePlan
from sink.targets.seam import Table
from sink.verify import canonical
from sink.verify.canonical import comparable, misfit, value
from sink.verify.comparison import (
    ComparedColumns,
    Difference,
    Kept,
    checksums,
    differing,
    hashed,
    in_buckets,
    joined,
    shown_differences,
)
from sink.verify.source import VerifySource
from sink.verify.topic import Topic, TopicChanges

_ROUNDS = 6
"""Rounds at most. Keys that changed in each of them aren't compared."""
_LOOKED_UP, _LOOKED_UP_OF_SEVERAL = 100_000, 5_000
"""So many keys are looked up in the source: of one column, and of several, for which databases find no plan as cheap.
For more of them the source is read whole.
"""
_POLL_SECONDS = 0.5
_QUIET_SECONDS = 30.0
"""If the sink hasn't committed for so long, it may not be running."""
_SEEN, _TRIED = "seen", "tried"
"""Whether the key has differed before, and whether it was to be corrected."""


@dataclass(frozen=True)
class Patience:
    """:param settle: seconds that a change takes from the connector into the topic, at most.
    :param timeout: seconds that a round waits for the connector and the sink, at most.
    """

    settle: float
    timeout: float


@dataclass(frozen=True)
class Healed:
    """What came of a correction.

    :param count: how many keys are corrected.
    :param left_out: keys that changed meanwhile, and weren't corrected: their canonical columns. None if none did.
    """

    count: int
    left_out: DataFrame | None = None


Heal = Callable[[DataFrame, DataFrame, Keys | None, Offsets, Callable[[DataFrame], DataFrame]], Healed]


class Verdict(StrEnum):
    """What is known about a table."""

    EQUAL = "equal"
    PARTLY_EQUAL = "equal in what was compared"
    """Some keys changed in every round."""
    DIFFERENT = "different"
    UNCERTAIN = "uncertain"
    """Keys differed once, and no round was left to see whether they still do."""
    NOT_COMPARED = "not compared"
    """All keys changed in every round, or there was an error."""


@dataclass
class Outcome:
    """How a table compares with its source.

    :param position: the point of the source's history that the first round read, in words.
    :param table_state: the table's state that it was compared with, in words.
    :param source_rows: rows that the first round read.
    :param table_rows: likewise. Rows of keys that it left out aren't amount.
    :param not_compared: columns that aren't compared, and why.
    :param differences: the first ones.
    :param different: how many keys differ.
    :param compared: whether at least one key was compared, or there is none on both sides.
    :param changing: how many keys changed in every round, and weren't compared.
    :param healed: how many keys were corrected in the table. They are compared again, and those that differ still are
        among `different`.
    :param unconfirmed: how many keys differed in the last round, and not before. They may be equal by now.
    :param error: why the table couldn't be compared.
    :param dead_letters: how many dead letters the table has.
    """

    table: str
    source: str
    position: str = ""
    table_state: str = ""
    source_rows: int = 0
    table_rows: int = 0
    rounds: int = 0
    not_compared: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    different: int = 0
    compared: bool = False
    changing: int = 0
    unconfirmed: int = 0
    healed: int = 0
    dead_letters: int = 0
    error: RowdeltaError | None = None

    @property
    def verdict(self) -> Verdict:
        if self.error is not None:
            return Verdict.NOT_COMPARED
        if self.different:
            return Verdict.DIFFERENT
        if self.unconfirmed:
            return Verdict.UNCERTAIN
        if not self.compared:
            return Verdict.NOT_COMPARED
        return Verdict.PARTLY_EQUAL if self.changing else Verdict.EQUAL

    @property
    def is_equal(self) -> bool:
        return self.verdict in (Verdict.EQUAL, Verdict.PARTLY_EQUAL)

    @property
    def exit_code(self) -> int:
        """0 if it is equal, 1 if it differs, else as the error has it."""
        if self.error is not None:
            return self.error.exit_code
        if self.verdict is Verdict.DIFFERENT:
            return 1
        return 0 if self.is_equal else TemporaryError.exit_code


@dataclass(frozen=True)
class _Compared:
    """A compared column.

    :param field: its name in the source.
    :param conversion: how both sides are brought into one type.
    :param is_text_same: whether equal values have equal texts in source and table. A text 007 of the source is an
        integer 7 in the table.
    """

    name: str
    field: str
    conversion: Conversion
    is_uuid: bool
    is_text_same: bool


@dataclass(frozen=True)
class _Input:
    """A column that `where` depends on.

    :param field: its name in the source.
    :param value: its value in the table's type.
    """

    name: str
    field: str
    value: Column


@dataclass(frozen=True)
class _Condition:
    """Which of the source's rows the table wants (`where`).

    :param computed: the computed columns that it names.
    """

    text: str
    inputs: Sequence[_Input]
    computed: Mapping[str, Column]

    def wanted(self, frame: DataFrame) -> DataFrame:
        row = f"{PREFIX}row"
        columns = [column.value.alias(column.name) for column in self.inputs]
        named = frame.select(F.struct("*").alias(row), *columns)
        named = named.select("*", *(value.alias(name) for name, value in self.computed.items()))
        return named.where(F.expr(self.text)).select(f"{row}.*")


class Rounds:
    """:param topic: None if the table's source is files: then nothing is waited for.
    :param prefix: prefix of the sink's state in the table.
    :param heal: corrects keys in the table, each once (see `sink.verify.healing.Healing`). By default nothing is
        corrected.
    :raises ConfigError: a key column can't be compared, or the source lacks a column that `where` names.
    """

    def __init__(
        self,
        plan: TablePlan,
        target: Table,
        source: VerifySource,
        topic: Topic | None,
        prefix: str,
        patience: Patience,
        limit: int,
        heal: Heal | None = None,
    ) -> None:
        self._heal = heal
        self._target = target
        self._source = source
        self._topic = topic
        self._prefix = prefix
        self._section = plan.section
        self._patience = patience
        self._limit = limit
        self._spark: SparkSession = target.spark
        self.outcome = Outcome(target.name, source.name)
        self._compared = _compared(plan, target, source, self.outcome.not_compared)
        self._condition = _condition(plan, target, source)
        self._soft_delete, self._history = plan.changelog.soft_delete, plan.changelog.history
        names = [column.name for column in self._compared]
        key = plan.section.key or names  # in mode append rows are amount
        for name in key:
            if name not in names:
                raise ConfigError(
                    f"{target.name}: the key column {name} can't be compared ({self.outcome.not_compared.get(name)}). "
                    "Correct verify.table, or compare with a table that has it (verify.spark_table)."
                )
        types = [comparable(F.lit(None), column.conversion.dtype)[1] for column in self._compared]
        self._layout = ComparedColumns(names, types, [names.index(name) for name in key])

    def run(self) -> Outcome:
        """Compare.

        :raises TemporaryError: the sink didn't get far enough in time, or a job failed.
        """
        scope: Kept | None = None
        for number in range(1, _ROUNDS + 1):
            try:
                scope, is_done = self._round(scope)
            except JOB_ERRORS as error:
                raise TemporaryError(
                    f"{self._target.name}: a Spark job failed, so it isn't known whether the table is equal to "
                    f"{self._source.name}: {summary(error)}. Run again."
                ) from error
            self.outcome.rounds = number
            if is_done:
                break
        return self.outcome

    def _round(self, scope: Kept | None) -> tuple[Kept | None, bool]:
        """One round.

        :param scope: the keys to compare, with `_SEEN` and `_TRIED`. None means all.
        :return: the scope of the next round, and whether none is needed.
        """
        layout, name, key = self._layout, self._target.name, self._layout.key_columns
        begin = self._topic.ends() if self._topic is not None else {}
        read = self._read_source(scope)
        position = self._wait()
        source, table = read.rows, self._read_table(scope)
        changes = self._topic.changes(begin, position) if self._topic is not None else None
        if changes is not None and changes.empties:
            return scope, False
        changed = None if changes is None else self._keys(changes)
        if changed is not None:
            source, table = (joined(side, changed.rows, key, "left_anti") for side in (source, table))
        new = [F.lit(False).alias(_SEEN), F.lit(False).alias(_TRIED)]
        if scope is None:
            left = None if changed is None else Kept(changed.rows.select(*key, *new))
            with progress(self._spark, f"{name}: comparing checksums"):
                sums = checksums(source, table, layout, read.count)
            self.outcome.source_rows, self.outcome.table_rows = sums.source_rows, sums.table_rows
            self.outcome.compared = changed is None or sums.source_rows + sums.table_rows > 0
            if not sums.different:
                self.outcome.changing = 0 if left is None else left.count
                return left, left is None
            source, table = (in_buckets(side, sums, layout) for side in (source, table))
            what = f"{name}: comparing the keys of {sums.different:,} of {sums.buckets:,} buckets"
        else:
            left = None if changed is None else Kept(joined(scope.rows, changed.rows, key, "left_semi"))
            self.outcome.compared |= scope.count > (0 if left is None else left.count)
            what = f"{name}: comparing keys again, round {self.outcome.rounds + 1}"
        with progress(self._spark, what):
            rows = differing(source, table, layout)
            found = Kept(rows.select("*", *new) if scope is None else joined(rows, scope.rows, key, "inner"))
        counts = F.lit(scope is not None) & (F.col(_SEEN) | F.lit(not self._is_live))
        again = found.rows.where(~counts).select(*key, F.lit(True).alias(_SEEN), _TRIED)
        if scope is not None and found.count:
            if self._heal is None:
                self._tell(found.rows.where(counts))
            else:
                again = again.unionByName(self._healed(found.rows.where(counts), begin))
        following = Kept(again if left is None else again.unionByName(left.rows))
        self.outcome.changing = 0 if left is None else left.count
        self.outcome.unconfirmed = following.count - self.outcome.changing
        return following, not following.count

    @property
    def _is_live(self) -> bool:
        return self._source.is_live or self._topic is not None

    def _healed(self, found: DataFrame, begin: Offsets) -> DataFrame:
        """Correct keys in the table, each once. Returns them, to be compared again. What differs after that is told.

        :param begin: where the topic ended when the round began.
        """
        assert self._heal is not None
        names = self._layout.key_columns
        self._tell(found.where(_TRIED))
        keys = Kept(found.where(~F.col(_TRIED)).select(*names, "source_rows"))
        if keys.count:
            gone = keys.rows.where(F.col("source_rows") == 0).select(*names)
            texts = self._looked_up(keys)
            healed = self._heal(keys.rows.select(*names), gone, texts, begin, self._with_key)
            self.outcome.healed += healed.count
            if healed.left_out is not None:
                left = joined(keys.rows, healed.left_out, names, "left_semi")
                tried = joined(keys.rows, healed.left_out, names, "left_anti")
                return _flagged(left, names, tried=False).unionByName(_flagged(tried, names, tried=True))
        return _flagged(keys.rows, names, tried=True)

    def _with_key(self, frame: DataFrame) -> DataFrame:
        """A frame that has the table's columns, with the canonical columns of its key."""
        canonical_key = self._of_table(frame, self._layout.key, keep=True)
        return canonical_key.select(*frame.columns, *self._layout.key_columns)

    def _tell(self, found: DataFrame) -> None:
        """Keep differences for the outcome."""
        count = found.count()
        self.outcome.different += count
        room = min(count, self._limit - len(self.outcome.differences))
        if room > 0:
            self.outcome.differences += shown_differences(found, self._layout, room)

    def _read_source(self, scope: Kept | None) -> Kept:
        fields = list(dict.fromkeys(column.field for column in self._compared))  # columns may share one
        if self._condition is not None:
            fields = list(dict.fromkeys([*fields, *(column.field for column in self._condition.inputs)]))
        keys = self._looked_up(scope)
        with self._source.reading(fields, keys) as reading:
            if scope is None:
                self.outcome.position = reading.position
            columns: list[Column] = []
            for n, column in enumerate(self._compared):
                raw = F.col(quoted(column.field))
                made = column.conversion
                columns += _canonical(n, raw, made.source(raw), made.dtype, made.may_misfit, made.as_null)
            frame = reading.frame if self._condition is None else self._condition.wanted(reading.frame)
            rows = hashed(frame.select(*columns), self._layout, with_values=scope is not None)
            if scope is not None:
                rows = joined(rows, scope.rows, self._layout.key_columns, "left_semi")
            with progress(self._spark, f"{self._target.name}: reading {self._source.name}"):
                return Kept(rows)

    def _read_table(self, scope: Kept | None) -> DataFrame:
        snapshot = self._target.snapshot_id()
        reader = self._target.reader()
        frame = reader.frame(self._spark).limit(0) if snapshot is None else reader.current_frame(snapshot)
        if self._soft_delete is not None:  # the source doesn't have these rows any more
            frame = frame.where(~F.col(quoted(self._soft_delete.column)).eqNullSafe(F.lit(True)))
        if self._history is not None:
            frame = frame.where(F.col(quoted(self._history.current)))
        if scope is None:
            state = "empty" if snapshot is None else f"{self._target.snapshot_word} {snapshot}"
            self.outcome.table_state = state
        if scope is not None:  # before anything else is made of the rows
            frame = joined(self._with_key(frame), scope.rows, self._layout.key_columns, "left_semi")
        return hashed(self._of_table(frame, range(len(self._compared))), self._layout, with_values=scope is not None)

    def _of_table(self, frame: DataFrame, numbers: Sequence[int], *, keep: bool = False) -> DataFrame:
        """The canonical columns of a frame with the table's columns.

        :param keep: beside its own.
        """
        columns: list[Column] = [F.col(quoted(name)) for name in frame.columns] if keep else []
        for n in numbers:
            column = self._compared[n]
            raw = F.col(quoted(column.name))
            if column.is_uuid and isinstance(frame.schema[column.name].dataType, T.BinaryType):
                raw = F.lower(F.regexp_replace(F.hex(raw), "^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5"))
            converted = column.conversion.table(raw)
            columns += _canonical(n, raw, converted, column.conversion.dtype, column.conversion.table_may_misfit)
        return frame.select(*columns)

    def _keys(self, changes: TopicChanges) -> Kept | None:
        """The keys that were changed; None if there are none."""
        keys = Kept(self._of_table(changes.rows, self._layout.key).select(*self._layout.key_columns).distinct())
        return keys if keys.count else None

    def _looked_up(self, scope: Kept | None) -> Keys | None:
        """The scope as texts, if it is small, and its texts are those that the source has."""
        most = _LOOKED_UP if len(self._layout.key) == 1 else _LOOKED_UP_OF_SEVERAL
        key = [self._compared[n] for n in self._layout.key]
        if scope is None or scope.count > most or not all(column.is_text_same for column in key):
            return None
        texts = [canonical.shown(F.col(value(n)), self._layout.types[n]) for n in self._layout.key]
        rows = to_arrow(scope.rows.select(F.array(*texts).alias("key"))).column("key").to_pylist()
        if any(text is None for row in rows for text in row):
            return None
        return Keys([column.field for column in key], [tuple(row) for row in rows])

    def _wait(self) -> Position:
        """Wait until the table has all that the source's reading saw. The table is then in its newest state.

        :raises TemporaryError: it takes too long.
        """
        target = self._target
        if self._topic is None:
            target.refresh()
            return {}
        line = Line()
        until = time.monotonic() + self._patience.timeout
        try:
            self._wait_for_topic(line, until)
            ends = self._topic.ends()
            last: Position | None = None
            moved = time.monotonic()
            while True:
                target.refresh()
                position = self._position()
                left = self._topic.left(position, ends)
                if not left:
                    return position
                if position != last:
                    last, moved = position, time.monotonic()
                quiet = time.monotonic() - moved
                hint = f"; no commit for {quiet:.0f} s, does the sink run?" if quiet > _QUIET_SECONDS else ""
                text = f"{target.name}: the sink has {amount(left, 'message')} of {self._topic.name} before it"
                if time.monotonic() > until:
                    raise TemporaryError(
                        f"{text}, and verify has waited for {self._patience.timeout:.0f} s. Start the sink (rowdelta "
                        "run), or give it more time with --timeout."
                    )
                line.tell(f"{text}{hint}")
                time.sleep(_POLL_SECONDS)
        finally:
            line.clear()

    def _wait_for_topic(self, line: Line, until: float) -> None:
        """Wait until the topic has all that the source's reading saw."""
        if not self._source.is_live or self._topic is None:
            return
        name, newest = self._target.name, self._topic.since_now()
        try:
            wait_for_delivery(
                lambda: self._source.delivered(newest),
                self._patience.settle,
                until,
                lambda text: line.tell(f"{name}: waiting for the connector; {text}"),
            )
        except TimeoutError as error:
            raise TemporaryError(
                f"{name}: the changes of {self._source.name} don't get into {self._topic_name}: {error}. verify has "
                f"waited for {self._patience.timeout:.0f} s. Start the connector, or give it more time with --timeout."
            ) from None

    @property
    def _topic_name(self) -> str:
        return self._topic.name if self._topic is not None else ""

    def _position(self) -> Position:
        return position_in(self._target, self._prefix, self._section, self._target.position(self._prefix)) or {}


def _flagged(keys: DataFrame, names: Sequence[str], *, tried: bool) -> DataFrame:
    """Keys to be compared again: those that the correction has tried, and those that are to be corrected then."""
    return keys.select(*names, F.lit(not tried).alias(_SEEN), F.lit(tried).alias(_TRIED))


def _compared(plan: TablePlan, target: Table, source: VerifySource, not_compared: dict[str, str]) -> list[_Compared]:
    """The columns that can be compared. The others are added to `not_compared`, with the reason."""
    # what the record has is called in the source as in the table
    fields = {column.name: column.name if column.of_record else column.field for column in plan.changelog.columns}
    computed = {name for name, _ in plan.computed}
    known, unknown = source.columns(), source.unknown()
    lower = {name.lower(): name for name in known}
    types = {f.name: f.dataType for f in target.reader().frame(target.spark).schema}
    found = []
    for column in plan.columns:
        name = column.name
        if name in computed or name not in fields:
            not_compared[name] = "computed" if name in computed else "about the change, not of the source"
            continue
        if name in plan.changelog.ignored_nulls:
            not_compared[name] = "its NULLs are ignored"
            continue
        own = fields[name] if fields[name] in known else lower.get(fields[name].lower())
        if own is None:
            why = unknown.get(fields[name])
            not_compared[name] = f"of type {why} in the source" if why else f"the source has no column {fields[name]}"
            continue
        made = conversion(known[own], types[name])
        if made is None:
            kind = known[own].kind.name.lower()
            not_compared[name] = f"how a source's {kind} is a {types[name].simpleString()} isn't known"
            continue
        found.append(_Compared(name, own, made, column.is_uuid, _is_text_same(known[own], made)))
    taken = {column.field for column in found} | {fields[name] for name in not_compared if name in fields}
    excluded = set(plan.section.exclude)
    for name in [*known, *unknown]:
        if name not in taken and name not in excluded:
            not_compared[name] = "the table has no such column"
    return found


def _condition(plan: TablePlan, target: Table, source: VerifySource) -> _Condition | None:
    """:raises ConfigError: the source lacks a column that the condition depends on."""
    where, text = plan.changelog.where, plan.section.where
    if where is None or text is None:
        return None
    columns, known = {column.name: column for column in plan.changelog.columns}, source.columns()
    lower, inputs = {name.lower(): name for name in known}, []
    for name in sorted(where.inputs):
        column = columns.get(name)
        own = None if column is None else lower.get(column.field.lower())
        made = None if column is None or own is None else conversion(known[own], column.type)
        if column is None or own is None or made is None:
            raise ConfigError(
                f"{target.name}: where needs {name}, which {source.name} doesn't have, or not as a column of the "
                "table's type: nothing tells which of its rows the table wants. Compare with a table that has it "
                "(verify.spark_table)."
            )
        inputs.append(_Input(name, own, try_cast(made.source(F.col(quoted(own))), column.type)))
    types = {column.name: column.type for column in plan.columns}
    computed = {name: F.expr(text).cast(types[name]) for name, text in plan.computed if name in where.computed}
    return _Condition(text, inputs, computed)


def _is_text_same(selected: Selected, made: Conversion) -> bool:
    if isinstance(made.dtype, T.IntegralType):
        return selected.kind is Kind.INTEGER
    return isinstance(made.dtype, T.StringType)


def _canonical(
    number: int, raw: Column, converted: Column, dtype: T.DataType, may_misfit: bool, as_null: Sequence[str] = ()
) -> list[Column]:
    """The columns of a canonical frame for one compared column (`sink.verify.canonical`).

    :param as_null: texts of raw values, in capitals, that mean null.
    """
    columns = [comparable(converted, dtype)[0].alias(value(number))]
    if may_misfit:
        text = raw.cast("string")
        is_lost = raw.isNotNull() & converted.isNull()
        if as_null:
            is_lost &= ~F.upper(text).isin(*as_null)
        columns.append(F.when(is_lost, text).alias(misfit(number)))
    return columns
