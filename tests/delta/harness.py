"""A job whose target is a Delta table: `tests.sink.harness.Job`, with the table as Delta's own Spark reader, the model
of its log and readers without delta-spark see it.

    job = DeltaJob(spark, tmp_path)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    job.sql("DELETE FROM {t} WHERE id = 1")
    job.check()
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession

from sink.spark.versions import to_arrow
from sink.targets.delta.actions import Proposal
from sink.targets.delta.commit import DeltaCommitter
from sink.targets.delta.log import DeltaLog as SinkLog
from sink.targets.locations import in_one_form
from tests.delta.log_model import DeltaLog
from tests.delta.readers import NAMES, READERS, Rows, plain
from tests.delta.snapshot import Snapshot
from tests.sink import harness
from tests.sink.harness import Job, Row, arrow_type, live_entries

crashing = partial(harness.crashing, of=DeltaCommitter)
before_rewrite = partial(harness.before_rewrite, of=DeltaCommitter)


@dataclass
class DeltaJob(Job):
    """See `Job`. The table is in a warehouse folder of the job's own."""

    catalog: ClassVar[str] = "deltas"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read: tuple[set[tuple[str, int, int]], pa.Table] = (set(), None)

    @property
    def warehouse(self) -> Path:
        return self.folder / "warehouse"

    @property
    def catalog_options(self) -> dict[str, str]:
        return {"type": "delta", "warehouse": str(self.warehouse)}

    def sql(self, statement: str) -> list[dict[str, Any]]:
        """What another writer does, by Delta's own SQL.

        :param statement: `{t}` is the table.
        """
        return [row.asDict() for row in self.spark.sql(statement.replace("{t}", self.sql_name())).collect()]

    def sql_name(self) -> str:
        return f"delta.`{self.table_folder}`"

    def create(self, columns: str, *, more: str = "", properties: Mapping[str, str] | None = None) -> None:
        """Create the table beforehand, as somebody else does.

        :param more: for example PARTITIONED BY.
        :param properties: beside those that the sink needs.
        """
        needed = {"delta.enableDeletionVectors": "true", "delta.feature.domainMetadata": "supported"}
        texts = ", ".join(f"'{name}' = '{value}'" for name, value in (needed | dict(properties or {})).items())
        self.sql(f"CREATE TABLE {{t}} ({columns}) USING delta {more} TBLPROPERTIES ({texts})")

    def frame(self, version: int | None = None) -> DataFrame:
        """The table as Delta's reader sees it.

        :param version: of time travel; None for the newest.
        """
        reader = self.spark.read.format("delta")
        return (reader if version is None else reader.option("versionAsOf", version)).load(str(self.table_folder))

    def rows(self, table: str | None = None) -> list[dict[str, Any]]:
        """The table's rows in the order of their keys, read by Delta."""
        found = self.content() if table is None else to_arrow(self.spark.table(table))
        rows: list[dict[str, Any]] = found.to_pylist()
        return sorted(rows, key=lambda row: [row[name] for name in self.key])

    def content(self) -> pa.Table:
        """The table as Delta's reader sees it. It isn't read again if no file in its folder has changed since: most
        tests ask for the rows, and then check them.
        """
        files = {(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in self.table_folder.rglob("*")}
        if not files or files != self._read[0]:
            self._read = (files, to_arrow(self.frame()))
        return self._read[1]

    def append(self, rows: Sequence[Row]) -> None:
        path = self._hidden_file()
        pq.write_table(pa.Table.from_pylist(list(rows), schema=self.arrow_schema()), path)
        self.spark.read.parquet(str(path)).write.format("delta").mode("append").save(str(self.table_folder))
        path.unlink()

    def arrow_schema(self) -> pa.Schema:
        return pa.schema([(name, arrow_type(sql_type)) for name, sql_type in self.columns.items()])

    @property
    def log(self) -> DeltaLog:
        """The model of the table's log."""
        return DeltaLog(self.table_folder)

    def snapshot(self) -> Snapshot:
        return self.log.snapshot()

    def version(self) -> int:
        return self.log.versions[-1]

    def operations(self) -> list[str]:
        """The operation of each version that is still there, oldest first."""
        return [info["operation"] for _, info in sorted(self.log.history().items())]

    def vectors(self) -> dict[str, Mapping[str, Any]]:
        """The live deletion vectors by the name of their data files."""
        files = self.snapshot().files
        return {Path(path).name: add["deletionVector"] for (path, _), add in files.items() if "deletionVector" in add}

    def stored(self) -> dict[str, Any]:
        """The position as the sink's domain has it."""
        state = json.loads(self.snapshot().domains[f"rowdelta.{self.sink_id}"])
        stored: dict[str, Any] = json.loads(state["position"])
        newer = json.loads(state.get("index", "{}"))
        return stored | newer if newer.get("operation") == stored["operation"] else stored

    def check(self, *, readers: Iterable[str] = NAMES, travel: Sequence[int] = (), since: int = 0) -> Rows:
        """Check that the log keeps the protocol, and that all readers see the same rows.

        :param readers: in `NAMES`. Those that aren't installed are left out.
        :param travel: versions that are compared too.
        :param since: see `DeltaLog.check`.
        :return: the rows.
        """
        log = self.log
        log.check(files_since=since)
        seen = plain(self.content())
        assert plain(log.rows()) == seen, "the model of the log"
        for version in travel:
            assert plain(log.rows(version)) == plain(to_arrow(self.frame(version))), f"version {version}"
        for name in READERS.keys() & set(readers):
            assert READERS[name](self.table_folder) == seen, name
        return seen

    def check_deletes(self) -> None:
        """Check that no data file has two live vectors, and none was removed without its own."""
        self.log.snapshot()

    def check_index(self) -> dict[tuple[Any, ...], set[tuple[int, int]]] | None:
        stored, version = self.stored(), self.version()
        if "index" not in stored:
            return None
        base = stored["index"]["base"]
        if version != base + 1 or version not in self.log.history():
            return None
        notes = json.loads(self.log.history()[version].get("userMetadata") or "{}")
        if notes.get("rowdelta-operation") not in (stored["operation"], stored.get("commit")):
            return None
        index = self.index_version(self.index_folder / "versions" / f"{stored['index']['version']}.json")
        self.encoding = index.encoding
        found_entries = live_entries(index, self.index_folder / "runs")
        entries = [((in_one_form(path), position), hashes) for (path, position), hashes in found_entries]
        key = [f"`{name}`" for name in self.key]
        frame = self.spark.table(self.sql_name())
        if "deletionVectors" not in (self.snapshot().protocol.get("writerFeatures") or ()):
            # Delta's reader has no row_index there
            paths = [str(self.table_folder / path) for path, _ in self.snapshot().files]
            if not paths:
                assert not entries, "the index has rows of an empty table"
                return {}
            frame = self.spark.read.option("basePath", str(self.table_folder)).parquet(*paths)
        rows = to_arrow(frame.selectExpr(*key, "_metadata.file_path", "_metadata.row_index")).to_pylist()
        places = [(unquote(urlparse(row["file_path"]).path), row["row_index"]) for row in rows]
        assert sorted(place for place, _ in entries) == sorted(places), "index entries and live rows differ"
        hashes = dict(entries)
        found: dict[tuple[Any, ...], set[tuple[int, int]]] = {}
        for row, place in zip(rows, places, strict=True):
            found.setdefault(tuple(row[name] for name in self.key), set()).add(hashes[place])
        return found

    def vacuum(self) -> None:
        """Delete all files that the table doesn't need now, but for those that were written since its last commit. A
        VACUUM that keeps nothing else than the table's newest version would delete files of a commit that is still to
        come, of whatever writer; so nobody may run one meanwhile.
        """
        committed = max(path.stat().st_mtime for path in (self.table_folder / "_delta_log").glob("*.json"))
        later = time.time() + 3600
        for path in self.table_folder.rglob("*"):
            if path.is_file() and path.parent.name != "_delta_log" and path.stat().st_mtime > committed:
                os.utime(path, (later, later))
        vacuum(self.spark, self.sql_name())

    def clean_log(self) -> None:
        """Write a checkpoint, and delete all commits that it has. Delta does this on its own a month later."""
        log = self.java_log()
        none = _jvm(self).scala.Option.empty()
        log.checkpoint(log.update(False, none, none), none)
        newest = self.version()
        for version in self.log.commits:
            if version < newest:
                for path in (self.table_folder / "_delta_log").glob(f"*{version:020}.*"):
                    if "checkpoint" not in path.name:
                        path.unlink()
        _jvm(self).org.apache.spark.sql.delta.DeltaLog.clearCache()

    def java_log(self) -> JavaObject:
        log = _jvm(self).org.apache.spark.sql.delta.DeltaLog
        return log.forTable(self.spark._jsparkSession, str(self.table_folder))


def vacuum(spark: SparkSession, table: str) -> None:
    """Delete all files that a table doesn't need now.

    :param table: its name in SQL.
    """
    check = "spark.databricks.delta.retentionDurationCheck.enabled"
    spark.conf.set(check, "false")
    try:
        spark.sql(f"VACUUM {table} RETAIN 0 HOURS").collect()
    finally:
        spark.conf.unset(check)


def _jvm(job: Job) -> Any:
    jvm = job.spark.sparkContext._jvm
    assert jvm is not None
    return jvm


When = Literal["before the look", "in the commit"]
"""Others commit before the sink asks for the newest version, or after: then Delta itself finds the conflict."""


@contextmanager
def before_commit(
    action: Callable[[], object], when: When = "before the look", *, times: int = 1
) -> Iterator[list[None]]:
    """Run `action` between the writing of files and each of the next `times` attempts to commit them.

    :return: grows by an entry for each time that it has run.
    """
    ran: list[None] = []

    def act() -> None:
        if len(ran) < times:
            ran.append(None)
            action()

    original, original_send = SinkLog.commit, SinkLog._send
    inside: list[bool] = []

    def commit(self: SinkLog, proposal: Proposal) -> int:
        if not any("add" in action or "remove" in action for action in proposal.actions):
            return original(self, proposal)
        if when == "before the look":
            act()
        inside.append(True)
        try:
            return original(self, proposal)
        finally:
            inside.pop()

    def send(self: SinkLog, *args: Any) -> int:
        if inside and when == "in the commit":
            act()
        return original_send(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SinkLog, "commit", commit)
        patch.setattr(SinkLog, "_send", send)
        yield ran
