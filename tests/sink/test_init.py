"""`rowdelta init`: the file that it writes from a broker's real messages, or from a folder, passes `check` and runs."""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession

from changelog.recognition import Recognized
from sink import config
from sink.cli import main
from sink.commands import inspection, proposal
from sink.commands.discovery import Found, own_topic
from sink.commands.initialize import _for_java, _write
from sink.config import Config
from sink.errors import ConfigError
from sink.run.pipeline import Pipeline
from sink.sources.kafka_client import client_settings
from tests.changelog.messages import SAMPLES
from tests.stack.kafka import Kafka, running_kafka
from tests.stack.process import free_ports
from tests.stack.registry import Registry, running_registry

ORDERS_OF_SHOP = [  # what dml.sql left of the table, in the messages with an envelope
    {"id": 1, "customer": "ann", "amount": "11.00", "status": "paid"},
    {"id": 4, "customer": "cat", "amount": "5.00", "status": "new"},
    {"id": 7, "customer": "after-ddl", "amount": "3.00", "status": "ddl2"},
    {"id": 100, "customer": "bob", "amount": "99999999.99", "status": "new"},
]


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with running_registry() as server:
        yield server


@pytest.fixture(scope="module")
def kafka(registry: Registry) -> Iterator[Kafka]:
    """The real messages of a Postgres database: `old` without a schema, `shop` with one, `avro` as Avro; and topics of
    other kinds.
    """
    renamed = {"pgj": "old", "pgenv": "shop", "pga": "avro"}
    with running_kafka() as broker:
        messages: dict[str, list[tuple[bytes | None, bytes | None]]] = {
            "shop.public.later": [],
            "connect-offsets": [(b'["shop",{"server":"shop"}]', b"{}")],
            "metrics": [(None, b'{"cpu": 0.5}')],
        }
        with SchemaRegistryClient({"url": registry.url}) as client:
            known = json.loads((SAMPLES / "pga-schemas.json").read_text(encoding="utf-8"))
            ids = {int(n): client.register_schema(f"s{n}", Schema(json.dumps(s))) for n, s in known.items()}
        for server, name in renamed.items():
            for line in (SAMPLES / f"{server}.jsonl").read_text(encoding="utf-8").splitlines():
                message = json.loads(line)
                parts = [_bytes(message[part], ids if server == "pga" else None) for part in ("key", "value")]
                messages.setdefault(message["topic"].replace(server, name, 1), []).append((parts[0], parts[1]))
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for topic, content in messages.items():
            broker.create_topic(topic)
            for key, value in content:
                producer.produce(topic, key=key, value=value, partition=0)
        assert producer.flush(60) == 0
        yield broker


def _bytes(content: Any, ids: Mapping[int, int] | None) -> bytes | None:
    """The bytes of a sample's key or value. In Avro, the schema's id is replaced by its id in the test's registry."""
    if content is None:
        return None
    if ids is None:
        return json.dumps(content).encode()
    raw = base64.b64decode(content)
    return b"\0" + ids[int.from_bytes(raw[1:5], "big")].to_bytes(4, "big") + raw[5:]


def tables(file: Path) -> dict[str, tuple[str, Sequence[str]]]:
    """Source -> target and key, of a configuration."""
    return {table.source: (table.target, list(table.key)) for table in config.load(file).tables}


def check(spark: SparkSession, loaded: Config) -> list[str]:
    lines = list(inspection.check(spark, loaded))
    assert lines[-1] == "ok"
    return lines


def init(file: Path, kafka: Kafka, *arguments: str) -> int:
    return main(["init", "--bootstrap-servers", kafka.bootstrap_servers, "--output", str(file), *arguments])


