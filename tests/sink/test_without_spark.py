"""`rowdelta check` and `status` without a JVM: the same answers, or none.

Other files compare the two on what they have anyway, by `harness.seen`: each kind of catalog and both table formats
(`test_catalogs`), Kafka (`test_kafka`, `test_keys`), configurations that `init` wrote (`test_init`).
"""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink import cli
from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError, NeedsSparkError, TableError
from sink.run.patterns import NO_TABLE
from sink.sources.directories import Directories
from sink.sources.plain import LocalFolders
from sink.spark import type_names
from sink.spark.versions import parse_ddl
from sink.targets.iceberg.catalog import IcebergCatalogs
from sink.targets.iceberg.metadata import MetadataTable, MetadataTables
from sink.targets.iceberg.state import IcebergState
from tests.sink.harness import Job, seen

TYPES = (
    "boolean", "tinyint", "byte", "smallint", "short", "int", "INTEGER", "bigint", "long", "float", "real", "double",
    "date", "timestamp", "timestamp_ntz", "string", "binary", "decimal", "dec", "numeric", "decimal(12)",
    "decimal(38,38)",
)  # fmt: skip
NESTED = (
    "decimal( 12 , 2 )",
    "array<array<int>>",
    "MAP<string, decimal(5,1)>",
    "struct<a: int, b string>",
    "struct<`a b`:array<struct<x_1:int>>,`c``d`:date>",
    " array < map < int , struct < a : bigint > > > ",
)
NO_TYPES = (
    "", "bigintt", "a int, b int", "varchar(3)", "decimal(39,0)", "decimal(5,6)", "decimal(0)", "decimal(1,2,3)",
    "struct<a int NOT NULL>", "struct<a: int COMMENT 'x'>", "array<int", "array<int>>", "map<int>", "struct<>", "void",
    "interval day", "int int", "`int`", "string collate unicode", "variant", "struct<$oid: int>",
)  # fmt: skip


@pytest.mark.spark
def test_names_of_types_mean_what_spark_says(spark: SparkSession) -> None:
    for text in (*TYPES, *NESTED):
        assert type_names.parse(text) == parse_ddl(text), text


@pytest.mark.parametrize("text", NO_TYPES)
def test_other_names_are_left_to_spark(text: str) -> None:
    with pytest.raises(NeedsSparkError):
        type_names.parse(text)


COLUMNS = (
    "b boolean, i int, l bigint, f float, d double, day date, t timestamp, n timestamp_ntz, s string, bin binary, "
    "dec decimal(12,2), a array<int>, m map<string, array<bigint>>, st struct<x: int, y: struct<z: date COMMENT 'c'>>, "
    "r int NOT NULL COMMENT 'c'"
)


