"""How far positions are in topics, and whether they can be read from there: without a broker.

`test_kafka` compares the same with real ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from sink.config import Config, TableSection
from sink.errors import ConfigError, DataError, RowdeltaError, TableError
from sink.sources.kafka import KafkaSource
from sink.sources.topics import Admin, At, Offsets, Topics

TABLE = TableSection.model_validate(
    {"source": "t", "target": "lake.shop.t", "key": ["id"], "columns": {"id": "bigint"}}
)


class Cluster(Admin, Topics):
    """One topic `t`, whose partition 0 has offsets from `first` to `end`."""

    def __init__(self, first: int, end: int, **options: str) -> None:
        Admin.__init__(self, "broker:9092")
        Topics.__init__(self, options)
        self._first, self._end = first, end

    @contextmanager
    def _admin(self) -> Iterator[Admin]:
        yield self

    def topics(self) -> list[str]:
        return ["t"]

    def offsets(self, topics: Sequence[str], at: At) -> dict[str, Offsets]:
        if isinstance(at, int):
            offset = at if at < self._end else -1
        else:
            offset = {"earliest": self._first, "latest": self._end}[at]
        return {topic: {"0": offset} for topic in topics if topic == "t"}

    def ends(self, topics: Sequence[str]) -> dict[str, Offsets]:
        """A transaction of ten messages is open."""
        return {topic: {"0": self._end + 10} for topic in topics if topic == "t"}


@pytest.mark.parametrize(
    ("position", "lag"),
    [
        (None, "80 messages behind"),
        ({"0": 100}, "0 messages behind"),
        ({"0": 90}, "10 messages behind"),
        ({"0": 10, "7": 5}, "90 messages behind, of which Kafka has removed 10"),
        ({"0": 5000}, "unknown; offset 5000 is past the end of t-0, which is 100. Was it deleted and created again?"),
    ],
)
def test_lag(position: Mapping[str, int] | None, lag: str) -> None:
    assert Cluster(20, 100).lag([(TABLE, position)]) == [lag]


class Growing(Cluster):
    """A partition is created after each look."""

    def __init__(self) -> None:
        super().__init__(20, 100)
        self._partitions = 0

    def offsets(self, topics: Sequence[str], at: At) -> dict[str, Offsets]:
        self._partitions += 1
        found = super().offsets(topics, at)
        return {topic: {str(p): offsets["0"] for p in range(self._partitions)} for topic, offsets in found.items()}


def test_a_partition_that_is_created_between_two_looks() -> None:
    assert Growing().lag([(TABLE, {"0": 90})]) == ["10 messages behind"]
    assert Growing().check([(TABLE, {"0": 90})], ()) == ["topic t: 1 partition, 80 messages"]


@pytest.mark.parametrize(
    ("position", "options", "error"),
    [
        ({"0": 5000}, {}, TableError),
        ({"0": 30, "1": 5}, {}, TableError),
        ({"0": 110}, {}, None),
        ({"0": 111}, {}, TableError),
        ({"0": 10}, {}, DataError),
        ({"0": 10}, {"failOnDataLoss": "false"}, None),
        ({"0": 20}, {"startingOffsets": "soon"}, None),
        (None, {}, None),
        (None, {"startingOffsets": "soon"}, ConfigError),
        (None, {"startingOffsets": '{"other": {"0": 1}}'}, ConfigError),
        (None, {"startingOffsets": '{"t": {"0": 19}}'}, ConfigError),
        (None, {"startingOffsets": '{"t": {"0": 20}}'}, None),
        (None, {"startingTimestamp": "yesterday"}, ConfigError),
        (None, {"startingTimestamp": "4000"}, None),
    ],
)
def test_check(
    position: Mapping[str, int] | None, options: Mapping[str, str], error: type[RowdeltaError] | None
) -> None:
    (found,) = Cluster(20, 100, **options).check([(TABLE, position)], ())
    if error is None:
        assert found == "topic t: 1 partition, 80 messages"
    else:
        assert isinstance(found, error)


def test_check_of_a_new_topic_of_a_pattern() -> None:
    """It is read from its start, whatever the options say."""
    assert Cluster(20, 100, startingOffsets="soon").check([(TABLE, None)], [TABLE.id]) == [
        "topic t: 1 partition, 80 messages"
    ]


def config_of(sink_id: str = "shop", checkpoint: str = "state") -> Config:
    return Config.model_validate(
        {
            "sink": {"id": sink_id, "checkpoint": checkpoint},
            "source": {"type": "kafka", "format": "row-kind", "options": {"kafka.bootstrap.servers": "nowhere"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "warehouse"}},
            "tables": [TABLE.model_dump(exclude_unset=True)],
        }
    )


@pytest.mark.spark
def test_sinks_of_one_checkpoint_leave_each_other_theirs(spark: SparkSession, tmp_path: Path) -> None:
    def started(sink_id: str) -> Path:
        """The checkpoint of a run that has begun."""
        source = KafkaSource(spark, config_of(sink_id, str(tmp_path)))
        source._starts = {TABLE.id: {"t": {"0": 0}}}
        (stream,) = source.streams([TABLE])
        folder = Path(stream.checkpoint)
        (folder / "offsets").mkdir(parents=True)
        return folder

    first, other = started("shop"), started("sales")
    assert first.exists()
    again = started("shop")
    assert not first.exists()
    assert other.exists()
    assert again.exists()


def test_a_topic_that_is_created_again_while_the_sink_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = KafkaSource(Mock(), config_of()), {"t": "second"}
    monkeypatch.setattr(source, "_admin", lambda: nullcontext(SimpleNamespace(ids=lambda _: dict(ids))))
    source._ids = {TABLE.id: {"t": "first"}}
    source._check_ids(TABLE, {"t": {"0": 3}})  # it asks once per interval only
    source._looked_at = float("-inf")
    source._check_ids(TABLE, {"t": {"0": 0}})  # the position has passed no message of the first one
    assert source.identities(TABLE) == {"t": "second"}
    source._check_ids(TABLE, {"t": {"0": 3}})
    ids["t"] = "third"
    source._looked_at = float("-inf")
    with pytest.raises(TableError, match="topic t was deleted and created again while the sink ran"):
        source._check_ids(TABLE, {"t": {"0": 3}})
