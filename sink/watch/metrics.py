"""The state as metrics for Prometheus. `docs/metrics.md` lists them with the alert that each is for.

Series are bounded. The first `SHOWN_TABLES` tables have a label each, and so have up to `_MOST_PARTS` topic-partitions.
What is beyond that shares the label `(others)`: its counts are summed up, and of ages the highest one counts. Only one
histogram exists, over all tables: with one for each table and stage it would be most of the series.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from changelog.rows import RowKind
from sink.sources.source import Slot
from sink.table.observer import EngineSeen
from sink.watch.state import MOST_NAME, OTHERS, SHOWN_TABLES, Reading, State, Table, words

_MOST_PARTS = 5_000

Value = tuple[tuple[str, ...], float | None]
"""Labels and a number; None if it isn't known."""

_KINDS = {
    RowKind.INSERT.short: "insert",
    RowKind.UPDATE_BEFORE.short: "update_before",
    RowKind.UPDATE_AFTER.short: "update_after",
    RowKind.DELETE.short: "delete",
    "TRUNCATE": "truncate",
    "late": "late",
    "ignored": "ignored",
}


@dataclass(frozen=True)
class OfTable:
    """A metric of each table.

    :param name: as it is declared. Prometheus's client adds `_total` to the names of counters.
    :param of: the values of a table at a time (seconds of the monotonic clock), with their labels beside `table`.
    :param unite: how the values of tables without a label of their own become one.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    of: Callable[[Table, float], Iterable[Value]]
    labels: tuple[str, ...] = ()
    unite: Callable[[Iterable[float]], float] = sum


def _one(value: float | None) -> list[Value]:
    return [((), value)]


def _counts(counts: "dict[str, int] | dict[str, float]") -> list[Value]:
    return [((label,), value) for label, value in counts.items()]


def _rewriting(figure: str) -> Callable[[Table, float], list[Value]]:
    return lambda table, _: [
        ((kind.replace(" ", "_").replace("-", "_"),), value)
        for (kind, name), value in table.rewrites.items()
        if name == figure
    ]


def _parts(table: Table, seconds: bool) -> Iterator[Value]:
    if table.parts is None or table.unit != "messages":
        return
    for part, behind in table.parts.items():
        topic, _, partition = part.rpartition("-")  # of several topics
        yield (topic or table.source, partition), behind.seconds if seconds else behind.count


OF_TABLES = (
    OfTable(
        "rowdelta_seconds_since_last_commit",
        "gauge",
        "Seconds since the table's last commit, or since it was found if there is none.",
        lambda table, now: _one(table.since_commit(now)),
        unite=max,
    ),
    OfTable(
        "rowdelta_overdue_seconds",
        "gauge",
        "For how many seconds the table has had something to apply, or has failed, without a commit.",
        lambda table, now: _one(table.overdue(now)),
        unite=max,
    ),
    OfTable(
        "rowdelta_table_failed",
        "gauge",
        "1 while the table is set aside because of an error.",
        lambda table, _: _one(table.status == "failed"),
    ),
    OfTable(
        "rowdelta_failures",
        "counter",
        "Errors that set the table aside, by the class of the error.",
        lambda table, _: _counts(table.failures),
        ("error",),
    ),
    OfTable(
        "rowdelta_lag_records",
        "gauge",
        "Messages in the topic-partition that the table's last commit hasn't applied.",
        lambda table, _: _parts(table, seconds=False),
        ("topic", "partition"),
    ),
    OfTable(
        "rowdelta_lag_seconds",
        "gauge",
        "Age of the oldest message in the topic-partition that isn't applied, by its timestamp.",
        lambda table, _: _parts(table, seconds=True),
        ("topic", "partition"),
        max,
    ),
    OfTable(
        "rowdelta_lag_files",
        "gauge",
        "Change files in the table's directory that its last commit hasn't applied.",
        lambda table, _: _one(table.behind if table.unit == "files" else None),
    ),
    OfTable(
        "rowdelta_lag_oldest_file_seconds",
        "gauge",
        "Age of the oldest of these files, by its modification time.",
        lambda table, _: _one(table.behind_seconds if table.unit == "files" else None),
        unite=max,
    ),
    OfTable(
        "rowdelta_rows",
        "counter",
        "Changes, by kind. All but late and ignored ones were applied.",
        lambda table, _: [((_KINDS[kind],), count) for kind, count in table.rows.items() if kind in _KINDS],
        ("kind",),
    ),
    OfTable("rowdelta_commits", "counter", "Micro-batches committed.", lambda table, _: _one(table.commits)),
    OfTable(
        "rowdelta_commit_attempts",
        "counter",
        "Times that a commit was sent to the catalog or the log.",
        lambda table, _: _one(table.attempts),
    ),
    OfTable(
        "rowdelta_commit_refusals",
        "counter",
        "Attempts that were not committed, by reason.",
        lambda table, _: [((reason.replace(" ", "_"),), count) for reason, count in table.refusals.items()],
        ("reason",),
    ),
    OfTable(
        "rowdelta_stage_seconds",
        "counter",
        "Seconds in each stage of micro-batches: index, write, prepare, commit.",
        lambda table, _: _counts(table.stage_seconds),
        ("stage",),
    ),
    OfTable(
        "rowdelta_written_files",
        "counter",
        "Files that micro-batches added, by content.",
        lambda table, _: [((content.lower(),), count) for content, count in table.files.items()],
        ("content",),
    ),
    OfTable(
        "rowdelta_written_bytes",
        "counter",
        "Bytes of these files.",
        lambda table, _: [((content.lower(),), size) for content, size in table.bytes.items()],
        ("content",),
    ),
    OfTable(
        "rowdelta_live_files",
        "gauge",
        "Files that a reader of the whole table opens: data files, and delete files or data files with a vector.",
        lambda table, _: (
            [] if table.live is None else [(("data",), table.live.data), (("deletes",), table.live.deletes)]
        ),
        ("content",),
    ),
    OfTable(
        "rowdelta_dead_letters",
        "counter",
        "Records that could not be applied, by error class.",
        lambda table, _: _counts(table.dead_letters),
        ("error_class",),
    ),
    OfTable(
        "rowdelta_index_bytes",
        "gauge",
        "Bytes of the key index's runs.",
        lambda table, _: _one(None if table.index is None else table.index.bytes),
    ),
    OfTable(
        "rowdelta_index_entries",
        "gauge",
        "Entries in these runs. A key has one for each of its last changes, until runs are merged.",
        lambda table, _: _one(None if table.index is None else table.index.keys),
    ),
    OfTable(
        "rowdelta_index_probe_seconds",
        "counter",
        "Seconds in which tasks looked keys up in the index, all tasks together.",
        lambda table, _: _one(table.probe_seconds),
    ),
    OfTable(
        "rowdelta_rewrites",
        "counter",
        "Compactions, and micro-batches with copy-on-write, that replaced files, by kind.",
        _rewriting("runs"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_files_seen",
        "counter",
        "Live files of the table before each of them: the total of which some are touched.",
        _rewriting("total"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_files_touched",
        "counter",
        "Files that they read and replaced.",
        _rewriting("touched"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_files_written",
        "counter",
        "Files that they wrote instead.",
        _rewriting("rewritten"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_rows",
        "counter",
        "Rows that micro-batches with copy-on-write copied. Compactions don't tell theirs.",
        _rewriting("rows"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_bytes",
        "counter",
        "Bytes that they read. Delta's OPTIMIZE doesn't tell them.",
        _rewriting("bytes"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_bytes_written",
        "counter",
        "Bytes that they wrote instead. Compactions by a procedure of the format don't tell theirs.",
        _rewriting("bytes written"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_scan_seconds",
        "counter",
        "Seconds that it took to find these files.",
        _rewriting("scan"),
        ("kind",),
    ),
    OfTable(
        "rowdelta_rewrite_seconds",
        "counter",
        "Seconds that it took to read, write and commit; of copy-on-write without the commit.",
        _rewriting("rewrite"),
        ("kind",),
    ),
)


class StateCollector(Collector):
    """Makes all metrics from a state, each time it is asked."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        is_ready, is_live = not self._state.not_ready(), self._state.live() is None
        with self._state.read() as reading:
            # all of them here, so that the state isn't locked while they become text
            made = [*self._of_sink(reading, is_ready, is_live), *(_family(metric, reading) for metric in OF_TABLES)]
        yield from made

    def _of_sink(self, reading: Reading, is_ready: bool, is_live: bool) -> Iterator[Metric]:
        info = GaugeMetricFamily("rowdelta_info", "Always 1; the labels say what runs.", labels=["sink", "version"])
        info.add_metric([self._state.sink, self._state.version], 1)
        yield info
        for name, text, value in (
            ("rowdelta_live", "1 if the run goes on, as /healthz/live says.", float(is_live)),
            ("rowdelta_ready", "1 if no table is overdue, as /healthz/ready says.", float(is_ready)),
            ("rowdelta_uptime_seconds", "Seconds since the start.", reading.uptime),
            ("rowdelta_lag_known", "1 if the source answered when it was last asked.", float(reading.lags_known)),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield from _of_connector(reading)
        tables = GaugeMetricFamily("rowdelta_tables", "Number of tables, by status.", labels=["status"])
        statuses = [table.status for table in reading.tables.values()]
        for status in ("opening", "working", "waiting", "failed"):
            tables.add_metric([status], statuses.count(status))
        yield tables
        memory = GaugeMetricFamily(
            "rowdelta_memory_peak_bytes",
            "Highest use of memory seen: of the driver's Python, the JVM's heap, a Python worker.",
            labels=["process"],
        )
        for process, size in reading.memory.items():
            memory.add_metric([process], size)
        yield memory
        durations = reading.batch_seconds
        yield HistogramMetricFamily(
            "rowdelta_microbatch_seconds",
            "Seconds from the beginning of a micro-batch's attempt to its commit, of all tables.",
            buckets=list(durations.buckets()),
            sum_value=durations.sum,
        )


_OF_SLOTS: tuple[tuple[str, str, Callable[[Slot], float | None]], ...] = (
    ("active", "1 while somebody reads the replication slot.", lambda slot: slot.is_active),
    ("retained_bytes", "Bytes of its log that the database keeps for the slot.", lambda slot: slot.retained),
    ("unread_bytes", "Bytes of the database's log that the slot's reader hasn't confirmed.", lambda slot: slot.unread),
)


_OF_ENGINE: tuple[tuple[str, str, Callable[[EngineSeen, float], float | None]], ...] = (
    ("engine_reading", "1 while Debezium's engine reads the database's log.", lambda engine, _: engine.is_reading),
    (
        "engine_last_event_seconds",
        "Seconds since its last event.",
        lambda engine, now: None if engine.held.last_event is None else now - engine.held.last_event / 1000,
    ),
    ("buffer_events", "Events in its buffer that a table hasn't applied.", lambda engine, _: engine.held.events),
    ("buffer_bytes", "Bytes of the buffer's files in which they are.", lambda engine, _: engine.held.bytes),
)
"""With the time, in seconds since 1970."""


def _of_connector(reading: Reading) -> Iterator[Metric]:
    engine = reading.engine
    for name, text, seen in _OF_ENGINE:
        value = None if engine is None else seen(engine, reading.wall)
        yield GaugeMetricFamily(f"rowdelta_{name}", text, value=value)
    failures = None if engine is None else engine.failures
    yield CounterMetricFamily("rowdelta_engine_failures", "Times that it has ended by itself.", value=failures)
    for name, text, of in _OF_SLOTS:
        slots = GaugeMetricFamily(f"rowdelta_slot_{name}", text, labels=["slot"])
        for slot in reading.slots:
            if (size := of(slot)) is not None:
                slots.add_metric([slot.name], size)
        yield slots


def _family(metric: OfTable, reading: Reading) -> Metric:
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.name, metric.help, labels=["table", *metric.labels])
    others: dict[tuple[str, ...], list[float]] = {}
    has_parts, left = "partition" in metric.labels, _MOST_PARTS
    for table in reading.tables.values():
        values = [(labels, value) for labels, value in metric.of(table, reading.now) if value is not None]
        if has_parts:
            left -= len(values)
        if table.number < SHOWN_TABLES and left >= 0:
            name = table.shown
            for labels, value in values:
                family.add_metric([name, *(words(label, MOST_NAME) for label in labels)], value)
        else:
            for labels, value in values:
                others.setdefault((OTHERS,) * len(labels) if has_parts else labels, []).append(value)
    for labels, united in others.items():
        family.add_metric([OTHERS, *labels], metric.unite(united))
    return family


def registry(state: State) -> CollectorRegistry:
    """A registry of its own: what other libraries have put into the process's is not ours to show."""
    made = CollectorRegistry(auto_describe=False)
    made.register(StateCollector(state))
    return made
