"""`rowdelta history` and `rowdelta show` of a table that was fed from Kafka."""

import json
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession

from sink import cli
from sink.commands import time_travel
from sink.commands.time_travel import When
from sink.config import Config
from sink.errors import ConfigError, TableError
from sink.spark import session
from sink.targets.iceberg.catalog import IcebergCatalogs
from tests.sink.test_kafka import KafkaJob, event, insert, order
from tests.stack.kafka import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.mark.versions
def test_rows_as_they_were(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Two commits of the sink, then one of Spark's: each state has its rows, and each commit says what it did."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    config, target = job.config(), job.target()

    def rows(when: When, *key: str) -> list[dict[str, object]]:
        found = time_travel.show(spark, config, target, when, key, 10)
        return sorted(map(json.loads, found.rows), key=lambda row: row["id"])

    with pytest.raises(TableError, match="does not exist"):
        rows(When())
    ann, bob, eve = order(1, "ann", "1.50"), order(2, "bob"), order(3, "eve")
    job.produce([insert(ann), insert(bob)])
    job.run()
    job.produce([event("u", ann, ann | {"customer": "Ann"}), event("d", bob, None), insert(eve)])
    job.run()
    spark.sql(f"DELETE FROM {target} WHERE id = 3")

    before = [{"id": 1, "customer": "ann", "amount": 1.50}, {"id": 2, "customer": "bob", "amount": 1.00}]
    after = [{"id": 1, "customer": "Ann", "amount": 1.50}, {"id": 3, "customer": "eve", "amount": 1.00}]
    assert rows(When()) == after[:1]
    for offset in (2, 3, 4):
        assert rows(When(position={"0": offset})) == before
    assert rows(When(position={"0": 5})) == after[:1]  # Spark's commit has the same position
    foreign, second, first = time_travel.history(spark, config, target).commits
    assert rows(When(version=second.snapshot_id)) == after
    assert rows(When(as_of=first.time)) == before
    assert rows(When(version=second.snapshot_id), "3") == after[1:]
    assert rows(When(version=second.snapshot_id), "customer=Ann", "id=1") == after[:1]
    assert rows(When(), "2") == []
    shown = time_travel.show(spark, config, target, When(position={"0": 4}), ["id=1"], 10)
    assert shown.cells == [["1", "ann", "1.50"]]
    assert f"snapshot {first.snapshot_id} of" in shown.heading
    assert f'position {{"0": 2}}; snapshot {second.snapshot_id} after it has {{"0": 5}}' in shown.heading
    for key, text in (("x=1", "which isn't a column"), ("one", "is not of type bigint")):
        with pytest.raises(ConfigError, match=text):
            rows(When(), key)

    assert foreign.by.startswith("spark")
    assert (first.by, first.end, first.rows["+I"]) == ("sink shop", {"0": 2}, 2)
    assert (second.begin, second.end) == ({"0": 2}, {"0": 5})
    assert {kind: count for kind, count in second.rows.items() if count} == {"+I": 1, "+U": 1, "-D": 1}
    # Spark 3.5 knows `CALL` only with an extension
    table = IcebergCatalogs(spark).load(target)
    assert table is not None
    table.java.expireSnapshots().expireOlderThan(foreign.time + 1).retainLast(1).commit()
    with pytest.raises(TableError, match="older snapshots have expired"):
        rows(When(position={"0": 4}))


def test_on_the_command_line(
    spark: SparkSession,
    kafka: Kafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "start", lambda _, **how: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(number, name)) for number, name in enumerate(("ann", "bob", "eve"), 1)])
    job.run()
    spark.sql(f"DELETE FROM {job.target()} WHERE id = 3")
    file = tmp_path / "sink.yaml"
    file.write_text(yaml.safe_dump(job.config().model_dump(exclude_none=True)))

    def command(name: str, *options: str) -> list[str]:
        """The lines it prints."""
        capsys.readouterr()
        assert cli.main([name, str(file), "orders", *options]) == 0
        return capsys.readouterr().out.splitlines()

    commits = [json.loads(line) for line in command("history", "--json")]
    deletion, first = commits
    assert (first["by"], first["from"], first["to"]) == ("sink shop", {"0": 0}, {"0": 3})
    assert (first["rows"]["+I"], first["files"]["added-records"], deletion["to"]) == (3, 3, None)
    lines = command("history")
    heads = [line.split("  ")[1:] for line in lines if not line.startswith(" ")]
    assert [head[0] for head in heads] == [f"snapshot {commit['snapshot_id']}" for commit in commits]
    assert "  changes:  +I 3" in lines
    assert command("history", "--limit", "1", "--json") == [json.dumps(deletion)]

    assert [line.split() for line in command("show", "--key", "2")] == [
        ["id", "customer", "amount"],
        ["2", "bob", "1.00"],
    ]
    assert command("show", "--key", "3") == ["no such row"]
    assert {json.loads(line)["id"] for line in command("show", "--json")} == {1, 2}
    for when in (["--as-of", first["time"]], ["--version", str(first["snapshot_id"])]):
        assert {json.loads(line)["id"] for line in command("show", "--json", *when)} == {1, 2, 3}
    assert len(command("show", "--at-position", '{"0": 3}', "--limit", "1")) == 2
    # which state that is goes to stderr, out of the way of the rows
    assert cli.main(["show", str(file), "orders", "--version", str(first["snapshot_id"])]) == 0
    assert f"{job.target()}: snapshot {first['snapshot_id']} of" in capsys.readouterr().err
    assert cli.main(["show", str(file), "orders", "--version", "1"]) == 4
    assert "there is no snapshot 1" in capsys.readouterr().err


def test_a_table_is_named_in_several_ways() -> None:
    tables = [{"source": f"db.{n}.orders", "target": f"lake.{n}.orders", "key": ["id"]} for n in ("shop", "old")]
    patterns = [{"source": "db.new.(.*)", "target": "lake.new.$1", "key": ["id"]}]
    config = Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": "state", "dead_letter_table": "lake.shop.dead"},
            "source": {"type": "kafka", "format": "row-kind", "options": {"kafka.bootstrap.servers": "nowhere"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "warehouse"}},
            "tables": [*tables, *patterns],
        }
    )
    for name in ("lake.shop.orders", "shop.orders", "db.shop.orders"):
        assert time_travel.target(config, name) == "lake.shop.orders"
    assert time_travel.target(config, "lake.new.things") == "lake.new.things"
    with pytest.raises(ConfigError, match=r"may be lake.old.orders or lake.shop.orders"):
        time_travel.target(config, "orders")
    with pytest.raises(ConfigError, match=r"is not the target, .* A table of a pattern needs its whole name"):
        time_travel.target(config, "things")
