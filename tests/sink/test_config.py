"""A wrong configuration is refused with file, line, key, value and what was expected, and never shows a secret."""

import re
from pathlib import Path

import pytest

from sink.config import Config, PartitionField, load
from sink.databases.tables import database_table
from sink.errors import ConfigError
from sink.table.patterns import resolve_tables

KAFKA = """\
sink:
  id: shop
  checkpoint: ./state/shop
source:
  type: kafka
  format: debezium-json
  options:
    kafka.bootstrap.servers: localhost:9092
    subscribe: shop.public.orders
catalogs:
  lake: {type: hadoop, warehouse: ./warehouse}
tables:
  - source: shop.public.orders
    target: lake.shop.orders
    key: [id]
    columns: {id: bigint, customer: string, amount: "decimal(12,2)"}
    partition_by: ["bucket(8, id)"]
"""

FILES = """\
sink: {id: shop, checkpoint: ./state}
source: {type: files, format: row-kind}
catalogs: {lake: {type: hadoop, warehouse: ./warehouse}}
tables:
  - {source: ./changes, target: lake.shop.orders, key: [id], columns: {id: bigint}, order_by: [seq]}
"""


def load_text(folder: Path, text: str) -> Config:
    path = folder / "sink.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def refusal(folder: Path, text: str) -> str:
    """The message with which `text` is refused. It must begin with the file."""
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text)
    message = str(caught.value)
    assert message.startswith(str(folder / "sink.yaml"))
    assert caught.value.exit_code == 2
    return message


