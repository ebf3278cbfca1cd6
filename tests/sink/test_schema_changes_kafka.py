"""Schema changes that messages declare: Debezium's envelope, and Avro with a registry, from a real broker."""

import base64
import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.errors import DataError
from tests.changelog.avro_messages import message
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka
from tests.stack.registry import running_registry

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

COMMITTED = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def decimal_type(precision: int) -> dict[str, Any]:
    parameters = {"scale": "2", "connect.decimal.precision": str(precision)}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": parameters}


def enveloped(op: str, fields: Mapping[str, Any], row: Mapping[str, Any], optional: bool = True) -> tuple[Any, Any]:
    """A change event with its schema. Decimals are spelled as base64 of the unscaled integer."""

    def spelled(value: Any) -> Any:
        if not isinstance(value, Decimal):
            return value
        return base64.b64encode(int(value.scaleb(2)).to_bytes(9, "big", signed=True)).decode()

    columns = [
        {"field": name, "optional": optional and name != "id", **({"type": t} if isinstance(t, str) else t)}
        for name, t in fields.items()
    ]
    image = {"type": "struct", "optional": True, "fields": columns}
    schema = {"type": "struct", "fields": [{**image, "field": "before"}, {**image, "field": "after"}]}
    schema["fields"].append({"type": "string", "field": "op"})  # type: ignore[attr-defined]
    values = {name: spelled(value) for name, value in row.items()}
    sides = {"before": values, "after": None} if op == "d" else {"before": None, "after": values}
    source = {"ts_ms": int(COMMITTED.timestamp() * 1000)}
    return {"id": row["id"]}, {"schema": schema, "payload": {**sides, "source": source, "op": op}}


def types(spark: SparkSession, table: str) -> dict[str, str]:
    return dict(spark.table(table).dtypes)


OLD = {"id": "int64", "name": "string", "amount": decimal_type(10), "n": "int32"}
NEW = {
    "id": "int64",
    "amount": decimal_type(12),
    "n": "int64",
    "note": "string",
    "day": {"type": "int32", "name": "io.debezium.time.Date"},
}


@pytest.mark.parametrize("deletes", [pytest.param("position", marks=pytest.mark.versions), "equality"])
def test_an_envelope_changes_in_the_middle_of_a_micro_batch(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, deletes: str
) -> None:
    """Columns are inferred from the envelope. A second table of the job stays as it is."""
    job = KafkaJob(
        spark,
        tmp_path,
        kafka.bootstrap_servers,
        tables={"orders": {}, "others": {}},
        table={
            "deletes": deletes,
            "columns": None,
            "metadata": ["_op", "_ts", "_source", "_source_partition", "_offset", "_timestamp"],
        },
    )
    for name in job.tables:
        kafka.create_topic(job.topic(name))
    job.produce([enveloped("c", OLD, {"id": n, "name": "old", "amount": Decimal("1.50"), "n": n}) for n in range(5)])
    job.produce([enveloped("c", OLD, {"id": 1, "name": "x", "amount": None, "n": 1})], table="others")
    shown = "\n".join(inspection.check(spark, job.config()))
    assert "inferred from messages" in shown
    assert "amount decimal(10,2), n int" in shown
    job.run()
    job.produce(
        [
            enveloped("u", OLD, {"id": 1, "name": "a", "amount": Decimal("2.00"), "n": 1}),
            enveloped("u", OLD, {"id": 2, "name": "a", "amount": Decimal("2.00"), "n": 1}),
            enveloped("u", NEW, {"id": 1, "amount": Decimal("9999999999.99"), "n": 2**40, "note": "new", "day": 1}),
            enveloped("d", NEW, {"id": 3, "amount": None, "n": None, "note": None, "day": None}),
            enveloped("c", NEW, {"id": 9, "amount": Decimal("1.00"), "n": 1, "note": None, "day": None}),
        ]
    )
    job.produce([enveloped("u", OLD, {"id": 1, "name": "y", "amount": None, "n": 2})], table="others")
    job.run()
    assert job.snapshots("orders") == job.snapshots("others") == 2
    inner = {name: dtype for name, dtype in types(spark, job.target()).items() if not name.startswith("_")}
    assert inner == {
        "id": "bigint",
        "name": "string",
        "amount": "decimal(12,2)",
        "n": "bigint",
        "note": "string",
        "day": "date",
    }
    assert "note" not in types(spark, job.target("others"))
    rows = {row["id"]: row for row in job.rows()}
    for row in rows.values():
        assert abs(dt.datetime.now(dt.UTC) - row.pop("_timestamp")) < dt.timedelta(hours=1)
    about = {"_ts": COMMITTED, "_source": job.topic(), "_source_partition": 0}
    old = {"name": "old", "amount": Decimal("1.50"), "note": None, "day": None}
    assert rows == {
        0: {"id": 0, "n": 0, **old, **about, "_op": "c", "_offset": 0},
        1: {
            "id": 1,
            "name": None,
            "amount": Decimal("9999999999.99"),
            "n": 2**40,
            "note": "new",
            "day": dt.date(1970, 1, 2),
            **about,
            "_op": "u",
            "_offset": 7,
        },
        2: {"id": 2, **old, "name": "a", "amount": Decimal("2.00"), "n": 1, **about, "_op": "u", "_offset": 6},
        4: {"id": 4, "n": 4, **old, **about, "_op": "c", "_offset": 4},
        9: {"id": 9, **old, "name": None, "amount": Decimal("1.00"), "n": 1, **about, "_op": "c", "_offset": 9},
    }
    assert not spark.catalog.tableExists(f"lake.{job.name}.dead_letters") or (
        spark.table(f"lake.{job.name}.dead_letters").count() == 0
    )


