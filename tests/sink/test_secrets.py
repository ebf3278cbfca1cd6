"""A secret of each kind is planted, and searched for in all that the commands print and all files that they leave."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus
from uuid import uuid4

import pytest
import yaml

from sink.config import load
from sink.spark import session
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import free_ports, with_descendants

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
COMMANDS = """
import json, sys, urllib.error, urllib.request
from contextlib import contextmanager
from sink import cli
from sink.spark import session
from sink.watch.server import WatchServer

@contextmanager
def going_on(spark):
    yield
session.stopping = going_on  # one JVM for all commands

def seen_before_it_ends(server, stop=WatchServer.stop):
    for page in ("", "metrics", "healthz", "state.json", "table.json?number=0"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{page}") as answer:
                print("PAGE", page, answer.read().decode())
        except urllib.error.HTTPError as error:  # not ready
            print("PAGE", page, error.read().decode())
    stop(server)
WatchServer.stop = seen_before_it_ends

for command in json.load(sys.stdin):
    print("ENDED", command[:2], cli.main(command), flush=True)
from pyspark.sql import SparkSession
spark = SparkSession.getActiveSession()
api = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}"
for page in (f"{api}/environment", f"{api}/sql?length=1000", f"{spark.sparkContext.uiWebUrl}/environment/"):
    with urllib.request.urlopen(page) as answer:
        print(answer.read().decode())
