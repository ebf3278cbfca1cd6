"""`init`, `check` and `run` on topics that the user has: wherever in the stream of changes the looked-at messages begin
and end, so also between a delete and its tombstone.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession

from sink import config
from sink.cli import main
from sink.commands import discovery, inspection
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.table import inference
from tests.changelog.avro_messages import message
from tests.stack.kafka import Kafka, running_kafka
from tests.stack.process import wait_until
from tests.stack.registry import Registry, running_registry

HISTORY = ["c1", "d1", "t1", "c2", "u2", "d2", "t2"]
"""Operation and key of each change; t is a tombstone."""
WINDOWS = [(begin, end) for end in range(1, len(HISTORY) + 1) for begin in range(end)]
FORMATS = ["debezium-json", "debezium-avro"]

ID = {"name": "id", "type": "long"}
ROW = {"type": "record", "name": "Row", "fields": [ID, {"name": "name", "type": ["null", "string"], "default": None}]}
KEY = {"type": "record", "name": "Key", "fields": [ID]}
EVENT = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "Row"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
HEARTBEAT = {"type": "record", "name": "Heartbeat", "fields": [{"name": "ts_ms", "type": "long"}]}


def topic(format_: str, begin: int, end: int) -> str:
    return f"{format_}.public.w{begin}_{end}"


def content(format_: str, begin: int, end: int) -> dict[int, str] | None:
    """The rows that a window leaves; None if its messages don't tell the table's columns. Avro's deletes do."""
    rows: dict[int, str] = {}
    for change in HISTORY[begin:end]:
        rows |= {int(change[1]): change}
        if change[0] in "dt":
            del rows[int(change[1])]
    tell = "cud" if "avro" in format_ else "cu"
    return rows if any(change[0] in tell for change in HISTORY[begin:end]) else None


def event(change: str) -> dict[str, Any]:
    removed = change[0] == "d"
    row = {"id": int(change[1]), "name": HISTORY[HISTORY.index(change) - 1] if removed else change}
    return {"before": row if removed else None, "after": None if removed else row, "op": change[0]}


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with running_registry() as server:
        yield server


@pytest.fixture(scope="module")
def kafka(registry: Registry) -> Iterator[Kafka]:
    """A topic for each window and format, and heartbeats beside them."""
    with SchemaRegistryClient({"url": registry.url}) as client:
        ids = [client.register_schema(f"s{n}", Schema(json.dumps(s))) for n, s in enumerate((KEY, EVENT, HEARTBEAT))]
    key_id, event_id, heartbeat_id = ids

    def spelled(format_: str, schema_id: int, schema: Any, value: Any) -> bytes:
        return message(schema_id, schema, value) if "avro" in format_ else json.dumps(value).encode()

    with running_kafka() as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        names = [topic(format_, *window) for format_ in FORMATS for window in WINDOWS]
        names += [f"{format_}.public.heartbeats" for format_ in FORMATS]
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
            future.result(60)
        assert wait_until(lambda: set(names) <= admin.list_topics(timeout=10).topics.keys())
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for format_ in FORMATS:
            for begin, end in WINDOWS:
                for change in HISTORY[begin:end]:
                    key = spelled(format_, key_id, KEY, {"id": int(change[1])})
                    value = None if change[0] == "t" else spelled(format_, event_id, EVENT, event(change))
                    producer.produce(topic(format_, begin, end), key=key, value=value, partition=0)
            beat = spelled(format_, heartbeat_id, HEARTBEAT, {"ts_ms": 1767323045123})
            producer.produce(f"{format_}.public.heartbeats", value=beat)
        assert producer.flush(60) == 0
        yield broker


