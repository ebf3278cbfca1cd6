"""Credentials that a REST catalog vends with a table: tasks get those of their files' place, and before they expire.

Without an object store: files are on the local disk, and what tasks would be given is looked at.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlparse

import pytest
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import TableError, TableGoneError
from sink.plans import TaskPlan
from sink.run.pipeline import Pipeline
from sink.table.task_plans import TaskPlans
from sink.targets.iceberg import java_table as iceberg
from sink.targets.iceberg.catalog import IcebergCatalogs
from sink.targets.iceberg.storage_access import StorageAccess, check_storage
from sink.targets.iceberg.table import IcebergTable
from tests.sink.test_catalogs import add_catalog, configuration, content, write
from tests.stack.rest_catalog import RestCatalog, running_rest_catalog

KEY = "s3.access-key-id"
ENDS = "s3.session-token-expires-at-ms"


@pytest.mark.parametrize(
    ("location", "key"),
    [
        ("s3://shop/orders/data", "orders"),
        ("s3://shop/orders", "orders"),
        ("s3://shop/orders2", "shop"),
        ("s3://crm/orders", "all"),
        ("gs://shop/orders", "own"),
    ],
)
def test_the_longest_prefix_wins(location: str, key: str) -> None:
    vended = {"s3://shop/orders/": "orders", "s3://shop/": "shop", "s3": "all", "s3://shop/orders/data/x": "x"}
    credentials = [(prefix, {KEY: key}) for prefix, key in vended.items()]
    access = StorageAccess(0.0, {KEY: "own", "s3.region": "eu"}, credentials)
    assert access.at(location) == {KEY: key, "s3.region": "eu"}


@pytest.mark.parametrize("name", [ENDS, "gcs.oauth2.token-expires-at", "adls.sas-token-expires-at-ms.account"])
@pytest.mark.parametrize("is_vended", [True, False])
def test_credentials_run_out_in_the_middle_of_their_life(name: str, is_vended: bool) -> None:
    soon, late = {name: "1200000"}, {name: "9900000"}
    access = StorageAccess(1000.0, *((late, [("s3", soon)]) if is_vended else (soon, [("s3", late)])))
    assert [access.is_running_out(now) for now in (1000.0, 1099.0, 1100.0, 1300.0)] == [False, False, True, True]
    assert not StorageAccess(1000.0, {"token-expires-in-ms": "1"}).is_running_out(1e9)


def test_vended_credentials_that_do_not_say_when_they_expire_are_renewed() -> None:
    access = StorageAccess(1000.0, {}, [("s3", {KEY: "vended"})])
    assert [access.is_running_out(now) for now in (1000.0, 2799.0, 2800.0)] == [False, False, True]


@dataclass
class Vending:
    """What a catalog's answers say besides: the nth that loads a table has the key `vended n`, for `lifetime`
    seconds.
    """

    uri: str
    lifetime: float = 3600.0
    loads: int = 0

    def added_to(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.loads += 1
        ends = str(int((time.time() + self.lifetime) * 1000))
        location = answer["metadata"]["location"]
        vended = {location: {KEY: f"vended {self.loads}", ENDS: ends}, "file": {KEY: "of all", ENDS: ends}}
        credentials = [{"prefix": prefix, "config": config} for prefix, config in vended.items()]
        config = {"s3.endpoint": "http://vended", "s3.session-token": "vended"}
        return answer | {"config": answer.get("config", {}) | config, "storage-credentials": credentials}


@contextmanager
def vending(catalog: RestCatalog) -> Iterator[Vending]:
    """In front of a catalog that vends nothing."""
    address = urlparse(catalog.uri).netloc

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            behind = HTTPConnection(address, timeout=60)
            behind.request(self.command, self.path, body, dict(self.headers.items()))
            answer = behind.getresponse()
            content = answer.read()
            loads = {"GET": "/tables/" in self.path, "POST": self.path.endswith("/tables")}
            status, headers = answer.status, dict(answer.getheaders())
            if loads.get(self.command) and answer.status == 200:
                loaded = json.loads(content)
                headers["ETag"] = str(hash(loaded["metadata-location"]))
                if self.headers.get("If-None-Match") == headers["ETag"]:
                    status, content = 304, b""
                else:
                    content = json.dumps(state.added_to(loaded)).encode()
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            behind.close()

        do_GET = do_POST = do_DELETE = do_HEAD = do  # noqa: N815 - as http.server names them

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    state = Vending(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@pytest.fixture(scope="module")
def rest_catalog() -> Iterator[RestCatalog]:
    with running_rest_catalog() as catalog:
        yield catalog


@pytest.fixture
def catalog(rest_catalog: RestCatalog) -> Iterator[Vending]:
    with vending(rest_catalog) as state:
        yield state


@pytest.mark.spark
def test_what_a_catalog_is_given_is_for_the_index(spark: SparkSession, tmp_path: Path) -> None:
    """Wherever the configuration gives it."""
    config = configuration(tmp_path, "plain", {"type": "hadoop", "s3.region": "eu"})
    settings = {"spark.sql.catalog.plain.s3.endpoint": "http://own", "spark.sql.catalog.other.s3.region": "us"}
    config = config.model_copy(update={"spark": settings})
    given = IcebergCatalogs(spark).storage_properties(config, "plain.shop.orders")
    assert given == {"type": "hadoop", "s3.region": "eu", "s3.endpoint": "http://own"}


def in_use(table: IcebergTable) -> str | None:
    return dict(table.spec.io_properties).get(KEY)


@pytest.mark.spark
def test_a_table_is_loaded_again_before_its_credentials_expire(
    spark: SparkSession, catalog: Vending, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_catalog(spark, "vending", {"type": "rest", "uri": catalog.uri})
    catalogs = IcebergCatalogs(spark)
    columns = spark.createDataFrame([], "id bigint").schema
    catalogs.create_table("vending.shop.reloaded", columns, [], {})
    table = catalogs.load("vending.shop.reloaded")
    assert table is not None
    first = f"vended {catalog.loads}"
    assert dict(table.spec.io_properties).items() >= {KEY: first, "s3.session-token": "vended"}.items()
    assert "vended" not in repr(table.spec)
    table.refresh()
    assert in_use(table) == first, "they are good for an hour"
    table.set_property("write.data.path", "file:/elsewhere")
    table.refresh()
    assert in_use(table) == "of all"
    table.java.updateProperties().remove("write.data.path").commit()

    now = time.time()
    monkeypatch.setattr(iceberg, "time", SimpleClock(now + 1900))
    before = catalog.loads
    table.refresh()
    assert catalog.loads == before + 1, "no more than Iceberg's own refresh asks"
    assert in_use(table) == f"vended {catalog.loads}"
    table.set_property("owner", "ada")
    assert table.property("owner") == "ada"
    for later in (4000, 6000):
        monkeypatch.setattr(iceberg, "time", SimpleClock(now + later))
        before = catalog.loads
        table.refresh()
        assert in_use(table) == f"vended {catalog.loads}" != f"vended {before}", "also if the table is as it was"

    monkeypatch.setattr(iceberg, "time", SimpleClock(now + 9999))
    spark.sql("DROP TABLE vending.shop.reloaded")
    catalogs.create_table("vending.shop.reloaded", columns, [], {})
    with pytest.raises(TableGoneError, match="was dropped and created again"):
        table.refresh()


class SimpleClock:
    def __init__(self, now: float) -> None:
        self._now = now

    def time(self) -> float:
        return self._now


@pytest.mark.spark
@pytest.mark.parametrize("configured", [None, {KEY: "of the index"}], ids=["catalog", "index"])
def test_each_micro_batch_has_fresh_credentials_and_the_index_has_its_own(
    spark: SparkSession,
    tmp_path: Path,
    catalog: Vending,
    monkeypatch: pytest.MonkeyPatch,
    configured: dict[str, str] | None,
) -> None:
    catalog.lifetime = 0.0
    name = f"vending_{'catalog' if configured is None else 'index'}"
    properties = {"type": "rest", "uri": catalog.uri, KEY: "configured", "s3.endpoint": "http://configured"}
    add_catalog(spark, name, properties)
    config = configuration(tmp_path, name, properties, target=f"{name}.{name}.orders", deletes="position")
    values = config.model_dump(by_alias=True, exclude_unset=True)
    values["source"]["options"]["maxFilesPerTrigger"] = "1"
    config = Config.model_validate(values | ({"index": {"properties": configured}} if configured else {}))
    plans: list[TaskPlan] = []
    original = TaskPlans.plan

    def task_plan(self: TaskPlans, *arguments: Any) -> TaskPlan:
        plans.append(original(self, *arguments))
        return plans[-1]

    monkeypatch.setattr(TaskPlans, "plan", task_plan)
    for number in range(3):
        write(tmp_path, f"{number}.json", [("+I", number, "eu"), ("+U", 0, "us")], 10 * number)
    Pipeline(spark, config).run()
    assert content(spark, f"{name}.{name}.orders") == {0: "us", 1: "eu", 2: "eu"}
    assert len(plans) == 3
    for part in ("table", "dead_letters"):
        used = [dict(getattr(plan, part).io_properties) for plan in plans]
        numbers = [int(access[KEY].removeprefix("vended ")) for access in used]
        assert numbers == sorted(set(numbers)), f"{part}: new ones for each micro-batch"
        assert {access["s3.endpoint"] for access in used} == {"http://vended"}
    of_index = [dict(plan.index.slice.io_properties) for plan in plans if plan.index is not None]
    assert len(of_index) == 3
    for access in of_index:
        assert access[KEY] == ("configured" if configured is None else "of the index")
        assert access.get("s3.endpoint") == ("http://configured" if configured is None else None)
        assert "s3.session-token" not in access


@pytest.mark.parametrize(
    ("location", "properties", "refused"),
    [
        ("s3://lake/t", {"s3.sse.type": "kms", "s3.sse.key": "arn:aws:kms:1"}, "s3.sse.type=kms"),
        ("s3a://lake/t", {"s3.sse.type": "custom"}, "s3.sse.type=custom"),
        ("s3://lake/t", {"s3.acl": "bucket-owner-full-control"}, "s3.acl=bucket-owner-full-control"),
        ("gs://lake/t", {"gcs.encryption-key": "hunter2"}, "gcs.encryption-key would"),
        ("s3://lake/t", {"s3.sse.type": "none", "gcs.encryption-key": "hunter2"}, None),
        ("s3://lake/t", {"s3.sse.type": "S3"}, None),
        ("/lake/t", {"s3.sse.type": "kms"}, None),
    ],
)
def test_what_would_hold_for_the_metadata_only_is_refused(
    location: str, properties: dict[str, str], refused: str | None
) -> None:
    if refused is None:
        check_storage("lake.shop.t", location, properties)
        return
    with pytest.raises(TableError, match=re.escape(refused)) as raised:
        check_storage("lake.shop.t", location, properties)
    assert "hunter2" not in str(raised.value)
