"""The services keep their promises: they serve, and come back with what they had."""

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.stack.jars import sqlite_jdbc_jar
from tests.stack.kafka import Kafka, running_kafka
from tests.stack.rest_catalog import RestCatalog, running_rest_catalog


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


def test_sqlite_driver_is_a_jar() -> None:
    assert sqlite_jdbc_jar().suffix == ".jar"
