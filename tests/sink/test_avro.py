"""Avro from a real broker with a real schema registry to a table, with a schema that changes in the middle of a
micro-batch.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession

from sink.errors import TemporaryError
from tests.changelog.avro_messages import message
from tests.sink.test_kafka import KafkaJob
from tests.sink.test_keys import stops
from tests.stack.kafka import Kafka
from tests.stack.registry import Registry, running_registry

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

COLUMNS = {"id": "bigint", "customer": "string", "amount": "decimal(12,2)", "quantity": "int"}
KEY = {"type": "record", "name": "Key", "namespace": "shop.orders", "fields": [{"name": "id", "type": "long"}]}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
BEFORE: list[dict[str, Any]] = [
    {"name": "id", "type": "long"},
    {"name": "customer", "type": ["null", "string"], "default": None},
    {"name": "amount", "type": DECIMAL},
    {"name": "quantity", "type": "int"},
]
AFTER: list[dict[str, Any]] = [
    *BEFORE[:3],
    {"name": "note", "type": ["null", "string"], "default": None},
    {"name": "quantity", "type": "long"},
]
LATER = [*AFTER, {"name": "channel", "type": ["null", "string"], "default": None}]


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with running_registry() as server:
        yield server


class Shop:
    """A source table that changes at random, and Debezium's messages about it. `rows` is its content."""

    def __init__(self, registry: Registry, seed: int) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.messages: list[tuple[bytes, bytes | None]] = []
        self._random = Random(seed)
        with SchemaRegistryClient({"url": registry.url}) as client:
            self._key = client.register_schema("orders-key", Schema(json.dumps(KEY)))
            schemas = [self._event_schema(fields) for fields in (BEFORE, AFTER, LATER)]
            ids = [client.register_schema(f"orders-value-{n}", Schema(json.dumps(s))) for n, s in enumerate(schemas)]
        self._schemas = list(zip(ids, schemas, (BEFORE, AFTER, LATER), strict=True))

    @staticmethod
    def _event_schema(fields: list[dict[str, Any]]) -> dict[str, Any]:
        row = {"type": "record", "name": "Value", "fields": fields}
        source = {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": ["null", "long"]}]}
        parts = [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": source},
            {"name": "op", "type": "string"},
            {"name": "ts_ms", "type": ["null", "long"], "default": None},
        ]
        return {"type": "record", "name": "Envelope", "namespace": "shop.orders", "fields": parts}

    def change(self, count: int, version: int) -> None:
        """:param version: of the schema: 0, 1 or 2. Columns that a row had no value for are null from then on."""
        for _ in range(count):
            known = sorted(self.rows)
            what = self._random.choice(["insert", "insert", "update", "delete"]) if known else "insert"
            number = self._random.choice(known) if what != "insert" else self._random.randrange(10**6)
            old = self.rows.pop(number, None)
            if what == "delete":
                self._send("d", number, old, None, version)
                self.messages.append((message(self._key, KEY, {"id": number}), None))
                continue
            self.rows[number] = self._row(number, version)
            self._send("u" if old else "c", number, old, self.rows[number], version)

    def expected(self, columns: list[str]) -> list[dict[str, Any]]:
        return [{name: self.rows[number].get(name) for name in columns} for number in sorted(self.rows)]

    def _row(self, number: int, version: int) -> dict[str, Any]:
        amount = Decimal(self._random.randint(-(10**12) + 1, 10**12 - 1)).scaleb(-2)
        row = {"id": number, "customer": self._random.choice([None, "Ada", "zoë 😀"]), "amount": amount}
        if version == 0:
            return row | {"quantity": self._random.randint(-(2**31), 2**31 - 1)}
        row |= {"note": self._random.choice([None, "new"]), "quantity": self._random.randint(-(2**63), 2**63 - 1)}
        return row | ({"channel": "web"} if version == 2 else {})

    def _send(self, op: str, number: int, old: Any, new: Any, version: int) -> None:
        schema_id, schema, fields = self._schemas[version]

        def image(row: Any) -> Any:
            return row and {field["name"]: row.get(field["name"]) for field in fields}

        event = {"before": image(old), "after": image(new), "source": {"lsn": len(self.messages)}, "op": op, "ts_ms": 1}
        self.messages.append((message(self._key, KEY, {"id": number}), message(schema_id, schema, event)))

    def produce(self, job: KafkaJob) -> None:
        job.produce(self.messages)
        self.messages.clear()


def avro_job(spark: SparkSession, folder: Path, kafka: Kafka, registry: Registry) -> KafkaJob:
    options = {"schema.registry.url": registry.url, "schema.registry.max.retries": "0"}
    job = KafkaJob(
        spark, folder, kafka.bootstrap_servers, {"orders": COLUMNS}, format="debezium-avro", format_options=options
    )
    kafka.create_topic(job.topic(), partitions=1)
    return job


def table(job: KafkaJob) -> list[dict[str, Any]]:
    return sorted(job.rows(), key=lambda row: int(row["id"]))


def test_table_equals_source_across_a_schema_change(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, registry: Registry
) -> None:
    """In the middle of a micro-batch a column appears, and another one becomes wider. The rows after that have both."""
    job = avro_job(spark, tmp_path, kafka, registry)
    shop = Shop(registry, seed=1)
    shop.change(150, 0)
    shop.change(150, 1)
    shop.produce(job)
    job.run()
    columns = [*COLUMNS, "note"]
    assert table(job) == shop.expected(columns)
    assert dict(spark.table(job.target()).dtypes) == COLUMNS | {"quantity": "bigint", "note": "string"}
    assert spark.sql(f"SELECT * FROM lake.{job.name}.dead_letters").count() == 0
    # a message with a schema that nobody knows is a bad record, and its neighbours aren't
    shop.change(40, 1)
    shop.produce(job)
    job.produce([(None, b"\0\0\x0f\x42\x3f\x02")])
    shop.change(40, 1)
    shop.produce(job)
    job.run()
    assert table(job) == shop.expected(columns)
    (bad,) = spark.sql(f"SELECT reason FROM lake.{job.name}.dead_letters").collect()
    assert bad.reason == f"schema id 999999 is unknown to the schema registry {registry.url}"


@pytest.mark.parametrize("name", ["avro", "debezium-avro"])
def test_the_key_is_what_the_schema_of_the_messages_keys_says(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, registry: Registry, name: str
) -> None:
    """No key is configured. Keys of a new schema, with other fields, stop the table."""
    job = replace(avro_job(spark, tmp_path, kafka, registry), format=name, key={"orders": ()}, table={"columns": None})

    def record(name: str, **fields: Any) -> dict[str, Any]:
        described = [{"name": field, "type": dtype} for field, dtype in fields.items()]
        return {"type": "record", "name": name, "namespace": job.name, "fields": described}

    value = record("Row", tenant="int", id="long", v="string")
    if name == "debezium-avro":
        value = record("Envelope", before=["null", value], after=["null", "Row"], op="string")
    keys = record("Key", tenant="int", id="long"), record("Key", id="long")
    with SchemaRegistryClient({"url": registry.url}) as client:
        value_id = client.register_schema(f"{job.topic()}-value", Schema(json.dumps(value)))
        key_ids = [client.register_schema(f"{job.topic()}-key-{n}", Schema(json.dumps(k))) for n, k in enumerate(keys)]

    def produce(schema: int, *rows: dict[str, Any]) -> None:
        events = [{"before": None, "after": row, "op": "c"} if name == "debezium-avro" else row for row in rows]
        sent = [message(key_ids[schema], keys[schema], {f["name"]: row[f["name"]] for f in keys[schema]["fields"]})
                for row in rows]  # fmt: skip
        job.produce([(key, message(value_id, value, event)) for key, event in zip(sent, events, strict=True)])

    rows = [{"tenant": tenant, "id": 1, "v": f"of {tenant}"} for tenant in (1, 2)]
    produce(0, *rows)
    job.run()
    assert job.identifiers() == {"tenant", "id"}
    assert sorted(job.rows(), key=lambda row: int(row["tenant"])) == rows
    produce(0, rows[0] | {"v": "new"})
    produce(1, rows[1] | {"v": "under another key"})
    assert "was tenant, id, and from partition 0 offset 3 on it is id" in stops(job)


def test_a_registry_that_is_down_stops_the_job_and_nothing_is_applied(
    spark: SparkSession, tmp_path: Path, kafka: Kafka
) -> None:
    with running_registry() as registry:
        job = avro_job(spark, tmp_path, kafka, registry)
        shop = Shop(registry, seed=2)
        shop.change(30, 0)
        shop.produce(job)
        job.run()
        before = table(job)
        assert before == shop.expected(list(COLUMNS))
        # a schema that the Python workers don't remember
        shop.change(30, 2)
        shop.produce(job)
        registry.stop()
        with pytest.raises(TemporaryError, match=f"the schema registry {registry.url} can't be asked for schema id"):
            job.run()
        assert table(job) == before
        assert not spark.catalog.tableExists(f"lake.{job.name}.dead_letters") or (
            spark.sql(f"SELECT * FROM lake.{job.name}.dead_letters").count() == 0
        )
        # nobody described the next table, so the driver itself has to ask
        undescribed = {"columns": None, "target": f"lake.{job.name}.undescribed"}
        with pytest.raises(TemporaryError, match=f"the schema registry {registry.url} can't be asked for schema id"):
            replace(job, table=undescribed, folder=tmp_path / "other").run()
        # its memory was all it had
        registry.start()
        Shop(registry, seed=2)
        job.run()
    assert table(job) == shop.expected([*COLUMNS, "note", "channel"])