print("SEEN")
spark.stop()
"""


class Plants:
    """Secrets by where they are planted."""

    def __init__(self) -> None:
        self.by_place: dict[str, str] = {}

    def new(self, place: str) -> str:
        self.by_place[place] = f"p/{uuid4().hex[:12]}+ä"
        return self.by_place[place]

    def found_in(self, content: bytes) -> set[str]:
        return {place for place, secret in self.by_place.items() if any(form in content for form in forms(secret))}


def forms(secret: str) -> list[bytes]:
    raw = secret.encode()
    texts = [quote(secret), quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1]]
    # what is in the middle of a longer base64 text, wherever the secret begins in it
    encoded = [base64.b64encode(b"x" * shift + raw)[4:-4] for shift in range(3)]
    # the part that no encoding changes
    return [raw, raw[2:14], *(text.encode() for text in texts), *encoded]


def configurations(folder: Path, plants: Plants, ui: int) -> dict[str, Path]:
    dead, http = free_ports(2)
    table = {"key": ["id"], "columns": {"id": "bigint", "v": "string"}}
    hadoop = {
        "type": "hadoop",
        "warehouse": str(folder / "warehouse"),
        "credential": f"ada:{plants.new('catalog credential')}",
        "token": plants.new("catalog token"),
        "s3.secret-access-key": plants.new("S3 key of a catalog"),
        "header.X-Gateway": plants.new("header"),
        "jdbc.password": plants.new("jdbc.password"),
    }
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    kafka: dict[str, Any] = {
        "kafka.bootstrap.servers": f"127.0.0.1:{dead}",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": f'{login} username="ada" password="{plants.new("JAAS")}";',
        "kafka.ssl.key.password": plants.new("key password"),
        "kafka.ssl.truststore.password": plants.new("store password"),
        "kafka.default.api.timeout.ms": "3000",
        "kafka.request.timeout.ms": "2000",
    }
    letters = {**kafka, "kafka.sasl.jaas.config": f'{login} username="ada" password="{plants.new("dead letters")}";'}
    registry = {
        "schema.registry.url": f"http://ada:{plants.new('registry URL')}@127.0.0.1:{dead}",
        "schema.registry.basic.auth.user.info": f"ada:{plants.new('registry user')}",
        "schema.registry.bearer.auth.token": plants.new("registry token"),
    }
    spark = {
        "spark.master": "local[2]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.sql.shuffle.partitions": "2",
        "spark.hadoop.fs.s3a.secret.key": plants.new("S3 key of Hadoop"),
        "spark.hadoop.fs.s3a.session.token": plants.new("S3 token"),
        "spark.executorEnv.DB_PASSWORD": plants.new("executor's environment"),
    }
    of_kafka = {"type": "kafka", "format": "debezium-avro", "options": kafka, "format_options": registry}
    topic = {"source": "orders", "target": "lake.shop.orders", **table, "shared_with": ["files", "no_database"]}
    sink = {"dead_letter_topic": "bad", "dead_letter_options": letters}
    index = {"properties": {"s3.secret-access-key": plants.new("S3 key of the index")}}
    files: dict[str, Any] = {
        "sink": {},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
        "catalogs": {"lake": hadoop},
        "tables": [{"source": str(folder / "changes"), "target": "lake.shop.orders", **table, "order_by": ["seq"]}],
        "index": index,
        "spark": spark,
    }
    no_kafka = {**files, "source": of_kafka, "sink": sink, "tables": [topic]}
    no_catalog = {**no_kafka, "catalogs": {"gone": {**hadoop, "type": "rest", "uri": ""}}}
    no_catalog["catalogs"]["gone"]["uri"] = f"http://ada:{plants.new('catalog URI')}@127.0.0.1:{dead}"
    no_catalog["tables"] = [{**topic, "target": "gone.shop.orders"}]
    database = f"jdbc:postgresql://127.0.0.1:{dead}/lake?user=ada&password={plants.new('JDBC URI')}"
    no_driver = {**no_catalog, "catalogs": {"db": {**hadoop, "type": "jdbc", "uri": database}}}
    no_driver["tables"] = [{**topic, "target": "db.shop.orders"}]
    source = {"url": f"jdbc:postgresql://127.0.0.1:{dead}/shop", "user": "ada", "password": plants.new("verify")}
    no_database = {**files, "tables": [{**files["tables"][0], "verify": source, "shared_with": ["files"]}]}
    broken = f'{login} username="ada" password="{plants.new("broken JAAS")}'
    no_login = {**no_kafka, "source": {**of_kafka, "options": {**kafka, "kafka.sasl.jaas.config": broken}}}
    refused = {**files, "sink": {"trigger": "never"}, "unknown": {"password": plants.new("unknown key")}}
    refused["catalogs"] = {"lake": {**hadoop, "type": "nonsense", "token": {"inner": plants.new("misplaced token")}}}
    made: Mapping[str, dict[str, Any]] = {
        "files": files,
        "no_database": no_database,  # before other catalogs: Spark redacts by the settings that it started with
        "no_kafka": no_kafka,
        "no_catalog": no_catalog,
        "no_driver": no_driver,
        "no_login": no_login,
        "refused": refused,
    }
    paths = {}
    for name, values in made.items():
        own = {"id": name, "checkpoint": str(folder / "state" / name), "http": f"127.0.0.1:{http}"}
        values = {**values, "sink": {**own, **values["sink"]}}
        paths[name] = folder / "configurations" / f"{name}.yaml"
        paths[name].parent.mkdir(exist_ok=True)
        paths[name].write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    # the session must have Kafka's packages too
    needed = ",".join(session.packages(load(paths["no_kafka"])))
    files["spark"] = {**spark, "spark.jars.packages": needed}
    files["sink"] = {"id": "files", "checkpoint": str(folder / "state" / "files"), "http": f"127.0.0.1:{http}"}
    paths["files"].write_text(yaml.safe_dump(files, allow_unicode=True), encoding="utf-8")
    return paths


def ran(commands: list[list[str]], seen: Callable[[int], None] = lambda _: None) -> str:
    """What commands print in one process after the other.

    :param seen: is called with the process again and again while it runs.
    """
    # their words aren't in its command line
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with (
        subprocess.Popen([sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, **options) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        output = pool.submit(process.communicate, json.dumps(commands), 500)
        while not output.done():
            seen(process.pid)
            time.sleep(0.1)
        told, _ = output.result()
    assert "SEEN" in told, told[-6000:]
    return str(told)


def left_in(folder: Path) -> list[Path]:
    """The files below a folder, without the configurations."""
    return [file for file in folder.rglob("*") if file.is_file() and file.parent.name != "configurations"]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        server.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, v text);\nINSERT INTO orders VALUES (1, 'a'), (2, 'b')"
        )
        yield server


def test_passwords_of_a_database_are_nowhere(tmp_path: Path, postgres: Postgres) -> None:
    """Also while the engine runs, and in what it, libpq and JDBC's driver say of a wrong password."""
    plants = Plants()
    right, wrong = plants.new("connector"), plants.new("wrong password")
    in_url, in_address, raw = plants.new("JDBC URL"), plants.new("address of init"), plants.new("unescaped address")
    for role, password in {"ada": right, "grace": in_url, "joan": in_address}.items():
        postgres.execute(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{password}'")
    (tmp_path / "events").mkdir()
    place = f"{postgres.host}:{postgres.port}/{postgres.database}"
    connector = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": postgres.host,
        "database.port": str(postgres.port),
        "database.user": "ada",
        "database.password": right,
        "database.dbname": postgres.database,
        "database.sslpassword": plants.new("key's password"),
        "topic.prefix": "s",
        "slot.name": "secrets",
        "publication.name": "secrets",
        "publication.autocreate.mode": "filtered",
        "table.include.list": "public.orders",
        "signal.data.collection": "public.signals",
        "poll.interval.ms": "100",
    }
    (http, ui) = free_ports(2)
    mirror: dict[str, Any] = {
        "sink": {
            "id": "mirror",
            "checkpoint": str(tmp_path / "state"),
            "trigger": "available-now",
            "http": f"127.0.0.1:{http}",
        },
        "source": {"type": "debezium", "connector": connector, "buffer": str(tmp_path / "buffer")},
        "load": {"auto": True},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")}},
        "tables": [{"source": r"s\.public\.(\w+)", "target": "lake.shop.$1"}],
        "spark": {
            "spark.master": "local[2]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "true",
            "spark.ui.port": str(ui),
            "spark.sql.shuffle.partitions": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (tmp_path / "events").as_uri(),
            "spark.local.dir": str(tmp_path / "local"),
        },
    }
    source = mirror["source"]

    def elsewhere(**changes: Any) -> dict[str, Any]:
        own = {"id": "failing", "checkpoint": str(tmp_path / "failing")}
        return {**mirror, "sink": {**mirror["sink"], **own}, "source": {**source, **changes}}

    no_user = {**connector, "database.password": wrong, "slot.name": "failing"}
    wrong_url = {"url": f"jdbc:postgresql://{place}?user=grace&password={quote(wrong, safe='')}"}
    by_url = {"url": f"jdbc:postgresql://{place}?user=grace&password={quote(in_url, safe='')}"}
    made = {
        "mirror": mirror,
        "by_url": {**mirror, "source": {**source, "database": by_url}},
        "wrong": elsewhere(connector=no_user, buffer=str(tmp_path / "other")),
        "wrong_url": {**mirror, "source": {**source, "database": wrong_url}},
    }
    (tmp_path / "configurations").mkdir()
    paths = {name: str(tmp_path / "configurations" / f"{name}.yaml") for name in made}
    for name, values in made.items():
        Path(paths[name]).write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    init = ["init", "--output", str(tmp_path / "written.yaml"), "--tables", r"public\.orders", "--database"]
    ada = f"postgresql://ada:{quote(wrong, safe='')}@{place}"
    works = [
        ["load", paths["mirror"]],
        *([command, paths["mirror"]] for command in ("check", "run", "status", "verify")),
        *([command, paths["by_url"]] for command in ("reconcile", "status")),
        [*init, f"postgresql://joan:{quote(in_address, safe='')}@{place}"],
    ]
    fails = [
        *([command, paths["wrong"]] for command in ("run", "load")),
        ["verify", paths["wrong_url"]],
        [*init[:2], str(tmp_path / "none.yaml"), *init[3:], ada],
        [*init[:2], str(tmp_path / "none.yaml"), *init[3:], f"postgresql://ada:{raw}@{place}"],
    ]
    leaks, engines, looked_at = set[str](), set[int](), set[Path]()

    def look(pid: int) -> None:
        for each in with_descendants(pid):
            with suppress(OSError):
                command = Path(f"/proc/{each}/cmdline").read_bytes()
                engines.update([each] if command.endswith(b"\0Engine\0") else [])
                found = plants.found_in(command + Path(f"/proc/{each}/environ").read_bytes())
                leaks.update(f"process {command!r}: {place}" for place in found)
        for file in set((tmp_path / "local").rglob("*")) - looked_at:
            with suppress(OSError):
                looked_at.add(file)
                leaks.update(f"{file}: {place}" for place in plants.found_in(file.read_bytes()))

    told = ran([*works, *fails], look)
    ends = [line.rsplit(" ", 1)[1] for line in told.splitlines() if line.startswith("ENDED ")]
    assert ends[: len(works)] == ["0"] * len(works), told[-8000:]
    assert set(ends[len(works) :]) <= {"2", "75"}, told[-8000:]
    assert told.count("password authentication failed") >= 4, told[-8000:]
    assert len(engines) >= 5
    assert looked_at
    leaks |= {f"output: {place}" for place in plants.found_in(told.encode())}
    for file in left_in(tmp_path):
        leaks |= {f"{file}: {place}" for place in plants.found_in(file.read_bytes())}
    assert leaks == set(), told
    assert (tmp_path / "other" / "error.txt").exists()


