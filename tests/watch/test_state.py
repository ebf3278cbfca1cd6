"""What is known of a run: from events, without Spark."""

import json
import logging
import threading
import tracemalloc

import pytest

from sink.table import observer
from sink.targets.values import FileCounts
from sink.watch import state as watched
from sink.watch.history import POINTS, STEP, Series
from tests.watch.story import Clock, lags, micro_batch, new_state, opened, tell

ORDERS, LINES = "lake.shop.orders", "lake.shop.lines"


def test_a_series_forgets_what_is_older_than_an_hour() -> None:
    sums = Series(0.0)
    sums.add(5, 10)
    sums.add(9, 10)
    sums.add(25, 7)
    assert sums.points(25)[-3:] == [20, 0, 7]
    assert sums.rate(69) == pytest.approx(27 / 60)
    assert sums.points(STEP * (POINTS - 1))[:3] == [20, 0, 7]
    assert sums.points(STEP * POINTS + 5)[:2] == [0, 7]
    assert set(sums.points(1e9)) == {0}
    values = Series(float("nan"))
    values.set(15, 3)
    assert values.points(30)[-3:] == [3, None, None]


def test_a_micro_batch_is_shown_as_it_goes_on() -> None:
    clock = Clock()
    state = new_state(clock)
    tell(state, opened(ORDERS))
    events = micro_batch(ORDERS, 1)
    tell(state, events[:4])  # up to the beginning of `write`
    clock.now += 3
    (row,) = state.summary()["tables"]
    assert row["doing"] == {"what": "write", "for": 3.0}
    assert row["since_commit"] is None
    tell(state, events[4:])
    clock.now += 20
    summary = state.summary()
    (row,) = summary["tables"]
    assert (row["doing"], row["since_commit"], row["commits"], row["dead_letters"]) == (None, 20.0, 1, 1)
    assert (row["data_files"], row["delete_files"], row["index_bytes"]) == (21, 4, 24_000)
    assert row["snapshot"] == "7000000000000000002"  # JavaScript would round the number
    assert row["rows_per_second"] == summary["rows_per_second"] == round(107 / 60, 1)
    one = state.table(row["number"])
    assert one is not None
    assert one["rows"] == {"+I": 100, "-U": 3, "+U": 3, "-D": 1}
    assert one["stage_seconds"] == {"index": 0.25, "write": 2.0, "prepare": 0.5, "commit": 1.0}
    assert (one["attempts"], one["refusals"]) == (2, {"conflict": 1})
    assert json.loads(one["position"]) == {"0": 100, "1": 7}
    assert sum(one["history"]["rows"]) == 107
    assert state.table(1) is state.table(-1) is None


def test_the_last_commit_of_an_earlier_process_is_known() -> None:
    clock = Clock()
    state = new_state(clock)
    now_ms = 1000 * (1_767_225_600 + int(clock.now))
    state(observer.TableOpened(ORDERS, 3, None, None, now_ms - 90_000))
    (row,) = state.summary()["tables"]
    assert row["since_commit"] == 90.0
    tell(state, micro_batch(ORDERS, 1))
    state(observer.TableOpened(ORDERS, 4, None, None, now_ms - 90_000))  # again, after it was set aside
    state(observer.TableOpened("ahead", 4, None, None, now_ms + 90_000))  # by another machine's clock
    assert [row["since_commit"] for row in state.summary()["tables"]] == [0.0, 0.0]


def test_ready_means_that_no_table_is_overdue() -> None:
    clock = Clock()
    state = new_state(clock, ready_seconds=60)
    assert state.not_ready() == ["the tables aren't known yet"]
    state(observer.TableFound(ORDERS, "orders"))
    assert state.not_ready() == [f"{ORDERS} isn't open yet"]
    tell(state, opened(ORDERS))
    assert state.not_ready() == []
    # nothing to do for a day
    clock.now += 86_400
    state(lags({ORDERS: {"0": (0, 0.0)}}))
    assert state.not_ready() == []
    # messages come, and no commit
    state(lags({ORDERS: {"0": (5, 1.0), "1": (2, 90.0)}}))
    clock.now += 61
    assert state.not_ready() == [f"{ORDERS} has had no commit for 61 s"]
    tell(state, micro_batch(ORDERS, 1))
    assert state.not_ready() == []
    # behind as ever, but it commits
    state(lags({ORDERS: {"0": (5, 1.0)}}))
    clock.now += 59
    tell(state, micro_batch(ORDERS, 2))
    state(lags({ORDERS: {"0": (5, 1.0)}}))
    clock.now += 59
    assert state.not_ready() == []
    # a micro-batch hangs, whatever the source says
    tell(state, micro_batch(ORDERS, 3)[:4])
    state(lags({ORDERS: {"0": (0, 0.0)}}))
    clock.now += 61
    assert state.not_ready() != []


def test_a_table_that_failed_is_overdue_from_its_first_failure_on() -> None:
    clock = Clock()
    state = new_state(clock, ready_seconds=60)
    tell(state, opened(ORDERS) + opened(LINES))
    for _ in range(3):
        state(observer.TableFailed(ORDERS, "DataError", "a bad record"))
        clock.now += 25
    assert state.not_ready() == [f"{ORDERS} has had no commit for 75 s: a bad record"]
    summary = state.summary()
    assert [row["name"] for row in summary["tables"]] == [ORDERS, LINES], "those with a problem come first"
    assert summary["statuses"] == {"failed": 1, "working": 1}
    assert [(error["words"], error["times"]) for error in summary["errors"]] == [("a bad record", 3)]
    state(observer.TableOpened(ORDERS, 3, {"0": 1}, FileCounts(1, 0)))
    assert state.not_ready() != [], "it may fail again"
    state(lags({ORDERS: {"0": (0, 0.0)}}))
    assert state.not_ready() == []
    # its group's other table waits, which is no failure
    state(observer.TableWaits(LINES, f"{LINES} waits for {ORDERS}"))
    clock.now += 1_000
    assert state.not_ready() == []