@pytest.mark.spark
@pytest.mark.kafka
def test_a_database_from_nothing_to_tables(
    spark: SparkSession, kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each topic becomes an entry, without a schema with columns. What is left out is said."""
    file = tmp_path / "sink.yaml"
    assert init(file, kafka, "--topics", "(old|shop)[.].*") == 0
    text, said = file.read_text(encoding="utf-8"), capsys.readouterr().out
    written = tables(file)
    # the same schema in two databases: their tables must not be one
    for name in ("old", "shop"):
        assert written[f"{name}.public.comp"] == (f"lake.{name}_public.comp", []), "messages state the key"
    assert not {"old.public.nokey", "old.transaction", "shop.public.later"} & written.keys()
    assert "decimal.handling.mode=string" in text
    loaded = config.load(file)
    by_source = {table.source: table for table in loaded.tables}
    assert by_source["shop.public.orders"].columns is None
    columns = by_source["old.public.orders"].columns
    assert columns is not None
    assert (columns["amount"].type, columns["updated_at"].type) == ("string", "bigint")
    assert re.search(r"# .*\bamount\b.*: texts like base64, as which Debezium sends decimals", text)
    for line in (
        "old.public.orders: debezium-json, key id",
        "shop.public.comp: debezium-json, key tenant, id",
        "old.public.nokey: left out, debezium-json, but its messages have no key",
        "shop.public.later: left out, no messages yet",
    ):
        assert line in said
    assert re.search(r"no changes of tables: .*\bold\.transaction\b", said)
    before = text
    assert init(file, kafka) == 2  # the file is there
    assert file.read_text(encoding="utf-8") == before
    assert "is left as it is" in capsys.readouterr().err

    check(spark, loaded)
    Pipeline(spark, loaded).run()
    shop = spark.sql(
        "SELECT id, customer, CAST(amount AS STRING) amount, status FROM lake.shop_public.orders ORDER BY id"
    )
    assert shop.toArrow().to_pylist() == ORDERS_OF_SHOP
    old = spark.sql("SELECT id, customer FROM lake.old_public.orders ORDER BY id").toArrow().to_pylist()
    names = {1: "ann", 5: "tx1", 6: "tx2", 7: "after-ddl", 9: "nullts", 100: "bob"}
    assert {row["id"]: row["customer"] for row in old} == names | {4: "cat"}
    assert spark.table("lake.shop_public.comp").count() == 1


@pytest.mark.spark
@pytest.mark.kafka
def test_avro(
    spark: SparkSession, kafka: Kafka, registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sink.yaml"
    topics = ("--topics", "avro[.].*")
    assert init(file, kafka, *topics) == 2
    assert "Give --registry" in capsys.readouterr().err
    (port,) = free_ports(1)
    assert init(file, kafka, *topics, "--registry", f"http://127.0.0.1:{port}") == 75
    assert "Correct --registry" in capsys.readouterr().err
    assert not file.exists()
    assert init(file, kafka, *topics, "--registry", registry.url) == 0
    loaded = config.load(file)
    assert (loaded.source.format, loaded.source.format_options["schema.registry.url"]) == (
        "debezium-avro",
        registry.url,
    )
    assert all(table.columns is None for table in loaded.tables)
    assert any("amount decimal(12,2)" in line for line in check(spark, loaded))


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize(
    ("name", "options", "message", "arguments"),
    [
        ("canal-json", {}, {"type": "INSERT", "isDdl": False, "es": 1, "pkNames": ["id"], "data": ["row"]}, ()),
        (
            "maxwell-json",
            {},
            {"database": "shop", "type": "insert", "ts": 1, "xid": 1, "data": "row", "primary_key_columns": ["id"]},
            (),
        ),
        ("ogg-json", {}, {"table": "S.T", "op_type": "I", "pos": "1", "primary_keys": ["id"], "after": "row"}, ()),
        ("dms-json", {}, {"data": "row", "metadata": {"record-type": "data", "operation": "insert"}}, ("--key", "id")),
        ("debezium-json", {"flattened": "true"}, {"__deleted": "false", "id": "id", "customer": "Ada"}, ()),
        ("row-kind", {}, {"row_kind": "+I", "id": "id", "customer": "Ada"}, ()),
    ],
)
def test_check_accepts_what_is_written_of_each_format(
    spark: SparkSession,
    kafka: Kafka,
    tmp_path: Path,
    name: str,
    options: Mapping[str, str],
    message: Mapping[str, Any],
    arguments: Sequence[str],
) -> None:
    """:param message: has "row" and "id" where these are to be put."""
    topic, file = f"kinds.{name}.orders", tmp_path / "sink.yaml"
    kafka.create_topic(topic)
    keyed = name in ("debezium-json", "row-kind")  # the others have the key in the message, or nowhere
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in (1, 2, 3):
        row = json.dumps({"id": number, "customer": "Ada"})
        value = json.dumps(message).replace('"row"', row).replace(': "id"', f": {number}")
        producer.produce(topic, value=value, key=json.dumps({"id": number}) if keyed else None)
    assert producer.flush(60) == 0
    assert init(file, kafka, "--topics", re.escape(topic), *arguments) == 0
    loaded = config.load(file)
    assert (loaded.source.format, loaded.source.format_options) == (name, options)
    lines = check(spark, loaded)
    assert any(re.search(r"columns.*: id \w+ \(key\), customer string$", line) for line in lines), lines


@pytest.mark.kafka
def test_a_broker_that_has_nothing_for_us(kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sink.yaml"
    for topics, code, text in (
        ("metrics", 2, "JSON objects that are not changes of rows, with the fields cpu"),
        ("shop.public.later", 2, "no topic has a message yet"),
        ("nothing", 2, "matches 'nothing'; there are avro."),
        ("(", 2, "is not a regular expression"),
        ("connect-offsets", 2, "matches 'connect-offsets'"),
    ):
        assert init(file, kafka, "--topics", topics) == code
        assert text in capsys.readouterr().err
    assert init(file, kafka, "--option", "no.such.option=1") == 2
    assert "No such configuration property" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.kafka
def test_a_broker_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "sink.yaml"
    assert main(["init", "--bootstrap-servers", f"127.0.0.1:{port}", "--output", str(file)]) == 75
    assert "Connection refused" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.kafka
def test_secrets_are_not_in_the_file(
    kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker of this test needs no user, so the client's options have no effect."""
    file = tmp_path / "sink.yaml"
    monkeypatch.setenv("MY_PASSWORD", "from-the-environment")
    options = ["ssl.key.password=hunter2", "kafka.ssl.keystore.password=${MY_PASSWORD}", "client.id=init"]
    given = [part for option in options for part in ("--option", option)]
    assert init(file, kafka, "--topics", "shop[.].*", *given) == 0
    text = file.read_text(encoding="utf-8")
    assert "hunter2" not in text + capsys.readouterr().out
    assert "from-the-environment" not in text
    assert "Set KAFKA_SSL_KEY_PASSWORD in the environment" in text
    monkeypatch.setenv("KAFKA_SSL_KEY_PASSWORD", "hunter2")
    found = config.load(file).source.options
    assert found["kafka.ssl.key.password"] == "hunter2"
    assert found["kafka.ssl.keystore.password"] == "from-the-environment"
    assert found["kafka.client.id"] == "init"


@pytest.mark.kafka
@pytest.mark.parametrize("password", ['a"b\\c', "hunter2"])
@pytest.mark.parametrize("given", ["{}", "${{MY_PASSWORD}}"])
def test_the_file_logs_in_as_init_did(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str, given: str
) -> None:
    """A password in Java's login line has escapes, and a variable's value is put there as it is."""
    file = tmp_path / "sink.yaml"
    monkeypatch.setenv("MY_PASSWORD", password)
    user = ("--option", "sasl.username=ada", "--option", f"sasl.password={given.format(password)}")
    assert init(file, kafka, "--topics", "shop[.].*", *user) == 0
    text = file.read_text(encoding="utf-8")
    assert password not in text
    told = re.search(r"(?m)^# (KAFKA_SASL_JAAS_CONFIG): (.*;)", text)
    assert (told is not None) == ('"' in password)
    if told is not None:
        monkeypatch.setenv(told[1], told[2].replace("…", r"a\"b\\c"))
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", password)
    assert client_settings(config.load(file).source.options)["sasl.password"] == password


def test_options_of_either_client() -> None:
    """A user is given as librdkafka wants it, and written as Java wants it; or as Java wants it right away."""
    given = {"kafka.sasl.username": 'a"b', "kafka.sasl.password": "p\\q", "kafka.sasl.mechanism": "SCRAM-SHA-512"}
    java = _for_java(given | {"kafka.ssl.ca.location": "ca.pem"})
    assert java["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="a\\"b" password="p\\\\q";'
    )
    assert java["kafka.ssl.truststore.type"] == "PEM"
    assert client_settings(java | {"startingOffsets": "earliest"}) == {
        "sasl.username": 'a"b',
        "sasl.password": "p\\q",
        "sasl.mechanism": "SCRAM-SHA-512",
        "ssl.ca.location": "ca.pem",
    }


@pytest.mark.spark
def test_change_files(spark: SparkSession, tmp_path: Path) -> None:
    """Parquet files in a folder for each table: the column with the kind and the one that orders are found."""
    for name in ("orders", "items"):
        rows = {"op": ["I", "I", "U", "D"], "seq": [1, 2, 3, 4], "id": [1, 2, 1, 2], "name": ["a", "b", "c", None]}
        folder = tmp_path / "changes" / name
        folder.mkdir(parents=True)
        pq.write_table(pa.table(rows), folder / "0.parquet")
    (tmp_path / "changes" / "empty").mkdir()
    file = tmp_path / "sink.yaml"
    assert main(["init", "--files", str(tmp_path / "changes"), "--output", str(file), "--key", "id"]) == 0
    loaded = config.load(file)
    assert loaded.source.format_options["column"] == "op"
    assert tables(file) == {f"{tmp_path}/changes/{n}": (f"lake.changes.{n}", ["id"]) for n in ("items", "orders")}
    assert list(inspection.check(spark, loaded))[-1] == "ok"
    Pipeline(spark, loaded).run()
    for name in ("orders", "items"):
        assert spark.sql(f"SELECT id, name FROM lake.changes.{name}").toArrow().to_pylist() == [{"id": 1, "name": "c"}]


@pytest.mark.spark
def test_lines_of_json_in_files(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that has the files itself."""
    folder = tmp_path / "customers"
    folder.mkdir()
    rows = [{"row_kind": "+I", "seq": n, "id": n, "mail": f"{n}@x", "paid": "1.50"} for n in range(3)]
    (folder / "0.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "sink.yaml"
    assert main(["init", "--files", str(folder), "--output", str(file)]) == 2
    assert "name them with --key" in capsys.readouterr().err
    assert main(["init", "--files", str(folder), "--output", str(file), "--key", "id"]) == 0
    loaded = config.load(file)
    (table,) = loaded.tables
    assert {name: column.type for name, column in (table.columns or {}).items()} == {
        "seq": "bigint", "id": "bigint", "mail": "string", "paid": "string",
    }  # fmt: skip
    check(spark, loaded)


def test_folders_without_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "sink.yaml", tmp_path / "changes"
    arguments = ["init", "--files", str(folder), "--output", str(file)]
    assert main(arguments) == 2
    assert "is not a folder" in capsys.readouterr().err
    folder.mkdir()
    assert main(arguments) == 2
    assert "has no change files" in capsys.readouterr().err
    pq.write_table(pa.table({"code": ["a"], "seq": [1]}), folder / "0.parquet")
    assert main(arguments) == 2
    assert "no column with the kind of change among code, seq" in capsys.readouterr().err
    pq.write_table(pa.table({"code": ["a"], "row_kind": ["+I"]}), folder / "0.parquet")
    assert main(arguments) == 2
    assert "name them with --key" in capsys.readouterr().err
    assert main([*arguments, "--key", "code"]) == 2
    assert "give --order-by" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["2024", "no", "1e3", "orders"])
def test_a_folder_whose_name_yaml_would_not_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    pq.write_table(pa.table({"id": ["a"], "row_kind": ["+I"], "seq": [1]}), tmp_path / name / "0.parquet")
    file = tmp_path / "sink.yaml"
    assert main(["init", "--files", str(tmp_path / name), "--output", str(file), "--key", "id"]) == 0
    assert config.load(file).sink.id == name


@pytest.mark.parametrize(
    ("topic", "sink_id", "target"),
    [
        ("no.public.orders", "no", "lake.public.orders"),
        ("1.public.orders", "1", "lake.public.orders"),
        ("shop.a.", "shop", "lake.a._"),
        (".inf", "rowdelta", "lake.cdc.inf"),
    ],
)
def test_a_topic_with_an_odd_name(tmp_path: Path, topic: str, sink_id: str, target: str) -> None:
    place = proposal.Place("kafka", {"kafka.bootstrap.servers": "b:9092"}, tmp_path)
    found = Found(topic, Recognized("debezium-json", has_schema=True), ("id",), 10)
    (tmp_path / "sink.yaml").write_text(proposal.write(place, [found]), encoding="utf-8")
    assert config.load(tmp_path / "sink.yaml").sink.id == sink_id
    assert tables(tmp_path / "sink.yaml") == {topic: (target, ["id"])}


def test_a_file_that_cannot_be_loaded_does_not_stay(tmp_path: Path) -> None:
    """Otherwise it would be in the way of the next `init`."""
    with pytest.raises(ConfigError):
        _write(tmp_path / "sink.yaml", "sink: {id: 2024}", {})
    assert list(tmp_path.iterdir()) == []


def test_columns_that_are_null_in_all_messages_are_not_written(tmp_path: Path) -> None:
    """In lines of files here; topics are looked at in the same way."""
    folder = tmp_path / "orders"
    folder.mkdir()
    rows = [{"row_kind": "+I", "seq": n, "id": n, "note": None, "half": [None, "a"][n], "gone": None} for n in range(2)]
    (folder / "0.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "sink.yaml"
    assert main(["init", "--files", str(folder), "--output", str(file), "--key", "id"]) == 0
    assert list(config.load(file).tables[0].columns or {}) == ["seq", "id", "half"]


def test_topics_that_are_no_changelogs_by_their_name() -> None:
    own = ["__consumer_offsets", "_schemas", "connect-configs", "my-connect-status", "docker-connect-offsets"]
    assert all(own_topic(name) for name in own)
    assert not any(own_topic(name) for name in ("shop.public.orders", "connections", "shop.connect.offers"))


def test_the_most_frequent_format_is_written_and_the_others_are_named(tmp_path: Path) -> None:
    def found(name: str, format_: str) -> Found:
        return Found(name, Recognized(format_, has_schema=True), ("id",), 10)

    results = [found("a.x", "maxwell-json"), found("b.x", "debezium-json"), found("b.y's", "debezium-json")]
    place = proposal.Place(
        "kafka", {"kafka.bootstrap.servers": "b:9092"}, tmp_path, what="Kafka at b:9092", file="my.yaml"
    )
    (tmp_path / "sink.yaml").write_text(proposal.write(place, results), encoding="utf-8")
    assert config.load(tmp_path / "sink.yaml").source.format == "debezium-json"
    assert tables(tmp_path / "sink.yaml") == {
        "b.x": ("lake.b.x", ["id"]),
        "b.y's": ("lake.b.y_s", ["id"]),
    }
    assert "#   rowdelta check my.yaml " in (tmp_path / "sink.yaml").read_text(encoding="utf-8")
    assert r"a.x: maxwell-json, needs a file of its own: init again with --topics 'a\.x'" in proposal.told(
        "kafka", results
    )
    assert "a.x: maxwell-json, needs a file of its own: init again with --files a.x" in proposal.told("files", results)