def test_the_example_loads_with_its_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, KAFKA)
    assert config.sink.trigger == "available-now"
    assert config.sink.on_bad_record == "dead-letter"
    assert config.dead_letter_table == "lake.shop.dead_letters"
    assert config.tables[0].mode == "upsert"
    assert config.tables[0].deletes == "position"
    assert config.tables[0].partition_fields == [PartitionField(transform="bucket", column="id", parameter=8)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "  id: shop",
            "  idd: shop",
            r":2: sink\.idd: unknown key \(did you mean 'id'\?\)\. Known here: id, checkpoint, trigger",
        ),
        (
            "    key: [id]",
            "    key: [id]\n    soft_delete: {colum: gone}",
            r":16: tables\[0\]\.soft_delete\.colum: unknown key \(did you mean 'column'\?\)\. Known here: column, ",
        ),
        ("  id: shop\n", "", r":1: sink\.id: missing\. Add it, for example `id: shop`"),
        ("  type: kafka", "  type: rabbit", r":5: source\.type: got 'rabbit', expected 'kafka', 'files' or 'debezium'"),
        ("    key: [id]", "    key: id", r":15: tables\[0\]\.key: got 'id', expected a list: \[id\]"),
        ("    key: [id]", "    key: []", r":15: tables\[0\]\.key: got a list of 0, expected at least 1"),
        ("    key: [id]", "    key: [id, id]", r":15: tables\[0\]\.key: key names a column twice"),
        (
            "    key: [id]",
            "    key: [idd]",
            r":15: tables\[0\]\.key: key names 'idd', which is not in columns \(did you mean 'id'\?\)",
        ),
        ("bucket(8, id)", "bucket(id)", r":17: tables\[0\]\.partition_by: 'bucket\(id\)' is not a partition"),
        (
            "bucket(8, id)",
            "bucket(0, id)",
            r"'bucket\(0, id\)' is not a partition field; write a column name, bucket\(N, column\)",
        ),
        (
            '["bucket(8, id)"]',
            '["bucket(8, id)"]\n    properties: {format-version: "1"}',
            r":18: tables\[0\]\.properties\.format-version: got '1', expected 2 or 3",
        ),
        ("bucket(8, id)", "region", r"partition_by names 'region', which is not in columns"),
        ("lake.shop.orders", "orders", r":14: tables\[0\]\.target: got 'orders'; write catalog\.namespace\.table"),
        ("lake.shop.orders", "lak.shop.orders", r"target lak\.shop\.orders is in catalog 'lak'.*did you mean 'lake'"),
        ("  id: shop", "  id: my shop", r":2: sink\.id: got 'my shop'; use letters, digits"),
        (
            "  id: shop",
            "  id: shop\n  on_bad_record: fail\n  max_bad_records: 5",
            r"sink\.max_bad_records needs on_bad_record: dead-letter, but on_bad_record is fail",
        ),
        (
            "  id: shop",
            "  id: shop\n  max_bad_records: -1",
            r":3: sink\.max_bad_records: got -1, expected a whole number of at least 0",
        ),
        (
            "  id: shop",
            "  id: shop\n  dead_letter_topic: shop.public.orders",
            r"sink\.dead_letter_topic 'shop\.public\.orders' is also the source of a table",
        ),
        (
            "  id: shop",
            "  id: shop\n  dead_letter_topic: dead\n  dead_letter_options: {acks: all}",
            r"sink\.dead_letter_options: got 'acks', expected names that begin with kafka\.",
        ),
        (
            "  id: shop",
            "  id: shop\n  dead_letter_topic: dead\n  dead_letter_options: {kafka.acks: all}",
            r"replaces the source's options, so it needs kafka\.bootstrap\.servers",
        ),
        (
            "  id: shop",
            "  id: shop\n  dead_letter_options: {kafka.acks: all}",
            r"sink\.dead_letter_options needs sink\.dead_letter_topic",
        ),
        (
            "  id: shop",
            "  id: shop\n  trigger: often",
            r":3: sink\.trigger: got 'often'; write \"available-now\", or an interval",
        ),
        (
            "    subscribe: shop.public.orders\n",
            "    subscribe: other\n",
            r"'shop\.public\.orders' is not in source\.options\.subscribe",
        ),
        ("    subscribe: shop.public.orders", "    assign: x", r"name topics with source\.options\.subscribe"),
        ("    kafka.bootstrap.servers: localhost:9092\n", "", r"source\.options needs kafka\.bootstrap\.servers"),
        ("catalogs:", "catalogs:\n  spare: nothing", r":11: catalogs\.spare: got 'nothing', expected a mapping"),
        (
            "  - source",
            "  - mode: merge\n    source",
            r":13: tables\[0\]\.mode: got 'merge', expected 'upsert', 'changelog' or 'append'",
        ),
        (
            "  format: debezium-json",
            "  format: debezium-avro",
            r":4: source\.format_options: format: debezium-avro needs schema\.registry\.url",
        ),
        (
            "  format: debezium-json",
            "  format: debezium-json\n  format_options: {time.precision: connect}",
            r":7: source\.format_options\.time\.precision: unknown key \(did you mean 'time\.precision\.mode'\?\)",
        ),
        (
            "  format: debezium-json",
            "  format: debezium-json\n  format_options: {flattened: maybe}",
            r":7: source\.format_options\.flattened: got 'maybe', expected one of false, true",
        ),
        ("{id: bigint", "{_rowdelta_x: int, id: bigint", r"names beginning with _rowdelta_ are taken"),
        ("  id: shop", "  id:", r":2: sink\.id: got nothing, expected text\."),
        ("{id: bigint", "{id: {typ: bigint}", r"\.id\.typ: unknown key \(did .* 'type'\?\)\. Known here: type, from, "
                                              r"expression, stored"),
        ("  id: shop", "  id: true", r":2: sink\.id: got true, expected text: \"true\"\.$"),
        ("{id: bigint", "{id: 5", r"tables\[0\]\.columns\.id: got 5, expected a type such as bigint, or a mapping "
                                  r"with type"),
        ("  format: debezium-json", "  format: debezium-json\n  format_options: {flattened: {a: b}}",
         r"^\S+:7: source\.format_options\.flattened: got a mapping, expected text, or a list of texts that is not "
         r"empty\.$"),
        ("  id: shop", "  id: 7", r":2: sink\.id: got 7, expected text: \"7\"\."),
        ("    key: [id]", "    key:", r":15: tables\[0\]\.key: got nothing, expected a list\."),
        ("  id: shop", "  id: shop\n  trigger: 10", r":3: sink\.trigger: got 10; .* such as \"10 seconds\""),
        ("  id: shop", "  id: shop\n  max_bad_records: few", r"got 'few', expected a whole number\."),
        ("    subscribe:", "    maxOffsetsPerTrigger: many\n    subscribe:",
         r":9: source\.options\.maxOffsetsPerTrigger: got 'many', expected a whole number above 0"),
        ("    key: [id]\n", "    key: [id]\n    properties: {write.target-file-size-bytes: big}\n",
         r":16: tables\[0\]\.properties\.write\.target-file-size-bytes: got 'big', expected a whole number"),
        ("    key: [id]\n", "    key: [id]\n    properties: {write.parquet.compression-codec: lzma}\n",
         r"compression-codec: got 'lzma', expected one of zstd, gzip, snappy, lz4, brotli, uncompressed"),
        ("    key: [id]\n", "    key: [id]\n    properties: {write.format.default: orc}\n",
         r"write\.format\.default: got 'orc', but rowdelta writes Parquet only"),
        ("type: hadoop", "type: hadop", r":11: catalogs\.lake\.type: got 'hadop' \(did you mean 'hadoop'\?\)"),
        *(("  id: shop", f"  id: shop\n  http: '{value}'",
           rf":3: sink\.http\.address: got '{re.escape(value)}'; write an address of this machine")
          for value in ("8088", ":8088", "127.0.0.1", "127.0.0.1:0", "[::1]", "::1:8088", "http://127.0.0.1:80")),
        ("  id: shop", "  id: shop\n  http: 8088", r":3: sink\.http\.address: got '8088'; write an address of this"),
        ("  id: shop", "  id: shop\n  http: {adress: '127.0.0.1:8088'}",
         r":3: sink\.http\.adress: unknown key \(did you mean 'address'\?\)\. Known here: address, ready_within"),
        ("  id: shop", "  id: shop\n  http: {address: '127.0.0.1:8088', ready_within: soon}",
         r":3: sink\.http\.ready_within: got 'soon'; write an interval"),
        ("  id: shop", "  id: shop\n  log_format: xml", r":3: sink\.log_format: got 'xml', expected 'text' or 'json'"),
        ("type: hadoop, ", "", r":11: catalogs\.lake: a catalog needs a type \(hadoop, .*\), or the class "
                               r"catalog-impl"),
        ("catalogs:", "spark:\n  spark.master: locale[2]\ncatalogs:",
         r":11: spark\.spark\.master: got 'locale\[2\]', expected local"),
        *(("catalogs:", f"maintenance: {{{section}}}\ncatalogs:", rf":10: maintenance\.{expected}")
          for section, expected in [
              ("buget: 1", r"buget: unknown key \(did you mean 'budget'\?\)\. Known here: budget, window"),
              ("expire: {older: 1 day}", r"expire\.older: unknown key \(did you mean 'older_than'\?\)\. Known here: o"),
              ("budget: -1", r"budget: got -1, expected a number of at least 0\."),
              ("budget: lots", r"budget: got 'lots', expected a number\."),
              ("rewrite: {delete-ratio-threshold: 2}", r"rewrite\.delete-ratio-threshold: got 2, expected a number of "
                                                       r"at most 1\."),
              ("rewrite: {delete-ratio-threshold: 0}", r"rewrite\.delete-ratio-threshold: got 0, expected a number "
                                                       r"above 0\."),
              ("orphans: {every: often}", r"orphans\.every: got 'often'; write a time such as"),
          ]),
        ("catalogs:", "spark:\n  spark.driver.memory: lots\ncatalogs:",
         r":11: spark\.spark\.driver\.memory: got 'lots', expected a number and a unit, such as 512m"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(tmp_path: Path, before: str, after: str, expected: str) -> None:
    assert before in KAFKA
    message = refusal(tmp_path, KAFKA.replace(before, after, 1))
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("text", "host", "port", "ready_seconds"),
    [
        ("http: 127.0.0.1:8088", "127.0.0.1", 8088, 600),
        ("http: '[::1]:80'", "::1", 80, 600),
        ("http: {address: '0.0.0.0:65535', ready_within: 1 hour}", "0.0.0.0", 65535, 3600),
        ("http: sink.example.org:1\n  trigger: 10 minutes", "sink.example.org", 1, 1800),
    ],
)
def test_the_address_to_watch_a_run_at(tmp_path: Path, text: str, host: str, port: int, ready_seconds: float) -> None:
    sink = load_text(tmp_path, KAFKA.replace("  id: shop", f"  id: shop\n  {text}")).sink
    assert sink.http is not None
    assert (sink.http.host, sink.http.port, sink.ready_seconds) == (host, port, ready_seconds)
    assert load_text(tmp_path, KAFKA).sink.http is None


