"""A Delta table is equal to the source, whatever the changelog is, wherever the job dies, and whatever others do.

Stories are those of `tests.sink.test_properties`, with what happens to Delta tables. `ROWDELTA_DELTA_STORIES=100 pytest
…` goes hunting.
"""

import datetime as dt
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from sink.errors import TemporaryError
from tests.delta.harness import DeltaJob, When, before_commit, before_rewrite, crashing
from tests.sink.harness import Fault
from tests.sink.test_properties import (
    KEY_VALUES,
    ON_DRIVER,
    REMOVED_BY_OTHERS,
    Database,
    Operation,
    Player,
    Run,
    Story,
    _comparable,
)

pytestmark = pytest.mark.spark

KEYS = [name for name in KEY_VALUES if name != "uuid"]
"""Delta has no UUIDs."""

Event = Literal[
    "none",
    "compaction",
    "purge",
    "foreign append",
    "foreign delete",
    "foreign update",
    "foreign merge",
    "rollback",
    "log cleaned",
    "vacuum",
    "property set",
    "checkpoint lost",
    "checkpoint restored",
    "index lost",
    "index damaged",
    "stale index",
]
Meanwhile = Literal[
    "none", "compaction", "purge", "foreign append", "foreign delete", "foreign update", "foreign merge", "vacuum",
    "property set", "index lost",
]  # fmt: skip


@st.composite
def stories(draw: st.DrawFn) -> tuple[Story, When]:
    key = tuple(draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2)))
    partitions = [(), (), ("region",), ("at",), ("amount", "region")]
    if key[0] != "binary":  # by which Delta can't partition
        partitions += [("k0",)]
    operations = st.builds(
        Operation,
        st.sampled_from(["set", "set", "set", "delete", "change key"]),
        st.integers(0, 4),
        st.integers(0, 19),
        st.integers(0, 4),
    )
    files = st.lists(st.lists(operations, max_size=14).map(tuple), min_size=1, max_size=2).map(tuple)
    runs = st.builds(
        Run,
        files,
        st.sampled_from([None, *get_args(Fault)]),
        st.integers(0, 1),
        st.sampled_from(get_args(Meanwhile)),
        st.sampled_from(["commit", "commit", "rewrite"]),
        st.sampled_from(get_args(Event)),
        st.sampled_from(["position", "copy-on-write"]),
    )
    story = Story(
        key=key,
        runs=tuple(draw(st.lists(runs, min_size=1, max_size=3))),
        partition_by=draw(st.sampled_from(partitions)),
        mode=draw(st.sampled_from(["upsert", "changelog"])),
        file_format=draw(st.sampled_from(["parquet", "json"])),
        merges=draw(st.sampled_from(["never", "on the driver", "in tasks"])),
        rewrites=draw(st.sampled_from(["never", "at once", "beside a micro-batch"])),
        tasks=draw(st.integers(1, 3)),
        shuffles=draw(st.booleans()),
        flush_bytes=draw(st.sampled_from([1, 2000, 1 << 20])),
        batch_rows=draw(st.integers(1, 5)),
        on_driver=draw(st.sampled_from(ON_DRIVER)),
        seed=draw(st.integers(0, 99)),
    )
    return story, draw(st.sampled_from(get_args(When)))


