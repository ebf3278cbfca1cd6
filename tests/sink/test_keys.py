"""Keys that messages state: a whole database by one pattern, keys that change, keys that differ from the configured
one.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError, RowdeltaError, TableError
from tests.changelog.messages import sample
from tests.sink.test_kafka import KafkaJob, Running
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

Row = Mapping[str, Any]
KEY = ["id", "t"]


@dataclass
class Database(KafkaJob):
    """A source database, one topic a table, mirrored by one pattern that names neither columns nor keys."""

    entry: Mapping[str, Any] = field(default_factory=dict)
    discovery_interval: str = "1 minute"

    def config(self) -> Config:
        values = super().config().model_dump(by_alias=True, exclude_unset=True)
        entry = {"source": rf"{self.name}\.(.*)", "target": f"lake.{self.name}.$1", **self.entry}
        dead_letters = {"dead_letter_table": f"lake.{self.name}.dead_letters"}
        source = values["source"] | {"discovery_interval": self.discovery_interval}
        return Config.model_validate(
            values | {"tables": [entry], "sink": values["sink"] | dead_letters, "source": source}
        )

    def insert(self, table: str, key: Sequence[str], *rows: Row, enveloped: bool = False) -> None:
        """Events of new rows, with messages' keys of the fields `key`."""
        events = []
        for row in rows:
            named: Any = {name: row[name] for name in key} if key else None
            if enveloped and named is not None:
                fields = [{"type": "int32", "optional": False, "field": name} for name in key]
                named = {"schema": {"type": "struct", "fields": fields}, "payload": named}
            events.append((named, {"before": None, "after": dict(row), "op": "c"}))
        self.produce(events, table=table)

    def has(self, table: str) -> bool:
        return bool(self.spark.catalog.tableExists(self.target(table)))

    def checked(self) -> str:
        return "\n".join(inspection.check(self.spark, self.config()))


@pytest.fixture
def database(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> Database:
    return Database(spark, tmp_path, kafka.bootstrap_servers)


def ids(rows: Sequence[Row]) -> list[Any]:
    return sorted(row["id"] for row in rows)


@pytest.mark.parametrize("enveloped", [False, True])
def test_one_pattern_mirrors_a_whole_database(database: Database, kafka: Kafka, enveloped: bool) -> None:
    """Each table has a different key. With the same key for all, rows of several tenants silently became one row."""
    for table in ("orders", "items", "visits"):
        kafka.create_topic(database.topic(table))
    items = [{"tenant": tenant, "id": number, "v": f"{tenant}.{number}"} for tenant in (1, 2, 3) for number in (1, 2)]
    database.insert("orders", ["id"], {"id": 1, "v": "a"}, {"id": 2, "v": "b"}, enveloped=enveloped)
    database.insert("items", ["tenant", "id"], *items, enveloped=enveloped)
    database.insert("visits", [], {"page": "x"}, {"page": "x"})
    with pytest.raises(ConfigError, match=r"visits has no key: key is not configured, .*Name the columns .* in keys"):
        database.run()
    assert ids(database.rows("orders")) == [1, 2]
    assert sorted(database.rows("items"), key=lambda row: row["v"]) == items
    assert (database.identifiers("orders"), database.identifiers("items")) == ({"id"}, {"tenant", "id"})
    assert not database.has("visits")

    database.entry = {"keys": {database.topic("visits"): ["page"]}}
    shown = database.checked()
    assert "key: tenant, id, as the messages say" in shown
    database.insert("items", ["tenant", "id"], items[0] | {"v": "new"}, enveloped=enveloped)
    database.run()
    assert database.rows("visits") == [{"page": "x"}]
    assert [row["v"] for row in database.rows("items") if (row["tenant"], row["id"]) == (1, 1)] == ["new"]
    assert len(database.rows("items")) == len(items)


def test_real_messages_of_a_database(database: Database, kafka: Kafka) -> None:
    """Debezium's own: a composite key, a single one, updates, deletes, a change of a key's value, a table without."""
    for table in ("orders", "comp", "nokey"):
        kafka.create_topic(database.topic(table))
        database.produce([(m.key, m.value) for m in sample("pgj", table)], table=table)
    with pytest.raises(ConfigError, match="nokey has no key"):
        database.run()
    assert ids(database.rows("orders")) == [1, 4, 5, 6, 7, 9, 100]
    assert database.identifiers("comp") == {"tenant", "id"}
    assert [(row["tenant"], row["v"]) for row in database.rows("comp")] == [(1, "z")]


def stops(database: KafkaJob) -> str:
    """What the run says that stops at a changed key, and that it applied nothing."""
    before = database.rows("orders")
    with pytest.raises(TableError) as raised:
        database.run()
    assert database.rows("orders") == before
    assert "Nothing of this micro-batch was applied" in str(raised.value)
    return str(raised.value)


def test_a_primary_key_that_changes_stops_the_table(database: Database, kafka: Kafka) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["id"], {"id": 1, "tenant": 1})
    database.run()
    # one micro-batch has messages of both keys
    database.insert("orders", ["id"], {"id": 2, "tenant": 1})
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 2, "new": 1}, {"id": 3, "tenant": 2})
    text = stops(database)
    assert f"{database.topic()} was id, and from partition 0 offset 2 on it is tenant, id" in text
    assert "new" not in database.spark.table(database.target()).columns
    assert stops(database) == text
    # the user has decided: what messages say is what the sample had, old and new
    assert "set key: [id]" in text
    database.entry = {"key": ["id"]}
    database.run()
    assert ids(database.rows("orders")) == [1, 2, 3]
    database.insert("orders", ["tenant", "id"], {"id": 4, "tenant": 2})
    database.run()
    assert ids(database.rows("orders")) == [1, 2, 3, 4]
    # or for the new key: the table is built anew
    database.spark.sql(f"DROP TABLE {database.target()}")
    database.entry = {"key": ["tenant", "id"]}
    database.run()
    assert sorted((row["tenant"], row["id"]) for row in database.rows("orders")) == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 3),
        (2, 4),
    ]


