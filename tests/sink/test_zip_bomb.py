"""Small files and small batches of messages that are large when they are read, or larger than the memory."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.faults.plugin import Seen
from tests.stack.kafka import Kafka
from tests.stack.sink_process import SinkProcess, written

pytestmark = pytest.mark.spark

MILLION = 1_000_000


def test_a_line_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """The run says so and ends. When the file is gone, the next run goes on."""
    changes = tmp_path / "changes"
    changes.mkdir()
    with gzip.open(changes / "1.json.gz", "wb") as file:
        file.write(json.dumps({"row_kind": "+I", "id": 1, "seq": 1, "v": ""}).encode()[:-2])
        for _ in range(500):
            file.write(b"a" * MILLION)
        file.write(b'"}\n')
    assert (changes / "1.json.gz").stat().st_size < MILLION
    values = {
        "sink": {"id": "shop", "checkpoint": str(tmp_path / "state"), "trigger": "available-now"},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")}},
        "tables": [
            {
                "source": str(changes),
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "string"},
                "order_by": ["seq bigint"],
            }
        ],
        "spark": {"spark.master": "local[1]", "spark.driver.memory": "600m", "spark.ui.enabled": "false"},
    }
    sink = SinkProcess(written(tmp_path / "sink", values), tmp_path)
    done = sink.finish("run", str(sink.config))
    assert done.returncode == 75, done.stderr
    assert "lake.shop.orders: the Spark job failed; nothing was applied" in done.stderr
    assert "java.lang.OutOfMemoryError" in done.stderr
    (changes / "1.json.gz").unlink()
    (changes / "1.json").write_text(json.dumps({"row_kind": "+I", "id": 2, "seq": 1, "v": "small"}))
    again = sink.finish("run", str(sink.config))
    assert again.returncode == 0, again.stderr
    assert "batch 0: +I 1" in again.stderr + again.stdout


CODECS = ("zstd", "gzip", "lz4")
TEXT = 40 * MILLION
"""Characters of a text that fits into the memory."""
SMALL = 40_000
"""Messages of 2 kB in a batch."""


def produce(kafka: Kafka, topic: str, codec: str, messages: Iterable[tuple[int, str]]) -> None:
    """Send rows `id`, `v` in as few batches as there can be. The broker looks at the bytes of a batch only: it takes
    1 MB.
    """
    limits = {"message.max.bytes": 10**9, "batch.size": 2**31 - 1, "batch.num.messages": 10**6, "linger.ms": 2000}
    buffer = {"queue.buffering.max.kbytes": 2**31 - 1, "queue.buffering.max.messages": 10**6}
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "compression.type": codec, "log_level": 0, **limits, **buffer}
    )
    failed: list[object] = []
    for number, text in messages:
        value = json.dumps({"row_kind": "+U", "id": number, "v": text})
        producer.produce(topic, value, str(number), on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(300) == 0
    assert not any(failed), next(filter(None, failed))


def let_expire(kafka: Kafka, topic: str) -> None:
    """Kafka removes all messages, as retention does."""
    place = TopicPartition(topic, 0, -1)  # to its end
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for removed in admin.delete_records([place]).values():
        removed.result(30)


def configured(folder: Path, kafka: Kafka, topic: str, **options: str) -> SinkProcess:
    """A sink with little memory, which reads the topic to its end."""
    values = {
        "sink": {"id": "shop", "checkpoint": str(folder / "state"), "trigger": "available-now"},
        "source": {
            "type": "kafka",
            "format": "row-kind",
            "options": {
                "kafka.bootstrap.servers": kafka.bootstrap_servers,
                "startingOffsets": "earliest",
                **options,
            },
        },
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [
            {"source": topic, "target": "lake.shop.orders", "key": ["id"], "columns": {"id": "bigint", "v": "string"}}
        ],
        "spark": {"spark.master": "local[1]", "spark.driver.memory": "600m", "spark.ui.enabled": "false"},
    }
    return SinkProcess(written(folder / f"sink{len(options)}", values), folder)


def rows(folder: Path) -> dict[int, str]:
    """As PyIceberg reads them."""
    from tests.stack import compare  # delta-rs isn't there with every Spark

    found = compare.rows_in_warehouse(folder, "warehouse.shop.orders", ["id", "v"])
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.kafka
@pytest.mark.fault(
    "Kafka",
    "Small batches, made by zstd, gzip and lz4, become one message of 40 MB, 40,000 of 2 kB, and one of 300 MB, where "
    "the JVM has 600 MB",
    "They are applied. Only what doesn't fit into memory ends the run, with exit code 75",
)
def test_batches_of_messages_that_grow(kafka: Kafka, tmp_path: Path, seen: Seen) -> None:
    kafka.create_topic("bombs")
    expected: dict[int, str] = {}
    for place, codec in enumerate(CODECS):
        large = {place: str(place) * TEXT}
        produce(kafka, "bombs", codec, large.items())
        small = {n % 1000 + 10: f"{n % 10}" * 2000 for n in range(place * SMALL, (place + 1) * SMALL)}
        produce(kafka, "bombs", codec, ((n % 1000 + 10, f"{n % 10}" * 2000) for n in range(SMALL)))
        expected |= large | small
    sink = configured(tmp_path, kafka, "bombs")
    code, megabytes = sink.measured("run", str(sink.config))
    assert code == 0, sink.text()[-5000:]
    assert rows(tmp_path) == expected

    produce(kafka, "bombs", "zstd", [(3, "a" * 300 * MILLION)])
    code, more = sink.measured("run", str(sink.config))
    assert code == 75, sink.text()[-5000:]
    assert "java.lang.OutOfMemoryError" in sink.text()
    assert rows(tmp_path) == expected
    assert max(megabytes, more) < 1500

    let_expire(kafka, "bombs")
    produce(kafka, "bombs", "none", [(4, "small")])
    lenient = configured(tmp_path, kafka, "bombs", failOnDataLoss="false")
    code, _ = lenient.measured("run", str(lenient.config))
    assert code == 0, lenient.text()[-5000:]
    assert rows(tmp_path) == expected | {4: "small"}
    seen(
        f"Exit code 75 for the last one. No process had more than {max(megabytes, more)} MB. The next run went on "
        "after retention, with failOnDataLoss: false. Table = source"
    )