def test_text_that_yaml_takes_for_a_date_of_no_calendar(tmp_path: Path) -> None:
    assert load_text(tmp_path, KAFKA.replace("  id: shop", "  id: 2026-02-30")).sink.id == "2026-02-30"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (", order_by: [seq]", "", "files have no order of their own; name an order_by column"),
        ("row-kind}", "row-kind, options: {path_format: avro}}", "path_format is 'avro'; write parquet or json"),
        ("row-kind}", "debezium-json, options: {path_format: parquet}}", "debezium-json reads path_format: json"),
        ("row-kind}", "row-kind, options: {latestFirst: true}}", "latestFirst is set"),
        ("key: [id]", "key: [id], exclude: [id]", "exclude names 'id', which is in key"),
        ("bigint}", "bigint, n: {type: int, expression: id}}, unavailable: keep", "got keep, but a computed column"),
        ("key: [id]", "key: [id], unavailable: keep, mode: changelog", "got keep, but mode changelog takes changes as"),
        ("key: [id]", "key: [id], unavailable: keep, deletes: equality", "or copy-on-write, or unavailable: reject"),
        ("key: [id]", "key: [id], late: drop, deletes: equality", "with deletes: equality nothing tells what"),
        ("key: [id]", "key: [id], late: drop, mode: changelog", "got drop, but mode changelog takes changes as they"),
        ("order_by: [seq]", "mode: append, late: drop", "got drop, but mode append takes changes as they are"),
        ("key: [id]", "key: [id], soft_delete: {column: gone}, mode: changelog", "got it, but mode changelog takes"),
        ("key: [id]", "key: [id], soft_delete: {column: gone}, deletes: equality", "nothing finds the row. Write"),
        ("key: [id]", "key: [id], soft_delete: {column: gone}, source_deletes: ignore", "Keep one of the two"),
        ("key: [id]", "key: [id], soft_delete: {column: gone}, truncate: apply", "truncate: apply removes rows"),
        ("key: [id]", "key: [id], soft_delete: {column: id}", "soft_delete.column: table lake.shop.orders: got 'id'"),
        ("key: [id]", "key: [id], soft_delete: {column: ID}", "'id' is a column twice in columns, metadata and soft"),
        ("key: [id]", "key: [id], late: drop, soft_delete: {column: _order}", "which is in order_column too"),
        ("key: [id]", "key: [id], soft_delete: {column: gone, at: Gone}", "soft_delete.at: got 'Gone', which is the"),
        ("key: [id]", "key: [id], soft_delete: {column: gone, purge: 1 day}", "nothing says when a row was deleted"),
        ("key: [id]", "key: [id], soft_delete: {column: a.b}", "got the column 'a.b'; a name has no ' or ."),
        ("order_by: [seq]", "mode: append, source_deletes: ignore", "got ignore, but mode append takes changes as"),
        ("key: [id]", "key: [id], source_deletes: ignore, where: id > 1", "Leave where out, or source_deletes: apply"),
        ("order_by: [seq]", "order_by: [headers.x]", "files have no headers; name a field of the rows"),
        ("key: [id]", "key: [id], tombstones: 7 days", "it is for late: drop, late: dead-letter and history"),
        ("{id: bigint", "{ID: int, id: bigint", "'ID' is a column twice in columns, metadata and"),
        ("key: [id]", "key: [id], metadata: [_op, _op]", "'_op' is a column twice in columns, metadata and"),
        ("key: [id]", "key: [_op], metadata: [_op]", "key names '_op', which is a metadata column"),
        (
            "row-kind}",
            "avro, format_options: {schema.registry.url: 'http://registry:8081'}}",
            "avro reads messages of Kafka, and source.type is files",
        ),
        ("tables:\n", "tables:\n  - {source: ./b, target: lake.shop.orders, key: [id], order_by: [seq]}\n",
         "target lake.shop.orders is used by more than one table. Give each entry a target of its own"),
        ("tables:\n", "tables:\n  - {source: ./changes, target: lake.shop.b, key: [id], order_by: [seq]}\n",
         "is used by more than one table. Keep one of the entries"),
        ("id: shop,", "id: shop, dead_letter_table: other.shop.bad,", "in a catalog that catalogs does not define"),
        ("row-kind}", "row-kind, options: {maxFilePerTrigger: 1}}", "(did you mean 'maxFilesPerTrigger'?)"),
        ("tables:\n", "index: {location: ./warehouse/shop/orders/index}\ntables:\n",
         "warehouse/shop/orders, which is for table lake.shop.orders. Name a folder elsewhere"),
        ("./state", "./changes/state", "changes, which is for the change files of lake.shop.orders"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(tmp_path: Path, before: str, after: str, expected: str) -> None:
    assert before in FILES
    assert expected in refusal(tmp_path, FILES.replace(before, after, 1))


DEBEZIUM = """
sink: {id: shop, checkpoint: ./state, trigger: 1 second}
source:
  type: debezium
  connector:
    connector.class: io.debezium.connector.postgresql.PostgresConnector
    topic.prefix: shop
  buffer: ./state/buffer
catalogs: {lake: {type: hadoop, warehouse: ./warehouse}}
tables: [{source: shop.public.orders, target: lake.shop.orders}]
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("./state/buffer", "s3a://bucket/b", "got s3a://bucket/b, expected a folder of this machine, or one that"),
        ("./state/buffer", "hdfs:/shop/b", "got hdfs:/shop/b, expected a folder of this machine"),
        ("./state/buffer", "./warehouse/shop/orders/b", "which is for table lake.shop.orders. Name a folder elsewhere"),
        ("  buffer: ./state/buffer\n", "", "source.buffer: got None, expected a folder of this machine"),
        ("io.debezium.connector.postgresql.", "com.shop.", "got com.shop.PostgresConnector, expected a connector of"),
        ("topic.prefix", "schema.history.internal: x\n    topic.prefix", "the sink sets this property itself"),
        ("    topic.prefix: shop\n", "", "topic.prefix is missing"),
        (
            "postgresql.PostgresConnector",
            "mysql.MySqlConnector\n    heartbeat.interval.ms: 0",
            "source.connector.heartbeat.interval.ms: got 0, but heartbeats tell how far the connector is",
        ),
        ("topic.prefix", "offset.storage: x\n    topic.prefix", "the sink sets this property itself. Leave it out"),
        ("topic.prefix", "value.converter: x\n    topic.prefix", "the sink sets this property itself. Leave it out"),
        ("type: debezium", "type: debezium\n  format: debezium-avro", "but Debezium's engine writes JSON here"),
        ("type: debezium", "type: debezium\n  options: {subscribe: t}", "which type: debezium doesn't have"),
        ("type: debezium", "type: files\n  format: row-kind", "connector is for type: debezium, and type is files"),
        ("tables:", "load: {auto: true}\ntables:", "tables are loaded only from the database in source.database"),
        (
            "  buffer: ./state/buffer",
            "    database.hostname: db\n    database.dbname: shop\n    snapshot.mode: initial\n"
            "  buffer: ./state/buffer\nload: {auto: true}",
            "source.connector.snapshot.mode: got initial, but load.auto is true",
        ),
    ],
)
def test_debeziums_engine_gets_what_it_needs(tmp_path: Path, before: str, after: str, expected: str) -> None:
    source = load_text(tmp_path, DEBEZIUM).source
    assert (source.format, source.buffer) == ("debezium-json", str(tmp_path / "state" / "buffer"))
    as_uri = DEBEZIUM.replace("./state/buffer", (tmp_path / "b").as_uri())
    assert load_text(tmp_path, as_uri).source.buffer == str(tmp_path / "b")
    assert before in DEBEZIUM
    assert expected in refusal(tmp_path, DEBEZIUM.replace(before, after, 1))


def test_a_connector_says_its_database(tmp_path: Path) -> None:
    said = {
        "hostname": "db",
        "port": 5433,
        "user": "reader",
        "password": "pass:word",
        "dbname": "my shop",
        "sslmode": "verify-ca",
        "sslrootcert": "/etc/ca.pem",
    }
    lines = "".join(f"    database.{name}: {value}\n" for name, value in said.items())
    text = DEBEZIUM.replace("  buffer:", f"{lines}    slot.name: mine\n  buffer:")
    found = load_text(tmp_path, text).source.database
    assert found is not None
    assert found.model_dump(exclude_none=True) == {
        "url": "jdbc:postgresql://db:5433/my%20shop?sslmode=verify-ca&sslrootcert=%2Fetc%2Fca.pem",
        "user": "reader",
        "password": "pass:word",
        "slot": "mine",
    }
    own = load_text(tmp_path, text.replace("  buffer:", "  database: {url: 'jdbc:postgresql://replica/x'}\n  buffer:"))
    assert own.source.database is not None
    assert own.source.database.url == "jdbc:postgresql://replica/x"
    assert load_text(tmp_path, DEBEZIUM).source.database is None
    of_mysql = text.replace(
        "postgresql.PostgresConnector", "mysql.MySqlConnector\n    database.ssl.mode: VERIFY_IDENTITY"
    )
    found = load_text(tmp_path, of_mysql).source.database
    assert found is not None
    assert found.model_dump(exclude_none=True) == {
        "url": "jdbc:mysql://db:5433/?sslMode=verify-full",
        "user": "reader",
        "password": "pass:word",
        "connector_user": "reader",
    }


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, KAFKA.replace("  id: shop", "  id: a b").replace("type: kafka", "type: x"))
    assert ":2: sink.id" in message
    assert ":5: source.type" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected the sections sink, source, catalogs and tables"),
        ("just text", "expected the sections"),
        ("- a\n- b", "expected the sections"),
        ("sink: [", ":1: not valid YAML"),
        ("sink:\n\tid: shop", ":2: not valid YAML: found character '\\t' that cannot start any token. This is a tab;"),
        ("sink: {checkpoint: ${HOME}/x}", 'quote what has ${…} in it: "${NAME}/x"'),
        ("sink: {id: !!python/object:os.system x}", ""),
    ],
)
def test_what_is_not_a_configuration_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sink.yaml"
    path.write_bytes("sink:\n  id: größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"sink\.yaml:2: not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    "options",
    [
        "pathGlobFilter: '*.json', lineSep: x, pathglobfilter: y",
        "kafka.bootstrap.servers: x",
        "modifiedSince: x",
        "maxBytesPerTrigger: 1000, MAXFILESPERTRIGGER: 7",
    ],
)
def test_options_that_look_like_no_other_are_spark_s(tmp_path: Path, options: str) -> None:
    load_text(tmp_path, FILES.replace("row-kind}", f"row-kind, options: {{{options}}}}}"))


@pytest.mark.parametrize(
    "text",
    [
        "spark: {spark.master: yarn}",
        "spark: {spark.master: 'local[2, 4]', spark.driver.memory: 512M}",
        "spark: {spark.master: 'k8s://https://host:6443'}",
        "spark: {spark.master: 'spark://a:7077,b:7077'}",
    ],
)
def test_settings_that_spark_takes(tmp_path: Path, text: str) -> None:
    load_text(tmp_path, FILES + text + "\n")


def test_a_catalog_may_be_a_class(tmp_path: Path) -> None:
    load_text(tmp_path, FILES.replace("type: hadoop", "catalog-impl: org.example.Catalog"))
    # or all of it is in Spark's own configuration
    load_text(tmp_path, FILES.replace("{type: hadoop, warehouse: ./warehouse}", "{}"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: can't be read \(No such file"):
        load(tmp_path / "nowhere.yaml")


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    # YAML's own loaders let the last one win
    assert ":3: sink.id is given twice" in refusal(tmp_path, KAFKA.replace("  id: shop", "  id: shop\n  id: other"))


def test_the_environment_is_substituted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKERS", "kafka-1:9092,kafka-2:9092")
    text = KAFKA.replace("localhost:9092", "${BROKERS}").replace("id: shop\n", "id: ${SINK_ID:-spare}\n")
    config = load_text(tmp_path, text)
    assert config.source.options["kafka.bootstrap.servers"] == "kafka-1:9092,kafka-2:9092"
    assert config.sink.id == "spare"


def test_a_value_from_the_environment_is_not_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "x: {y}\n- ${HOME} # z")
    config = load_text(
        tmp_path, KAFKA.replace("    subscribe:", "    kafka.ssl.key.password: ${PASSWORD}\n    subscribe:")
    )
    assert config.source.options["kafka.ssl.key.password"] == "x: {y}\n- ${HOME} # z"


def test_a_missing_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROKERS", raising=False)
    message = refusal(tmp_path, KAFKA.replace("localhost:9092", "${BROKERS}"))
    assert ":8: source.options.kafka.bootstrap.servers uses ${BROKERS}, and the environment has no BROKERS." in message


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_text(tmp_path / "job", FILES)
    assert config.sink.checkpoint == str(tmp_path / "job" / "state")
    assert config.catalogs["lake"]["warehouse"] == str(tmp_path / "job" / "warehouse")
    assert config.tables[0].source == str(tmp_path / "job" / "changes")


def test_uris_and_absolute_paths_stay(tmp_path: Path) -> None:
    text = (
        FILES.replace("./state", "s3a://bucket/state")
        .replace("./warehouse", "hdfs://nn/w")
        .replace("./changes", "/changes")
    )
    config = load_text(tmp_path, text)
    assert config.sink.checkpoint == "s3a://bucket/state"
    assert config.catalogs["lake"]["warehouse"] == "hdfs://nn/w"
    assert config.tables[0].source == "/changes"


def test_topics_are_not_paths(tmp_path: Path) -> None:
    assert load_text(tmp_path, KAFKA).tables[0].source == "shop.public.orders"


def test_numbers_and_booleans_are_texts_where_spark_wants_texts(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        KAFKA.replace("    subscribe:", "    maxOffsetsPerTrigger: 1000\n    failOnDataLoss: false\n    subscribe:"),
    )
    assert config.source.options["maxOffsetsPerTrigger"] == "1000"
    assert config.source.options["failOnDataLoss"] == "false"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # each is a mistake in or near a section with a secret
        ("    subscribe:", "    kafka.sasl.jaas.config: [hunter2]\n    subscribe:"),
        ("{type: hadoop, warehouse: ./warehouse}", "{type: rest, credential: {inner: hunter2}}"),
        ("{type: hadoop, warehouse: ./warehouse}", "{type: rest, credential: hunter2}\n  spare: nothing"),
        ("  lake: {type: hadoop, warehouse: ./warehouse}", "  other: {type: rest, token: hunter2}"),
        ("    kafka.bootstrap.servers: localhost:9092", "    kafka.ssl.key.password: hunter2"),
        ("catalogs:\n", "catalogs: [{token: hunter2}]\nunused:\n"),
        ("  type: kafka", "  type: kafka\n  password: hunter2"),
    ],
)
def test_secrets_are_never_in_messages(tmp_path: Path, before: str, after: str) -> None:
    assert before in KAFKA
    assert "hunter2" not in refusal(tmp_path, KAFKA.replace(before, after, 1))


@pytest.mark.parametrize(
    "text", ["- {token: hunter2}", "sink:\n  token: 'hunter2", "sink: {token: hunter2", "token: hunter2\n\tx: y"]
)
def test_secrets_are_never_in_messages_about_the_file(tmp_path: Path, text: str) -> None:
    assert "hunter2" not in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("region", ("identity", None, "region")),
        ("identity(region)", ("identity", None, "region")),
        (" bucket( 8 ,id ) ", ("bucket", 8, "id")),
        ("truncate(4, name)", ("truncate", 4, "name")),
        ("days(at)", ("day", None, "at")),
        ("hour(at)", ("hour", None, "at")),
        ("ä-b", ("identity", None, "ä-b")),
    ],
)
def test_partition_fields(text: str, expected: tuple[str, int | None, str]) -> None:
    parsed = PartitionField.parse(text)
    assert (parsed.transform, parsed.parameter, parsed.column) == expected


@pytest.mark.parametrize(
    "text", ["", "bucket(id)", "bucket(-1, id)", "bucket(x, id)", "void(id)", "day(at, x)", "a b", "day at"]
)
def test_no_partition_fields(text: str) -> None:
    with pytest.raises(ValueError, match="is not a partition field; write a column name"):
        PartitionField.parse(text)


VERIFY = "verify: {url: 'jdbc:postgresql://db/shop', user: reader, password: planted, slot: debezium}\n"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "jdbc:postgresql",
            "postgresql",
            "verify.url: got 'postgresql://db/shop'; expected jdbc:postgresql://host:5432",
        ),
        (
            "slot: debezium",
            "slots: debezium",
            "verify.slots: unknown key (did you mean 'slot'?). Known",
        ),
        ("slot: debezium", "spark_table: a.b.c", "verify.url: url is of a database, and spark_table is given too"),
        ("jdbc:postgresql", "jdbc:mysql", "verify.slot: only Postgres has replication slots; leave it out"),
        ("slot: debezium", "settle: soon", "verify.settle: got 'soon'; write an interval such as \"10 seconds\""),
        ("password: planted", "password: [planted]", "verify.password: got ****, expected text"),
    ],
)
def test_a_mistake_in_verify_is_named(tmp_path: Path, before: str, after: str, expected: str) -> None:
    message = refusal(tmp_path, KAFKA + VERIFY.replace(before, after))
    assert expected in message
    assert "planted" not in message


def test_a_table_has_its_own_verify_section_in_place_of_the_global_one(tmp_path: Path) -> None:
    def section(own: str) -> dict[str, object]:
        config = load_text(tmp_path, KAFKA.rstrip() + f"\n    verify: {own}\n" + VERIFY)
        found = config.verify_of(config.tables[0])
        assert found is not None
        return found.model_dump(exclude_unset=True)

    own_table = section("{table: public.other, settle: 1 second}")
    assert own_table.pop("password") == "planted"
    assert own_table == {
        "url": "jdbc:postgresql://db/shop",
        "user": "reader",
        "slot": "debezium",
        "table": "public.other",
        "settle": "1 second",
    }
    assert section("{spark_table: lake.backup.orders}") == {"spark_table": "lake.backup.orders"}


def test_a_table_is_compared_with_the_sources_database(tmp_path: Path) -> None:
    database = "source:\n  database: {url: 'jdbc:postgresql://db/shop', user: sink, password: planted, slot: debezium}"
    text = KAFKA.replace("source:", database, 1)

    def section(own: str, all_tables: str = "") -> dict[str, object]:
        config = load_text(tmp_path, text.rstrip() + own + all_tables)
        found = config.verify_of(config.tables[0])
        assert found is not None
        return found.model_dump(exclude_unset=True)

    given = {"url": "jdbc:postgresql://db/shop", "user": "sink", "password": "planted", "slot": "debezium"}
    assert section("\n") == given
    assert section("\n    verify: {table: public.other}\n", "verify: {user: reader, password: other}\n") == given | {
        "user": "reader",
        "password": "other",
        "table": "public.other",
    }
    assert section("\n", "verify: {url: 'jdbc:mysql://db/shop'}\n") == {"url": "jdbc:mysql://db/shop"}
    assert section("\n", "verify: {spark_table: lake.b.o}\n") == {"spark_table": "lake.b.o"}
    for before, after, expected in (
        ("jdbc:postgresql", "postgresql", "source.database.url: got 'postgresql://db/shop'; expected jdbc:postgresql:"),
        ("jdbc:postgresql", "jdbc:mysql", "source.database.slot: only Postgres has replication slots; leave it out"),
        ("slot:", "connector_user:", "source.database.connector_user: Postgres has slots; write slot"),
        ("user:", "users:", "source.database.users: unknown key (did you mean 'user'?)"),
        ("url: 'jdbc:postgresql://db/shop', ", "", "source.database.url: missing. Add it."),
    ):
        message = refusal(tmp_path, text.replace(before, after, 1))
        assert expected in message
        assert "planted" not in message
    loading = "load: {auto: true}\n"
    assert load_text(tmp_path, text + loading).load.auto
    of_mysql = text.replace("postgresql", "mysql", 1).replace("slot: debezium", "connector_user: debezium")
    config = load_text(tmp_path, of_mysql + loading)
    assert config.load.auto
    replica = "load: {replica: 'jdbc:postgresql://replica/shop'}\n"
    assert load_text(tmp_path, text + replica).load.replica is not None
    assert "load.replica: only of Postgres a replica is read" in refusal(tmp_path, of_mysql + replica)
    compared = config.verify_of(config.tables[0])
    assert compared is not None
    assert compared.database == config.source.database
    assert "load.auto: got true, but tables are loaded only from the database" in refusal(tmp_path, KAFKA + loading)


PATTERN = (
    KAFKA.replace("    subscribe: shop.public.orders\n", "")
    .replace("source: shop.public.orders", r"source: shop\.(\w+)\.(.+)")
    .replace("lake.shop.orders", "lake.shop.$2")
)


def test_a_group_in_verify_must_be_one_of_the_source(tmp_path: Path) -> None:
    text = PATTERN.rstrip() + "\n    verify: {table: public.$3}\n" + VERIFY
    assert "tables[0].verify.table: $3 names a group that source" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("topic", "table", "expected"),
    [
        ("shop.public.orders", None, "public.orders"),
        ("shop.public.orders", "$2.$1", "orders.public"),
        ("shop.public.or-ders", None, "public.or-ders"),
        ("shop.public.or-ders", "${1}.x", "public.x"),
    ],
)
def test_the_databases_table_of_a_topic(tmp_path: Path, topic: str, table: str | None, expected: str) -> None:
    config = load_text(tmp_path, PATTERN)
    (resolved,) = resolve_tables(config, [topic])
    assert database_table(resolved, table) == expected