def test_a_primary_key_that_is_dropped_stops_the_table(database: Database, kafka: Kafka) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["id"], {"id": 1})
    database.produce([(None, None)])  # says nothing
    database.run()
    database.insert("orders", [], {"id": 1}, {"id": 1})
    assert "from partition 0 offset 2 on they have none" in stops(database)


def test_a_new_topic_that_has_two_keys_is_refused(database: Database, kafka: Kafka) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["id"], {"id": 1, "tenant": 1})
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 2})
    with pytest.raises(ConfigError, match=r"some messages of .* have the key id and others the key tenant, id"):
        database.run()
    assert not database.has("orders")


def test_the_last_messages_of_a_long_topic_are_looked_at_too(database: Database, kafka: Kafka) -> None:
    kafka.create_topic(database.topic(), 2)
    database.insert("orders", ["id"], *({"id": number} for number in range(1200)))
    database.produce(
        [({"id": 1, "tenant": 1}, {"before": None, "after": {"id": 1, "tenant": 1}, "op": "c"})], partition=1
    )
    with pytest.raises(ConfigError, match="have the key id and others the key id, tenant"):
        database.run()


def test_a_configured_key_that_differs_is_a_warning(
    database: Database, kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 1}, {"id": 2, "tenant": 1})
    database.entry = {"key": ["id"]}
    warning = f"{database.target()}: key is id, but the key of the messages of {database.topic()} is tenant, id"
    assert f"  WARNING: {warning}" in database.checked()
    for _ in range(2):  # as soon as messages are seen, and from then on at each start
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rowdelta"):
            database.run()
        assert [record.message for record in caplog.records if warning in record.message]
    assert ids(database.rows("orders")) == [1, 2]
    database.insert("orders", [], {"id": 3, "tenant": 1})  # a message without a key says nothing of a configured one
    database.run()
    # it may be meant. That it changes is another matter
    database.insert("orders", ["id"], {"id": 4, "tenant": 1})
    text = stops(database)
    statement = re.search(r"ALTER TABLE .*?\)(?=;)", text)
    assert statement is not None
    database.spark.sql(statement[0])
    database.run()
    assert ids(database.rows("orders")) == [1, 2, 3, 4]


def test_the_warning_comes_at_the_start(database: Database, kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    """Before any micro-batch, which here are none: what there is isn't read."""
    kafka.create_topic(database.topic(), 2)
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 1})
    job = replace(
        database,
        entry={"key": ["id"], "columns": {"id": "int", "tenant": "int"}},
        sink={"trigger": "1 second"},
        options={"startingOffsets": "latest"},
    )
    warning = f"{job.target()}: key is id, but the key of the messages of {job.topic()} is tenant, id"

    def times() -> int:
        return sum(warning in record.message for record in caplog.records)

    def knows_its_start() -> bool:
        return job.has("orders") and "rowdelta.shop.start" in {
            row.key for row in job.spark.sql(f"SHOW TBLPROPERTIES {job.target()}").collect()
        }

    with caplog.at_level(logging.WARNING, "rowdelta"), Running(job):
        assert wait_until(lambda: times() == 1 and knows_its_start())
        assert job.rows() == []
        # the first micro-batch doesn't repeat it
        job.insert("orders", ["tenant", "id"], {"id": 2, "tenant": 1})
        assert wait_until(lambda: ids(job.rows()) == [2])
        assert times() == 1


def test_no_warning_for_the_same_key(database: Database, kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 1})
    database.entry = {
        "key": ["id", "renamed"],
        "columns": {"id": "bigint", "renamed": {"type": "bigint", "from": "tenant"}},
    }
    assert "WARNING" not in database.checked()
    with caplog.at_level(logging.WARNING, "rowdelta"):
        database.run()
    assert not [record for record in caplog.records if record.name == "rowdelta"]
    # the same without a configured key
    database.entry = {"columns": database.entry["columns"]}
    database.insert("orders", ["id", "tenant"], {"id": 1, "tenant": 2})
    database.run()
    assert len(database.rows("orders")) == 2