def test_an_envelope_that_lost_a_column_stops_the_job(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"columns": None, "schema_changes": "fail"})
    kafka.create_topic(job.topic())
    job.produce([enveloped("c", OLD, {"id": 1, "name": None, "amount": None, "n": None})])
    job.run()
    lost = {name: dtype for name, dtype in OLD.items() if name != "n"}
    job.produce([enveloped("c", lost, {"id": 2, "name": None, "amount": None})])
    with pytest.raises(DataError, match=r"changed \(n is missing\)"):
        job.run()
    assert [row["id"] for row in job.rows()] == [1]


def test_avro_schemas_of_a_registry(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """The writer schema changes between two messages of a micro-batch: fields come, go and grow."""
    text = ["null", "string"]

    def record(**fields: Any) -> dict[str, Any]:
        return {"type": "record", "name": "Row", "fields": [{"name": n, "type": t} for n, t in fields.items()]}

    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
    first = record(id="long", name=text, n="int")
    second = record(id="long", n="long", note=text, price=["null", decimal])
    with running_registry() as registry, SchemaRegistryClient({"url": registry.url}) as admin:
        # the registry needn't find them compatible
        ids = [admin.register_schema(f"rows-{i}", Schema(json.dumps(s))) for i, s in enumerate((first, second))]
        options = {"schema.registry.url": registry.url}
        job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, format="avro", format_options=options)
        job.table = {"columns": None}
        kafka.create_topic(job.topic())
        one = [message(ids[0], first, {"id": n, "name": "a", "n": n}) for n in (1, 2)]
        job.produce([(None, value) for value in one])
        job.run()
        assert types(spark, job.target()) == {"id": "bigint", "name": "string", "n": "int"}
        two = [
            message(ids[0], first, {"id": 1, "name": "b", "n": 7}),
            message(ids[1], second, {"id": 2, "n": 2**40, "note": "x", "price": Decimal("12.34")}),
            message(ids[0], first, {"id": 3, "name": "c", "n": 3}),
            message(ids[1], second, {"id": 3, "n": 4, "note": None, "price": None}),
        ]
        job.produce([(None, value) for value in two])
        job.table = {"columns": None, "schema_changes": "fail"}
        with pytest.raises(
            DataError, match=r"changed \(n bigint, name is missing, note string, price decimal\(6,2\)\)"
        ):
            job.run()
        job.table = {"columns": None}
        job.run()
        assert job.rows() == [
            {"id": 1, "name": "b", "n": 7, "note": None, "price": None},
            {"id": 2, "name": None, "n": 2**40, "note": "x", "price": Decimal("12.34")},
            {"id": 3, "name": None, "n": 4, "note": None, "price": None},
        ]
        assert job.snapshots() == 2