@pytest.fixture(params=FORMATS)
def format_(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small samples, so that their edges are between all messages of the windows."""
    monkeypatch.setattr(discovery, "SAMPLE", 2)
    monkeypatch.setattr(inference, "SAMPLE", 4)
    monkeypatch.setattr(inference, "LAST", 3)
    return str(request.param)


def configured(
    format_: str, kafka: Kafka, registry: Registry, folder: Path, namespace: str, **entry: Any
) -> tuple[Config, dict[str, Any]]:
    """One pattern for all windows, without columns."""
    values: dict[str, Any] = {
        "sink": {"id": namespace, "checkpoint": str(folder / "state"), "trigger": "available-now"},
        "source": {
            "type": "kafka",
            "format": format_,
            "format_options": {"schema.registry.url": registry.url} if "avro" in format_ else {},
            "options": {"kafka.bootstrap.servers": kafka.bootstrap_servers, "startingOffsets": "earliest"},
        },
        "maintenance": {"budget": 0, "expire": None, "orphans": None},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [{"source": rf"{format_}\.public\.(.*)", "target": f"lake.{namespace}.$1"} | entry],
    }
    return Config.model_validate(values), values


@pytest.mark.spark
@pytest.mark.kafka
def test_what_init_writes_passes_check(
    spark: SparkSession,
    format_: str,
    kafka: Kafka,
    registry: Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "sink.yaml"
    arguments = ["--topics", rf"{format_}\..*", "--registry", registry.url, "--output", str(file)]
    assert main(["init", "--bootstrap-servers", kafka.bootstrap_servers, *arguments]) == 0
    text = file.read_text(encoding="utf-8")
    assert "could be inferred" not in text
    assert f"no changes of tables: {format_}.public.heartbeats" in capsys.readouterr().out
    lines = list(inspection.check(spark, config.load(file)))
    assert lines[-1] == "ok"
    for begin, end in WINDOWS:
        looked_at = {*range(begin, min(begin + 2, end)), *range(max(begin, end - 2), end)}
        if any(HISTORY[place][0] in "cu" for place in looked_at):
            assert any(line.startswith(f"{topic(format_, begin, end)} -> lake.") for line in lines)


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize("entry", [{}, {"key": ["id"]}])
def test_check_at_each_window(
    spark: SparkSession, format_: str, kafka: Kafka, registry: Registry, tmp_path: Path, entry: Mapping[str, Any]
) -> None:
    loaded, _ = configured(format_, kafka, registry, tmp_path, "windows", **entry)
    lines = list(inspection.check(spark, loaded))
    assert lines[-1] == "ok"
    assert f"{format_}.public.heartbeats is left out: its messages are heartbeats of Debezium" in lines
    for begin, end in WINDOWS:
        name, target = topic(format_, begin, end), f"lake.windows.w{begin}_{end}"
        (line,) = [line for line in lines if line.startswith(f"{name} -> ")]
        first = content(format_, begin, min(begin + 4, end))
        if first is not None:
            assert line == f"{name} -> {target}: will be created"
        else:
            assert "no messages yet that tell the table's key and columns" in line


@pytest.mark.spark
@pytest.mark.kafka
def test_run_at_many_windows(
    spark: SparkSession, format_: str, kafka: Kafka, registry: Registry, tmp_path: Path
) -> None:
    """Some with a key and some without: the windows that begin or end at a delete or its tombstone."""
    namespace = f"first_{format_[-4:]}"
    chosen = [window for window in WINDOWS if HISTORY[window[0]][0] in "dt" or HISTORY[window[1] - 1][0] in "dt"][::2]
    names = ["heartbeats", *(f"w{begin}_{end}" for begin, end in chosen)]
    _, values = configured(format_, kafka, registry, tmp_path, namespace)
    keyed = {topic(format_, *window): ["id"] for window in chosen[::2]}
    source = rf"{format_}\.public\.({'|'.join(names)})"
    values["tables"] = [{"source": source, "target": f"lake.{namespace}.$1", "keys": keyed}]
    values["catalogs"]["lake"]["warehouse"] = str(spark.conf.get("spark.sql.catalog.lake.warehouse"))
    loaded = Config.model_validate(values)
    Pipeline(spark, loaded).run()
    found = {row.tableName for row in spark.sql(f"SHOW TABLES IN lake.{namespace}").collect()} - {"dead_letters"}
    assert found == {f"w{begin}_{end}" for begin, end in chosen if content(format_, begin, end) is not None}
    for begin, end in chosen:
        if (rows := content(format_, begin, end)) is not None:
            read = spark.table(f"lake.{namespace}.w{begin}_{end}").collect()
            assert {row.id: row.name for row in read} == rows, (begin, end)
    assert spark.table(loaded.dead_letter_table).count() == 0
