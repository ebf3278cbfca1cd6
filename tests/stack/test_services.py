"""The services keep their promises: they serve, and come back with what they had."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from select import POLLIN, poll
from unittest import SkipTest
from urllib.request import Request, urlopen

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyarrow.fs import S3FileSystem

from tests.stack.jars import HERE, program, sqlite_jdbc_jar, unpacked
from tests.stack.kafka import Kafka, running_kafka
from tests.stack.mariadb import running_mysql
from tests.stack.postgres import running_postgres
from tests.stack.registry import running_registry
from tests.stack.rest_catalog import RestCatalog, running_rest_catalog
from tests.stack.s3 import running_s3

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def kafka() -> Iterator[Kafka]:
    with running_kafka() as broker:
        yield broker


@pytest.fixture(scope="module")
def rest_catalog() -> Iterator[RestCatalog]:
    with running_rest_catalog() as catalog:
        yield catalog


def produce(kafka: Kafka, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def consume(kafka: Kafka, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [message.value() for message in consumer.consume(count, timeout=30)]
    finally:
        consumer.close()


@pytest.mark.kafka
def test_kafka_comes_back_with_its_messages(kafka: Kafka) -> None:
    kafka.create_topic("orders", partitions=1)
    produce(kafka, "orders", b"before")
    address = kafka.bootstrap_servers
    kafka.stop()
    kafka.start()
    assert kafka.bootstrap_servers == address
    produce(kafka, "orders", b"after")
    assert consume(kafka, "orders", 2) == [b"before", b"after"]


def test_rest_catalog_comes_back_with_its_namespaces(rest_catalog: RestCatalog) -> None:
    body = json.dumps({"namespace": ["shop"]}).encode()
    address = f"{rest_catalog.uri}/v1/namespaces"
    with urlopen(Request(address, data=body, headers={"Content-Type": "application/json"})):
        pass
    rest_catalog.stop()
    rest_catalog.start()
    with urlopen(address) as response:
        assert json.load(response)["namespaces"] == [["shop"]]


def test_registry_and_store_come_back_and_the_store_with_its_objects() -> None:
    with running_registry() as registry, running_s3() as store:
        files = S3FileSystem(
            access_key=store.KEY, secret_key=store.SECRET, region=store.REGION, endpoint_override=store.endpoint
        )
        with files.open_output_stream(f"{store.BUCKET}/kept") as stream:
            stream.write(b"before")
        for server in (registry, store):
            server.kill()
            server.start()
        with urlopen(f"{registry.url}/subjects") as response:
            assert json.load(response) == []
        with files.open_input_stream(f"{store.BUCKET}/kept") as stream:
            assert stream.read() == b"before"


def test_sqlite_driver_is_a_jar() -> None:
    assert sqlite_jdbc_jar().suffix == ".jar"


def test_a_server_is_that_of_the_package_or_the_installed_one_or_a_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = HERE / "ivy-postgres.xml"
    monkeypatch.setattr("tests.stack.jars._MACHINE", "Linux-x86_64")
    assert program("postgres", module, [tmp_path], "d", "h").is_relative_to(unpacked(module))
    monkeypatch.setattr("tests.stack.jars._MACHINE", "Plan9-vax")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SkipTest, match="no postgres, and no package of it for Plan9-vax"):
        program("postgres", module, [tmp_path], "d", "h")
    installed = tmp_path / "postgres"
    installed.touch(0o755)
    assert program("postgres", module, [tmp_path], "d", "h") == installed


def test_postgres_hangs_and_dies_and_comes_back_with_its_rows() -> None:
    with running_postgres() as server:
        server.execute("CREATE TABLE t (id int);\nINSERT INTO t VALUES (1);\n")
        with psycopg.connect(server.url, autocommit=True) as connection:
            # a session is a process of its own, and hangs with the server
            server.pause()
            answers = poll()  # a process of many tests may have more files than `select` knows
            answers.register(connection.fileno(), POLLIN)
            assert not answers.poll(0)
            connection.pgconn.send_query(b"INSERT INTO t VALUES (2)")
            assert not answers.poll(300)
            server.resume()
            assert answers.poll(30_000)
            while connection.pgconn.get_result():
                pass
        server.kill()
        server.start()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT * FROM t ORDER BY id").fetchall() == [(1,), (2,)]


def test_mysql_dies_and_comes_back_with_its_rows() -> None:
    with running_mysql() as server:
        server.execute("CREATE TABLE t (id int);\nINSERT INTO t VALUES (1);\n")
        server.kill()
        server.start()
        with closing(server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM t")
            assert cursor.fetchall() == ((1,),)