@pytest.mark.timeout(1500)
@settings(
    max_examples=int(os.environ.get("ROWDELTA_DELTA_STORIES", "2")),
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(told=stories())
def test_the_table_equals_the_source(spark: SparkSession, told: tuple[Story, When]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-story-"))
    try:
        DeltaPlayer(spark, *told, folder).play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class DeltaDatabase(Database):
    """It has no empty texts where these are partition values. Delta reads such as NULL, so such a key is a bad record
    (`ChangelogSpec.empty_is_null`). And no times after 2262: Spark writes them as INT96, which delta-rs reads as
    nanoseconds.
    """

    def key(self, number: int) -> tuple[Any, ...]:
        partition_by = self._story.partition_by
        key = enumerate(map(_before_2262, super().key(number)))
        return tuple("not empty" if value == "" and f"k{place}" in partition_by else value for place, value in key)


def _before_2262(value: Any) -> Any:
    is_late = isinstance(value, dt.datetime) and value.tzinfo is not None and value.year > 2261
    return value.replace(year=2261) if is_late else value


class DeltaPlayer(Player):
    """See `Player`.

    :param when: in which moment of a commit others commit.
    """

    def __init__(self, spark: SparkSession, story: Story, when: When, folder: Path) -> None:
        super().__init__(spark, story, folder)
        self.when = when
        self.oldest = 0
        self.delta = DeltaJob(
            spark,
            folder,
            columns=self.job.columns,
            key=self.job.key,
            mode=story.mode,
            partition_by=story.partition_by,
            file_format=story.file_format,
            # either tasks write several files of a partition, or these are small enough to be merged
            properties={"delta.targetFileSize": "1500" if story.merges == "never" else "20000"},
            table={"merge_small_files": story.merges != "never"},
            tasks=story.tasks,
        )
        self.job = self.delta
        self.database = DeltaDatabase(story)

    def _run(self, run: Run) -> None:
        if run.deletes == "position" and self.delta.table_folder.exists():
            properties = {row["key"]: row["value"] for row in self.delta.sql("SHOW TBLPROPERTIES {t}")}
            if properties.get("delta.enableDeletionVectors") != "true":
                # what the sink says of a table that it has made for copy-on-write
                self.delta.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
        if run.fault is not None:
            with crashing(run.fault, after_commits=run.fault_after):
                try:
                    self.job.run()
                except TemporaryError as error:
                    if "crash " not in str(error):
                        raise
        if run.meanwhile_at == "commit":
            with before_commit(lambda: self._disturb(run.meanwhile), self.when):
                self.job.run()
        else:
            with before_rewrite(lambda: self._disturb(run.meanwhile)):
                self.job.run()
        self.rolled_back = False

    def _compare(self, when: str) -> None:
        super()._compare(when)
        newest = self.delta.version()
        travel = self.random.sample(range(self.oldest, newest + 1), min(2, newest + 1 - self.oldest))
        self.delta.check(readers=("delta-rs", "DuckDB"), travel=travel, since=self.oldest)

    def _disturb(self, disturbance: str) -> None:
        job = self.delta
        if not job.table_folder.exists():
            return
        if disturbance == "compaction":
            job.sql("OPTIMIZE {t}")
        elif disturbance == "purge":
            job.sql("REORG TABLE {t} APPLY (PURGE)")
        elif disturbance == "foreign delete":
            job.sql(f"DELETE FROM {{t}} WHERE amount = {REMOVED_BY_OTHERS}")
            self.removed = True
        elif disturbance == "foreign update":
            job.sql("UPDATE {t} SET amount = amount WHERE amount < 1000")
        elif disturbance == "foreign merge":
            job.sql(
                "MERGE INTO {t} t USING (SELECT DISTINCT amount AS same FROM {t}) s "
                "ON t.amount = s.same AND t.amount < 1000 WHEN MATCHED THEN UPDATE SET t.amount = s.same"
            )
        elif disturbance == "property set":
            job.sql(f"ALTER TABLE {{t}} SET TBLPROPERTIES ('delta.checkpointInterval' = '{job.version() + 2}')")
        elif disturbance == "vacuum":
            job.vacuum()
            self.oldest = job.version()
        elif disturbance == "log cleaned":
            if self._own_versions()[-1:] == [job.version()]:  # else it isn't known whether there was a RESTORE
                job.clean_log()
                self.oldest = job.version()
        elif disturbance == "rollback":
            self._roll_back()
        else:
            super()._disturb(disturbance)  # type: ignore[arg-type]

    def _own_versions(self) -> list[int]:
        history = self.delta.log.history()
        return [v for v, info in sorted(history.items()) if "rowdelta.sink-id" in (info.get("userMetadata") or "")]

    def _roll_back(self) -> None:
        earlier = [version for version in self._own_versions() if self.oldest <= version < self.delta.version()]
        if earlier:
            self.rolled_back = True
            self.delta.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {self.random.choice(earlier)}")
            names = list(self.job.columns)
            left = _comparable(self.job.rows(), names)
            row = self.database.foreign_row(0)
            self.foreign = [row] if row is not None and _comparable([row], names)[0] in left else []