def test_alive_means_that_the_run_tells_something() -> None:
    clock = Clock()
    state = new_state(clock)
    clock.now += watched.LIVE_SECONDS + 1
    assert state.live() == "the run has told nothing for 601 s"
    state(observer.LoopTurned())
    assert state.live() is None


def test_what_is_asked_beside_the_job_tells_nothing_of_its_life() -> None:
    clock = Clock()
    state = new_state(clock)
    state(observer.LoopTurned())
    for beside in (observer.JvmMemory(1), lags({}), observer.LagsUnknown("no answer")):
        clock.now += 200.5
        state(beside)
    assert state.live() == "the run has told nothing for 602 s"
    state(observer.StageStarted(ORDERS, "write"))
    assert state.live() is None


def test_nobody_waits_while_texts_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = new_state(Clock())
    asked = []

    def words(text: str, *_: int) -> str:
        asked.append(text)
        assert not state._lock.locked()
        return text

    monkeypatch.setattr(watched, "words", words)
    tell(state, [*opened(ORDERS), *micro_batch(ORDERS, 1), observer.TableFailed(ORDERS, "TableError", "gone")])
    tell(state, [observer.TableWaits(LINES, "none yet"), observer.LagsUnknown("no answer")])
    state.summary()
    state.not_ready()
    assert {ORDERS, LINES, "gone", "none yet", "no answer", '{"0": 100, "1": 7}'} <= set(asked)
    assert not state._broken


def test_rewriting_counts_the_tables_files_the_touched_and_the_new_ones() -> None:
    state = new_state(Clock())
    tell(state, opened(ORDERS) + micro_batch(ORDERS, 1))
    state(observer.RewriteStarted(ORDERS, "minor compaction"))
    assert state.summary()["tables"][0]["doing"]["what"] == "minor compaction"
    done = observer.RewriteDone(ORDERS, "minor compaction", 16, 1, 9_000, 0.5, 2.0, FileCounts(9, 0), 0, 7_000)
    tell(state, [done, observer.RewriteDone(ORDERS, "minor compaction")])  # of which the second found nothing to do
    with state.read() as reading:
        figures = {name: value for (_, name), value in reading.tables[ORDERS].rewrites.items()}
    assert figures == {
        "runs": 1, "total": 25, "touched": 16, "rewritten": 1, "rows": 0, "bytes": 9_000,
        "bytes written": 7_000, "scan": 0.5, "rewrite": 2.0,
    }  # fmt: skip
    assert state.summary()["tables"][0]["data_files"] == 9


def test_errors_are_shown_without_secrets_and_not_at_length() -> None:
    state = new_state(Clock())
    tell(state, opened(ORDERS, "s3://bucket/x?password=planted-1"))
    reason = "https://user:planted-2@catalog.example/v1?token=planted-3 failed " + "x" * 5_000
    state(observer.TableFailed(ORDERS, "TemporaryError", reason))
    state(observer.LagsUnknown("broker at ftp://u:planted-4@h:9092"))
    text = json.dumps([state.summary(), state.table(0), state.not_ready()])
    assert "planted" not in text
    assert "catalog.example" in text
    assert len(text) < 30_000


def test_memory_is_bounded_whatever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "KNOWN_TABLES", 700)
    monkeypatch.setattr(watched, "SHOWN_TABLES", 100)
    clock = Clock()
    state = new_state(clock)

    def hour() -> None:
        for number in range(800):
            name = f"lake.shop.t{number}"
            tell(state, [*opened(name), *micro_batch(name, 1)])
            state(observer.TableFailed(name, "DataError", f"{name} {clock.now}" * 100))
            state(observer.DeadLettersKept("lake.shop.t0", {f"made up {clock.now} {'x' * 5_000}": 1}))
            clock.now += 4

    hour()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        hour()
        hour()
        assert tracemalloc.get_traced_memory()[0] - before < 3_000_000
    finally:
        tracemalloc.stop()
    summary = state.summary()
    letters = state.table(0)
    assert letters is not None
    assert len(letters["dead_letters_by_class"]) <= 31
    assert letters["dead_letters"] == 2_400 + 3, "none is forgotten"
    assert (summary["tables_total"], len(summary["tables"]), len(summary["errors"])) == (700, 100, 20)


def test_a_mistake_in_the_state_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    state = new_state(Clock())
    state._tables = None  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "rowdelta"):
        tell(state, opened(ORDERS))
    assert [record.message for record in caplog.records] == ["what is shown over HTTP is incomplete from now on"]


def test_many_threads_may_tell_and_ask() -> None:
    state = new_state(Clock())

    def work(number: int) -> None:
        name = f"lake.shop.t{number}"
        tell(state, opened(name))
        for batch in range(50):
            tell(state, micro_batch(name, batch, rows=1))
            state.summary()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = state.summary()
    assert [row["commits"] for row in summary["tables"]] == [50] * 4
    assert sum(summary["history"]["rows"]) == 4 * 50 * 8
