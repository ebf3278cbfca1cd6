"""A table that has drifted from a real Postgres or MariaDB is corrected, while a run goes on and the source changes."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from sink.commands.reconcile import reconcile
from sink.databases.mysql import MySQL
from sink.errors import ConfigError, TableError
from sink.verify.healing import Healing
from sink.verify.rounds import Healed, Outcome, Verdict
from tests.sink.test_kafka import Running
from tests.sink.test_load import Shop, connect, mariadb, postgres, shop_of
from tests.stack.connect import Connect
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

__all__ = ["connect", "mariadb", "postgres"]  # fixtures

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture
def shop(
    spark: SparkSession,
    tmp_path: Path,
    kafka: Kafka,
    connect: Connect,
    request: pytest.FixtureRequest,
) -> Iterator[Shop]:
    made = shop_of(request, spark, tmp_path, kafka)
    if getattr(request, "param", "iceberg") == "delta":
        made.use_delta()
        made.entry = {"order_by": ["source.lsn"], "late": "drop"}
    made.fill(5_000)
    made.start_connector(connect)
    made.load()
    yield made
    made.stop_connector(connect)


def reconciled(shop: Shop) -> Outcome:
    (outcome,) = reconcile(shop.spark, shop.config(), (), 20, 120)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def drift(shop: Shop) -> None:
    """Rows are lost, wrong, there twice, or in no database."""
    shop.spark.sql(f"DELETE FROM {shop.sql_name} WHERE id BETWEEN 100 AND 139")
    shop.spark.sql(f"UPDATE {shop.sql_name} SET name = 'wrong' WHERE id BETWEEN 200 AND 219")
    shop.spark.sql(
        f"INSERT INTO {shop.sql_name} (id, name, amount) "
        f"SELECT id, name, amount FROM {shop.sql_name} WHERE id BETWEEN 300 AND 304"
    )
    shop.spark.sql(
        f"INSERT INTO {shop.sql_name} (id, name, amount) "
        f"SELECT id + 900000, name, amount FROM {shop.sql_name} WHERE id < 11"
    )


@pytest.mark.parametrize("shop", ["iceberg", "delta"], indirect=True)
def test_what_has_drifted_is_corrected_and_nothing_else_written(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    shop.server.execute(f"UPDATE {shop.table} SET name = 'n' WHERE id = 1")
    assert wait_until(shop.catches_up)
    drift(shop)
    caplog.clear()
    outcome = reconciled(shop)
    assert (outcome.verdict, outcome.healed, outcome.different) == (Verdict.EQUAL, 40 + 20 + 5 + 10, 0)
    assert shop.rows() == shop.source_rows()
    if shop.sql_name == shop.target:
        last = shop.spark.sql(f"SELECT summary FROM {shop.target}.snapshots ORDER BY committed_at DESC LIMIT 1").first()
        assert last is not None
        assert last["summary"]["added-records"] == "65", "the rows that the table lacked, or had otherwise"
        assert last["summary"]["rowdelta.work"] == "reconcile"
    assert shop.catches_up(), "the sink goes on from its position"
    assert reconciled(shop).healed == 0
    assert "key index" not in caplog.text, "nobody had to build it again"


@pytest.mark.parametrize("shop", ["postgres", "mariadb"], indirect=True)
def test_beside_a_run_while_the_source_changes(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # only messages tell how far the connector is in a busy server
    monkeypatch.setattr(MySQL, "_dumps", lambda _: [(shop.server.user, "Sending binlog event to slave")])
    caplog.set_level(logging.INFO, "rowdelta")
    shop.server.execute(f"UPDATE {shop.table} SET name = 'n' WHERE id = 1")
    assert wait_until(shop.catches_up)
    drift(shop)
    shop.trigger = "300 milliseconds"
    caplog.clear()
    with Running(shop):  # type: ignore[arg-type]  # it needs `pipeline` only
        with shop.changing():
            assert wait_until(lambda: "batch" in caplog.text)
            outcome = reconciled(shop)
        assert outcome.is_equal, outcome.differences
        assert outcome.healed >= 10, "the keys that nothing changes"
        assert wait_until(lambda: shop.rows() == shop.source_rows())
    assert "another run with the same sink id" not in caplog.text
    assert "rows were corrected by rowdelta reconcile. It is opened again." in caplog.text
    assert f"{shop.target} reconcile: " in caplog.text


def test_keys_that_a_correction_has_left_out_come_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source changes them just then, and its changes needn't put right what had drifted."""
    drift(shop)
    heal, left_out = Healing.__call__, list[int]()

    def heal_later(self: Healing, keys: DataFrame, *others: Any) -> Healed:
        if left_out:
            return heal(self, keys, *others)
        left_out.append(keys.count())
        return Healed(0, keys)

    monkeypatch.setattr(Healing, "__call__", heal_later)
    outcome = reconciled(shop)
    assert (outcome.verdict, outcome.healed, left_out) == (Verdict.EQUAL, 75, [75])


def test_rows_that_do_not_fit_stay_as_they_are_and_are_told(shop: Shop) -> None:
    shop.server.execute(f"UPDATE {shop.table} SET name = '7' WHERE id <= 10")
    assert wait_until(shop.catches_up)
    shop.spark.sql(f"ALTER TABLE {shop.target} DROP COLUMN name")
    shop.spark.sql(f"ALTER TABLE {shop.target} ADD COLUMN name bigint")
    outcome = reconciled(shop)
    assert (outcome.verdict, outcome.healed, outcome.different) == (Verdict.DIFFERENT, 10, 4_990)
    rows = shop.spark.table(shop.target)
    assert (rows.count(), rows.where("name = 7").count()) == (5_000, 10)


def test_what_can_not_be_corrected_is_refused(shop: Shop) -> None:
    for entry, message in (
        ({"mode": "append"}, "only a key index finds the rows to correct"),
        ({"deletes": "equality"}, "only a key index"),
        ({"source_deletes": "ignore"}, "are to stay"),
        ({"history": {}, "order_by": ["source.lsn"]}, "since when a row has been wrong"),
    ):
        shop.entry = entry
        with pytest.raises(ConfigError, match=message):
            reconciled(shop)
    shop.entry = {}
    shop.server.execute("CREATE FUNCTION pg_is_in_recovery() RETURNS bool RETURN true")
    shop.database["url"] = f"{shop.server.jdbc_url}?currentSchema=public,pg_catalog"
    with pytest.raises(ConfigError, match="is on a replica"):
        reconciled(shop)
    shop.server.execute("DROP FUNCTION public.pg_is_in_recovery")
    shop.entry = {"target": f"{shop.target}_2"}
    with pytest.raises(TableError, match="does not exist"):
        reconciled(shop)