def test_an_empty_topic_is_waited_for(database: Database, kafka: Kafka) -> None:
    kafka.create_topic(database.topic())
    kafka.create_topic(database.topic("items"))
    database.run()
    assert not database.has("orders")
    assert "no messages yet" in database.checked()
    database.insert("items", ["id"], {"id": 1})
    database.run()
    assert ids(database.rows("items")) == [1]
    database.insert("orders", ["id"], {"id": 1}, {"id": 2})
    database.run()
    assert ids(database.rows("orders")) == [1, 2]


def test_the_first_messages_are_not_missed(database: Database, kafka: Kafka) -> None:
    """Where new topics are read from their end, one that had no messages is read from its beginning."""
    kafka.create_topic(database.topic())
    job = replace(
        database,
        sink={"trigger": "1 second"},
        options={"startingOffsets": "latest"},
        discovery_interval="500 milliseconds",
    )
    with Running(job):
        job.insert("orders", ["id"], {"id": 1})
        assert wait_until(lambda: job.has("orders") and ids(job.rows("orders")) == [1])
        job.insert("orders", ["id"], {"id": 2})
        assert wait_until(lambda: ids(job.rows("orders")) == [1, 2])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"columns": {"v": "string"}}, r"the key of the messages of .* is id, and 'id' is not in columns"),
        ({"columns": {"ID": "bigint", "v": "string"}}, r"'id' is not in columns, where case counts: 'ID' is"),
        ({"exclude": ["id"]}, r"exclude: it names 'id', and the key .* is id. Remove it from exclude, or write key"),
        ({"columns": {"id": "double"}}, r"a key can't be floating-point\. Use decimal or string"),
        ({"columns": {"id": "array<int>"}}, r"a key can't have parts\. Use string"),
        ({"columns": {"id": {"type": "bigint", "stored": False}, "v": "string"}}, r"'id', which is not in columns"),
    ],
)
def test_a_key_that_the_table_cannot_have(database: Database, kafka: Kafka, entry: Row, message: str) -> None:
    kafka.create_topic(database.topic())
    database.insert("orders", ["id"], {"id": 1, "v": "a"})
    database.entry = entry
    with pytest.raises(ConfigError, match=message):
        database.run()
    with pytest.raises(RowdeltaError, match=message):
        database.checked()


def test_a_table_that_exists_says_its_key(database: Database, kafka: Kafka) -> None:
    database.spark.sql(f"CREATE TABLE {database.target()} (tenant INT NOT NULL, id INT NOT NULL) USING iceberg")
    kafka.create_topic(database.topic())
    database.insert("orders", ["tenant", "id"], {"id": 1, "tenant": 1}, {"id": 1, "tenant": 2})
    database.run()  # without identifier fields: as the messages say, and remembered
    database.insert("orders", ["id"], {"id": 7, "tenant": 2})
    assert "was tenant, id, and from partition 0 offset 2 on it is id" in stops(database)


def test_messages_of_several_tables_in_one_job(database: Database, kafka: Kafka) -> None:
    """Small micro-batches of several tables are one Spark job; a key that changes stops its own table only."""
    for table in ("a", "b", "c"):
        kafka.create_topic(database.topic(table))
        database.insert(table, ["id"], {"id": 1, "n": 1})
    database.run()
    for table in ("a", "b", "c"):
        database.insert(table, ["n", "id"] if table == "b" else ["id"], {"id": 2, "n": 1})
    with pytest.raises(TableError, match=r"\.b: the key of the messages of .* was id, .* it is n, id"):
        database.run()
    assert [ids(database.rows(table)) for table in ("a", "b", "c")] == [[1, 2], [1], [1, 2]]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("canal-json", None, {"data": [{"id": "1", "t": "2"}], "type": "INSERT", "isDdl": False, "pkNames": KEY}),
        ("maxwell-json", None, {"type": "insert", "data": {"id": 1, "t": 2}, "primary_key_columns": KEY}),
        ("ogg-json", None, {"op_type": "I", "after": {"id": 1, "t": 2}, "primary_keys": KEY}),
        ("row-kind", {"id": 1, "t": 2}, {"row_kind": "+I", "id": 1, "t": 2}),
    ],
)
def test_every_format_that_says_the_key(database: Database, kafka: Kafka, name: str, key: Row, message: Row) -> None:
    """In the message, or in its key."""
    kafka.create_topic(database.topic())
    database.format = name
    database.produce([(key, message)])
    database.run()
    assert database.identifiers("orders") == {"id", "t"}
    assert [(int(row["id"]), int(row["t"])) for row in database.rows("orders")] == [(1, 2)]
    database.produce([(key and {"id": 1}, json.loads(json.dumps(message).replace(json.dumps(KEY), '["id"]')))])
    assert "was id, t, and from partition 0 offset 1 on it is id" in stops(database)
