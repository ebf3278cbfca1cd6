"""The whole way of a Delta table in one story, for other versions of Spark and Delta Lake (`make versions`)."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.delta.harness import DeltaJob
from tests.sink.harness import Change, merging_soon

pytestmark = [pytest.mark.spark, pytest.mark.versions]


class Source:
    """What the table has to hold.

    :param job: gets the changes.
    """

    def __init__(self, job: DeltaJob) -> None:
        self.job = job
        self.rows: dict[int, str] = {}

    def change(self, **regions: list[int]) -> None:
        """One micro-batch: keys that get a region. Those of `deleted` are deleted."""
        changes: list[Change] = []
        for region, keys in regions.items():
            for key in keys:
                before = self.rows.pop(key, None)
                if region == "deleted":
                    changes.append(("-D", {"id": key, "region": before}))
                else:
                    changes.append(("+U", {"id": key, "region": region}))
                    self.rows[key] = region
        self.job.write(changes)

    def check(self) -> None:
        found = {row["id"]: row["region"] for row in self.job.check()}
        assert found == self.rows
        assert self.job.check_index() is not None


@pytest.mark.parametrize(
    "table", [{"partition_by": ["region"]}, {"cluster_by": ["region"]}], ids=lambda table: next(iter(table))
)
def test_the_whole_way(spark: SparkSession, tmp_path: Path, table: dict[str, Any]) -> None:
    job = DeltaJob(spark, tmp_path, table=table, properties={"delta.checkpointInterval": "4"})
    source = Source(job)
    source.change(eu=[*range(0, 4000, 2)], us=[*range(1, 4000, 2)])
    source.change(deleted=[0, 1000, 2000, 3001], us=[4, 6], eu=[5001])
    job.run()
    assert job.vectors()
    source.check()
    job.sql("VACUUM {t}")  # which fails on inline vectors
    stored = job.stored()
    version = job.version()
    job.lose_checkpoint()
    job.run()
    assert (job.version(), job.stored()) == (version, stored)

    source.change(deleted=[key for key in range(7, 4000, 7) if key in source.rows])
    job.run()
    source.check()

    # others
    job.sql(
        "MERGE INTO {t} t USING (SELECT id FROM range(3995, 4005)) s ON t.id = s.id "
        "WHEN MATCHED AND s.id < 3998 THEN DELETE WHEN MATCHED THEN UPDATE SET region = 'merged' "
        "WHEN NOT MATCHED THEN INSERT (id, region) VALUES (s.id, 'new')"
    )
    present = source.rows.keys() & range(3998, 4000)
    added = set(range(3995, 4005)) - source.rows.keys()
    source.rows = {key: region for key, region in source.rows.items() if not 3995 <= key < 3998}
    source.rows |= dict.fromkeys(present, "merged") | dict.fromkeys(added, "new")
    job.sql("OPTIMIZE {t}")
    source.change(uk=[1, 3998, 3999, 4000], deleted=[4001])
    job.run()
    source.check()

    restored = job.version()
    before = dict(source.rows)
    source.change(uk=[2, 3], deleted=[4])
    job.run()
    after = source.rows
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {restored}")
    source.rows = before
    assert {row["id"]: row["region"] for row in job.check()} == before
    job.run()  # the last micro-batch again
    source.rows = after
    source.check()
    others = ("MERGE", "OPTIMIZE", "RESTORE")
    assert tuple(name for name in job.operations() if name in others) == others

    assert list((job.table_folder / "_delta_log").glob("*.checkpoint*.parquet"))
    job.clean_log()
    source.change(de=[1, 2], deleted=[3])
    source.change(de=[5003])
    with merging_soon():
        job.run()
    source.check()
    assert "rowdelta.minor-compaction" in str([info.get("userMetadata") for info in job.log.history().values()])