@pytest.mark.spark
@pytest.mark.parametrize("version", ["2", "3"])
def test_a_table_is_the_same(spark: SparkSession, tmp_path: Path, version: str) -> None:
    """Types, specs, properties, sort order, ancestors; and how far it got after rollbacks and expired snapshots."""
    job = Job(spark, tmp_path, columns={"id": "bigint"})
    name = f"{job.target.rpartition('.')[0]}.all_types"
    spark.sql(
        f"CREATE TABLE {name} ({COLUMNS}) USING iceberg PARTITIONED BY (bucket(4, l), s) "
        f"TBLPROPERTIES ('format-version' = '{version}', 'a' = 'b')"
    )
    assert_same(spark, job.config(), name)
    java = IcebergCatalogs(spark).load(name)
    assert java is not None
    term, first = java.iceberg.expressions.Expressions.ref("l"), java.iceberg.NullOrder.NULLS_FIRST
    java.java.replaceSortOrder().asc(term, first).commit()
    java.java.updateSpec().addField("i").commit()
    spark.sql(f"ALTER TABLE {name} ADD COLUMN later string FIRST")
    for n in range(3):
        java.java.newAppend().set("n", str(n)).commit()
    table = assert_same(spark, job.config(), name)
    assert table.row_order()
    ids = [row[0] for row in spark.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at").collect()]
    assert [table.is_ancestor(ids[0], ids[2]), table.is_ancestor(ids[2], ids[0]), table.is_ancestor(1, ids[0])] == [
        True, False, False,
    ]  # fmt: skip


def assert_same(spark: SparkSession, loaded: Config, name: str) -> IcebergState:
    """By both ways to read it."""
    java, plain = IcebergCatalogs(spark).load(name), MetadataTables(loaded).load(name)
    assert java is not None
    assert plain is not None
    assert plain.columns() == java.columns()
    assert plain.row_order() == java.row_order()
    assert plain.current_snapshot() == java.current_snapshot()
    mine, theirs = plain.spec, java.spec
    assert mine.iceberg_schema == theirs.iceberg_schema
    assert mine.specs_by_id == theirs.specs_by_id
    assert mine.properties == theirs.properties
    for part in ("location", "format_version", "current_spec_id"):
        assert getattr(mine, part) == getattr(theirs, part)
    return plain


@pytest.mark.spark
def test_a_table_that_was_rolled_back(spark: SparkSession, tmp_path: Path) -> None:
    """The position is that of the data, by the same rules."""
    job = Job(spark, tmp_path, columns={"id": "bigint"})
    assert "does not exist yet" in seen(inspection.status, spark, job.config())[0]
    for number in range(3):
        job.write([("+I", {"id": number})])
        job.run()
    name = job.target
    ids = [row[0] for row in spark.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at").collect()]
    assert "lag: 0 files" in seen(inspection.status, spark, job.config())[2]
    catalog, _, table = name.partition(".")
    spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('{table}', {ids[0]})")
    spark.catalog.refreshTable(name)
    assert "lag: 2 files" in seen(inspection.status, spark, job.config())[2]
    assert seen(inspection.check, spark, job.config())[-1] == "ok"


@pytest.mark.parametrize(("parent", "certain"), [(9, True), (12, False)])
def test_a_position_whose_snapshot_has_expired(parent: int, certain: bool) -> None:
    """If the snapshots that are known can't tell whether it was rolled back, Spark looks at what else there is."""
    stored = {"position": {"0": 20}, "operation": "a", "snapshot-id": 9, "sequence-number": 9}
    properties = {"rowdelta.shop.position": json.dumps(stored)}
    left = [
        {"snapshot-id": number, "parent-snapshot-id": before, "sequence-number": number, "timestamp-ms": number}
        for number, before in ((14, 13), (13, parent))
    ]
    metadata: dict[str, Any] = {"current-snapshot-id": 14, "snapshots": left, "properties": properties}
    table = MetadataTable("lake.shop.orders", metadata)
    if not certain:
        with pytest.raises(NeedsSparkError):
            table.position("rowdelta.shop")
        assert table.position("rowdelta.shop", newest_if_in_doubt=True)
        properties["rowdelta.shop.not-rolled-back"] = "8"
        with pytest.raises(NeedsSparkError):
            table.position("rowdelta.shop")
        properties["rowdelta.shop.not-rolled-back"] = "9"
    found = table.position("rowdelta.shop")
    assert found is not None
    assert found.position == {"0": 20}


@pytest.mark.spark
@pytest.mark.parametrize("version", ["2", "3"])
def test_a_machine_without_java(spark: SparkSession, tmp_path: Path, version: str) -> None:
    """The commands themselves, before the table exists and after."""
    job = Job(spark, tmp_path, properties={"format-version": version}, partition_by=["bucket(2, id)"])
    job.write([("+I", {"id": 1, "region": "eu"}), ("+I", {"id": 2, "region": "us"})])
    path = written(tmp_path, job.config())
    for name, look in (("check", inspection.check), ("status", inspection.status)):
        assert without_java(name, path) == (0, list(look(spark, job.config())), "")
    job.run()
    job.write([("+I", {"id": 3, "region": "eu"})])
    for name, look in (("check", inspection.check), ("status", inspection.status)):
        assert without_java(name, path) == (0, list(look(spark, job.config())), "")


def test_what_it_finds_wrong(tmp_path: Path) -> None:
    """Lines, and then the error and its exit code."""
    (tmp_path / "changes").mkdir()
    values = configuration(tmp_path)
    code, lines, error = without_java("check", written(tmp_path, values))
    assert (code, lines[-1], error) == (0, "ok", "")
    values["tables"][0]["source"] = str(tmp_path / "absent")
    code, lines, error = without_java("check", written(tmp_path, values))
    assert code == ConfigError.exit_code
    assert lines[0].startswith("sink shop: files")
    assert (
        error == f"rowdelta: tables[].source: there is no directory {tmp_path}/absent. Create it, or correct the path."
    )


LEFT_TO_SPARK: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "a catalog that only Java knows": lambda values: values["catalogs"].update(lake={"type": "hive"}),
    "a catalog of another class": lambda values: values["catalogs"].update(lake={"catalog-impl": "org.example.Own"}),
    "a warehouse that isn't on a local disk": lambda values: values["catalogs"]["lake"].update(warehouse="s3a://b/w"),
    "a client for files": lambda values: values["catalogs"]["lake"].update({"io-impl": "org.example.Own"}),
    "no warehouse": lambda values: values["catalogs"]["lake"].pop("warehouse"),
    "a database that only Java has a driver for": lambda values: values["catalogs"].update(
        lake={"type": "jdbc", "uri": "jdbc:postgresql://db/lake", "warehouse": "/w"}
    ),
    "a server that doesn't answer": lambda values: values["catalogs"].update(
        lake={"type": "rest", "uri": "http://127.0.0.1:1"}
    ),
    "a property of REST that PyIceberg may take otherwise": lambda values: values["catalogs"].update(
        lake={"type": "rest", "uri": "http://127.0.0.1:1", "rest.auth.type": "sigv4"}
    ),
    "the user's own settings of a catalog": lambda values: values["spark"].update(
        {"spark.sql.catalog.lake.warehouse": "/elsewhere"}
    ),
    "Hadoop's settings": lambda values: values["spark"].update({"spark.hadoop.fs.defaultFS": "hdfs://n"}),
    "Kafka with TLS": lambda values: kafka(values, {"kafka.security.protocol": "SSL"}),
    "an option of Kafka's Java client": lambda values: kafka(values, {"kafka.client.dns.lookup": "use_all_dns_ips"}),
}
ALSO_BY_CHECK: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "a broker that doesn't answer": lambda values: kafka(values, {}),
    "a directory that isn't on a local disk": lambda values: values["tables"][0].update(source="s3a://b/changes"),
    "settings with which Spark may not start": lambda values: values["spark"].update(
        {"spark.driver.maxResultSize": "lots"}
    ),
    "packages": lambda values: values["spark"].update({"spark.jars.packages": "org.example:driver:1"}),
    "too little memory": lambda values: values["spark"].update({"spark.driver.memory": "100m"}),
    "a driver that may not be there": lambda values: values["catalogs"].update(
        other={"type": "jdbc", "uri": "jdbc:sqlite:/w/catalog.db", "warehouse": "/w"}
    ),
    "a client for files that may not be there": lambda values: values["catalogs"].update(
        other={"type": "rest", "uri": "http://127.0.0.1:1", "io-impl": "org.apache.iceberg.aws.s3.S3FileIO"}
    ),
    "properties of such a client": lambda values: values["catalogs"].update(
        other={"type": "rest", "uri": "http://127.0.0.1:1", "s3.endpoint": "http://127.0.0.1:1"}
    ),
    "an expression": lambda values: values["tables"][0]["columns"].update(v={"type": "bigint", "expression": "id"}),
    "columns inferred from files": lambda values: values["tables"][0].pop("columns"),
    "a transform that its column doesn't have": lambda values: values["tables"][0].update(partition_by=["day(id)"]),
    "partition fields that say the same": lambda values: (
        values["tables"][0]["columns"].update(t="timestamp"),
        values["tables"][0].update(partition_by=["day(t)", "hour(t)"]),
    ),
}