def test_secrets_are_nowhere(tmp_path: Path) -> None:
    plants = Plants()
    (tmp_path / "events").mkdir()
    (tmp_path / "changes").mkdir()
    lines = [{"row_kind": "+I", "seq": n, "id": n, "v": "a"} for n in range(3)]
    content = "".join(f"{json.dumps(line)}\n" for line in lines) + "no JSON\n"
    (tmp_path / "changes" / "1.json").write_text(content)
    (ui,) = free_ports(1)
    paths = {name: str(path) for name, path in configurations(tmp_path, plants, ui).items()}
    commands = [
        ["run", paths["files"]],
        ["check", paths["files"]],
        ["status", paths["files"]],
        ["history", paths["files"], "lake.shop.orders"],
        ["show", paths["files"], "lake.shop.orders"],
        ["dead-letters", "list", paths["files"]],
        ["dead-letters", "counts", paths["files"]],
        ["packages", paths["files"]],
        ["verify", paths["no_database"]],
        *([command, paths[name]] for name in paths if name.startswith("no_") for command in ("check", "run")),
        ["status", paths["no_catalog"]],
        ["run", paths["refused"]],
    ]
    told = ran(commands)
    assert "PAGE state.json {" in told
    ends = [line.rsplit(" ", 1)[1] for line in told.splitlines() if line.startswith("ENDED ")]
    failed = [(command[-1], code) for command, code in zip(commands, ends, strict=True) if code != "0"]
    assert {path for path, _ in failed} == {path for name, path in paths.items() if name != "files"}
    assert {code for _, code in failed} == {"2", "75"}, told[-6000:]
    configured = b"".join(Path(path).read_bytes() for path in paths.values())
    assert plants.found_in(configured) == plants.by_place.keys(), "it can find them"
    leaks = {f"output: {place}" for place in plants.found_in(told.encode())}
    files = left_in(tmp_path)
    assert any(file.stat().st_size and "events" in file.parts for file in files)
    for file in files:
        leaks |= {f"{file}: {place}" for place in plants.found_in(file.read_bytes())}
    assert leaks == set(), told
