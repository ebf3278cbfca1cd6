"""The real messages of a database with a row of every type, all the way into tables."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.changelog.messages import sample
from tests.sink.harness import Job

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("server", ["pgj", "pgenv", "pgnull"])
def test_a_row_of_every_type(spark: SparkSession, tmp_path: Path, server: str) -> None:
    """Types come from the messages' schemas where they have them, from the configuration where not."""
    columns = {"id": "int", "d": "date", "ts": "timestamp_ntz", "tstz": "timestamp", "n_12_2": "decimal(12,2)"}
    job = Job(
        spark,
        tmp_path,
        columns=columns,
        configure_columns=server != "pgenv",
        file_format="json",
        sections={"source": {"format": "debezium-json"}},
        table={"order_by": ["source.lsn bigint", "ts_ms bigint"]},
    )
    values = [m.value for m in sample(server, "alltypes") if m.value is not None]
    job.write_text("".join(json.dumps(value) + "\n" for value in values))
    job.run()
    texts = ", ".join(f"CAST({name} AS STRING)" for name in columns)
    rows = {row[0]: tuple(row[1:]) for row in spark.sql(f"SELECT {texts} FROM {job.target} ORDER BY id").collect()}
    assert rows["1"] == ("2026-11-21", "2026-11-21 01:02:03.123456", "2026-11-20 20:02:03.123456", "1.10")
    assert rows["3"] == ("9999-12-31", "0001-01-01 00:00:00", "-0043-03-15 00:00:00", None)
    reasons = [row.reason for row in spark.table(job.dead_letters).collect()]
    # what PostgreSQL's infinity is on the wire, which only one of the samples has
    assert len(reasons) == (1 if server == "pgj" else 0)
    assert all(reason.startswith("column d: ") for reason in reasons)