@pytest.mark.parametrize("case", LEFT_TO_SPARK)
def test_what_only_spark_can_answer(case: str, tmp_path: Path) -> None:
    loaded = changed(tmp_path, LEFT_TO_SPARK[case])
    for look in (inspection.status, inspection.check):
        with pytest.raises(NeedsSparkError):
            list(look(None, loaded))


@pytest.mark.parametrize("case", ALSO_BY_CHECK)
def test_what_only_spark_can_check(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sink.sources.kafka_client._TIMEOUT_SECONDS", 0.5)
    loaded = changed(tmp_path, ALSO_BY_CHECK[case])
    assert list(inspection.status(None, loaded)) == ["lake.shop.orders: does not exist yet; rowdelta run creates it"]
    with pytest.raises(NeedsSparkError):
        list(inspection.check(None, loaded))


@pytest.mark.parametrize(
    "place", ["HADOOP_CONF_DIR", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT", "SPARK_DIST_CLASSPATH", "CLASSPATH"]
)
def test_settings_beside_the_configuration(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").touch()
    monkeypatch.setenv(place, str(tmp_path))
    with pytest.raises(NeedsSparkError):
        list(inspection.status(None, changed(tmp_path, lambda _: None)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("PYSPARK_SUBMIT_ARGS", "--conf spark.hadoop.fs.defaultFS=hdfs://n pyspark-shell"),
        ("SPARK_SUBMIT_OPTS", "-Xss4m -Dspark.hadoop.fs.defaultFS=hdfs://n"),
        ("JAVA_TOOL_OPTIONS", "-Dspark.master=yarn"),
        ("JDK_JAVA_OPTIONS", '"-Dspark.master=yarn"'),
    ],
)
def test_settings_in_options_of_the_jvm(
    place: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = changed(tmp_path, lambda _: None)
    if place != "PYSPARK_SUBMIT_ARGS":
        monkeypatch.setenv(place, "-Djava.io.tmpdir=/tmp")
        assert list(inspection.status(None, loaded))
    monkeypatch.setenv(place, value)
    with pytest.raises(NeedsSparkError):
        list(inspection.status(None, loaded))


def test_then_the_commands_start_spark(tmp_path: Path) -> None:
    """Which here there is no Java for."""
    (tmp_path / "changes").mkdir()
    values = configuration(tmp_path)
    values["spark"]["spark.hadoop.a"] = "b"
    for name in ("check", "status"):
        code, lines, error = without_java(name, written(tmp_path, values))
        assert (code, lines) == (ConfigError.exit_code, [])
        assert error.startswith("rowdelta: no Java found.")


def test_a_home_of_java_without_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark's scripts take no other Java then, even if one is on the PATH."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert cli.main(["run", str(written(tmp_path, configuration(tmp_path)))]) == ConfigError.exit_code
    assert f"no Java found: JAVA_HOME is {tmp_path}, and there is no bin/java in it." in capsys.readouterr().err


def test_the_state_of_no_table(tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    values = configuration(tmp_path)
    pattern = {"source": str(tmp_path / "changes" / "(.*)"), "target": "lake.shop.$1"}
    values["sink"]["dead_letter_table"] = "lake.shop.bad"
    values["tables"] = [values["tables"][0] | pattern]
    assert list(inspection.status(None, Config.model_validate(values))) == [NO_TABLE]


@pytest.mark.parametrize("token", [{}, {"credential": "a:b"}], ids=["no user", "a user"])
def test_a_catalog_that_accepts_and_says_nothing(tmp_path: Path, token: Mapping[str, str]) -> None:
    """Waiting ends, and then the commands start Spark."""
    with silent_server() as server:
        path = written(tmp_path, changed(tmp_path, rest(server, token)))
        imports = "import sys; from sink import cli; from sink.targets.iceberg import metadata"
        patience = f"{imports}; metadata._SECONDS = 0.5; sys.exit(cli.main())"
        code, _, error = without_java("status", path, "-c", patience)
    assert code == ConfigError.exit_code
    assert error.startswith("rowdelta: no Java found.")


TABLE: Mapping[str, Any] = {
    "format-version": 2, "location": "/w/orders", "current-schema-id": 0, "properties": {}, "snapshots": [],
    "schemas": [{"schema-id": 0, "fields": [{"id": 1, "name": "id", "type": "long", "required": True}]}],
    "partition-specs": [{"spec-id": 0, "fields": []}], "default-spec-id": 0,
}  # fmt: skip
NO_TABLES: Mapping[str, tuple[int, Any]] = {
    "of a gateway": (404, {"status": 404, "error": "Not Found"}),
    "a list": (404, []),
    "no error": (404, {"error": None}),
    "no metadata": (200, {"metadata": None}),
    "text": (200, "maintenance"),
}


@pytest.mark.parametrize("case", NO_TABLES)
def test_answers_that_say_nothing_of_a_table(tmp_path: Path, case: str) -> None:
    with catalog_server(*NO_TABLES[case]) as server, pytest.raises(NeedsSparkError):
        list(inspection.status(None, changed(tmp_path, rest(server, {}))))


def test_what_goes_wrong_without_spark_is_left_to_spark(tmp_path: Path) -> None:
    with catalog_server(200, {"metadata": {**TABLE, "properties": None}}) as server:
        code, lines, error = without_java("status", written(tmp_path, changed(tmp_path, rest(server, {}))))
    assert (code, lines) == (ConfigError.exit_code, [])
    assert error.startswith("rowdelta: no Java found.")


def test_check_refuses_a_table_that_was_rolled_back_before_the_first_commit(tmp_path: Path) -> None:
    position = {"position": {}, "operation": "b", "snapshot-id": 2, "sequence-number": 2}
    others = {"snapshot-id": 1, "sequence-number": 1, "timestamp-ms": 0, "summary": {"operation": "append"}}
    table = {
        **TABLE,
        "properties": {"rowdelta.shop.position": json.dumps(position)},
        "snapshots": [others],
        "current-snapshot-id": 1,
    }
    with catalog_server(200, {"metadata": table}) as server:
        loaded = changed(
            tmp_path, lambda values: (rest(server, {})(values), values["sink"].update(on_bad_record="fail"))
        )
        assert "was rolled back" in next(iter(inspection.status(None, loaded)))
        with pytest.raises(TableError, match="was rolled back"):
            list(inspection.check(None, loaded))


def test_check_refuses_another_table_as_the_dead_letter_table(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["tables"][0]["columns"] = {"id": "bigint"}
        rest(server, {})(values)

    with catalog_server(200, {"metadata": TABLE}) as server:
        loaded = changed(tmp_path, change)
        with pytest.raises(TableError, match="has no column 'table', so it can't be the dead-letter table"):
            list(inspection.check(None, loaded))


def test_a_proxy_that_java_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with catalog_server(200, {"metadata": TABLE}) as server:
        lines = list(inspection.status(None, changed(tmp_path, rest(server, {}))))
    assert lines[0] == "lake.shop.orders: empty, no snapshot"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_whose_threads_wait(tmp_path: Path, number: signal.Signals) -> None:
    with silent_server() as server:
        path = written(tmp_path, changed(tmp_path, rest(server, {})))
        patience = "metadata._SECONDS, interrupts._CLEANUP_SECONDS = 600, 0.5"
        imports = "from sink import cli; from sink.spark import interrupts; from sink.targets.iceberg import metadata"
        code = f"import sys; {imports}; {patience}; sys.exit(cli.main())"
        child = subprocess.Popen([sys.executable, "-c", code, "status", path], stderr=subprocess.PIPE, text=True)
        try:
            server.settimeout(60)
            with server.accept()[0]:
                child.send_signal(number)
                _, error = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 128 + number
    assert error == f"rowdelta: interrupted by {number.name}; every table is as its last commit left it\n"


def test_what_the_lag_of_files_leaves_out(tmp_path: Path) -> None:
    """It says so: only Spark's log knows of a file with an older time than the position's whether it is applied."""
    loaded = changed(tmp_path, lambda values: values["source"]["options"].update(pathGlobFilter="*.json"))
    for name, seconds in {"late.json": 1, "last.json": 2, "new.json": 3}.items():
        (tmp_path / "changes" / name).touch()
        os.utime(tmp_path / "changes" / name, (seconds, seconds))
    position = {"modified": 2000, "files": ["last.json"]}
    (table,) = loaded.tables
    assert Directories(loaded, LocalFolders()).lag([(table, None), (table, position)]) == [
        "3 files behind, regardless of pathGlobFilter",
        "1 file behind, not counting late ones, regardless of pathGlobFilter",
    ]


def test_a_hadoop_catalog_is_read_as_iceberg_does(tmp_path: Path) -> None:
    """The hint may be behind, or missing; metadata may be compressed; a hint to nowhere is left to Iceberg."""
    loaded = changed(tmp_path, lambda _: None)
    folder = tmp_path / "warehouse/shop/orders/metadata"
    folder.mkdir(parents=True)

    def number() -> str | None:
        table = MetadataTables(loaded).load("lake.shop.orders")
        return None if table is None else table.property("n")

    assert number() is None
    for n, name in enumerate(["v1.metadata.json", "v2.gz.metadata.json", "v3.metadata.json.gz"], start=1):
        content = json.dumps({"properties": {"n": str(n)}}).encode()
        (folder / name).write_bytes(gzip.compress(content) if "gz" in name else content)
    assert number() == "3"
    hint = folder / "version-hint.text"
    hint.write_text("2")
    assert number() == "3"
    hint.write_text("4")
    with pytest.raises(NeedsSparkError):
        number()
    hint.write_text("no number")
    with pytest.raises(NeedsSparkError):
        number()


def test_status_imports_little(tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    code = (
        "import sys; from sink import cli; cli.main(['status', sys.argv[1]]); "
        "unwanted = 'pandas', 'pyiceberg', 'deltawriters', 'sink.targets.iceberg.table'; "
        "print([name for name in unwanted if name in sys.modules])"
    )
    path = written(tmp_path, configuration(tmp_path))
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def configuration(folder: Path) -> dict[str, Any]:
    return {
        "sink": {"id": "shop", "checkpoint": str(folder / "state")},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [
            {
                "source": str(folder / "changes"),
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "string"},
                "order_by": ["seq bigint"],
            }
        ],
        "spark": {"spark.master": "local[2]"},
    }


def kafka(values: dict[str, Any], options: Mapping[str, str]) -> None:
    values["source"]["type"] = "kafka"
    values["source"]["options"] = {"kafka.bootstrap.servers": "127.0.0.1:1", **options}


def rest(server: socket.socket, properties: Mapping[str, str]) -> Callable[[dict[str, Any]], None]:
    """Makes a REST catalog of the configuration's one."""
    uri = f"http://127.0.0.1:{server.getsockname()[1]}"

    def change(values: dict[str, Any]) -> None:
        values["catalogs"]["lake"] = {"type": "rest", "uri": uri, **properties}

    return change


@contextmanager
def silent_server() -> Iterator[socket.socket]:
    """The system accepts connections to it, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextmanager
def catalog_server(status: int, answer: Any) -> Iterator[socket.socket]:
    """A REST catalog that answers each question for a table with the same JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, content = (200, {"defaults": {}, "overrides": {}}) if "/config" in self.path else (status, answer)
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server.socket
        finally:
            server.shutdown()
            thread.join()


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Config:
    (folder / "changes").mkdir()
    values = configuration(folder)
    change(values)
    return Config.model_validate(values)


def written(folder: Path, values: Config | Mapping[str, Any]) -> Path:
    if isinstance(values, Config):
        values = values.model_dump(by_alias=True, exclude_unset=True)
    path = folder / "sink.yaml"
    path.write_text(json.dumps(values))
    return path


def without_java(name: str, path: Path, *run: str) -> tuple[int, list[str], str]:
    """Exit code, lines and stderr of a command where there is no Java.

    :param run: Python's arguments that run commands.
    """
    environment = {n: value for n, value in os.environ.items() if n != "JAVA_HOME" and not n.startswith("PYSPARK")}
    done = subprocess.run(
        [sys.executable, *(run or ("-m", "sink")), name, path],
        env=environment | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.rstrip("\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"cleanSource": "OFF"}, []),
        ({"cleanSource": "delete"}, ["nothing tells that they are gone. Leave the option out"]),
        ({"CLEANSOURCE": "Archive", "sourceArchiveDir": "/x"}, ["Before that, move the files back"]),
    ],
)
def test_files_that_spark_takes_away_are_warned_of(
    tmp_path: Path, options: Mapping[str, str], expected: list[str]
) -> None:
    (tmp_path / "orders").mkdir()
    config = Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": str(tmp_path / "state")},
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json", **options}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")}},
            "tables": [
                {
                    "source": str(tmp_path / "orders"),
                    "target": "lake.shop.orders",
                    "key": ["id"],
                    "columns": {"id": "bigint"},
                    "order_by": ["seq bigint"],
                }
            ],
        }
    )
    lines = list(inspection.check(None, config))
    warnings = [line for line in lines if line.startswith("WARNING: source.options.cleanSource")]
    assert lines[-1] == "ok"
    assert len(warnings) == len(expected)
    assert all(text in warning for text, warning in zip(expected, warnings, strict=True))
