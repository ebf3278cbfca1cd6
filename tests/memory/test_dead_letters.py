"""The dead-letter table of several targets that commit at the same time."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from sink.deadletters.table import DeadLetters
from sink.targets.values import Done, Outcome, Refused
from tests.memory.storage import Clock
from tests.memory.table import MemoryTable, Store

PATIENCE = 20


def store() -> Store:
    return Store(pa.schema([("table", pa.string())]), None, is_strict=False, file_size=1 << 20)


def letters(of: Store, clock: Clock) -> DeadLetters:
    config: Any = SimpleNamespace(sink=SimpleNamespace(id="shop", dead_letter_topic=None))
    return DeadLetters(config, lambda: MemoryTable(of, "lake.shop.dead_letters", clock))


def file(name: str) -> str:
    return json.dumps({"path": name, "partition": "[]", "rows": 1, "size": 1, "columns": ["table"]})


def commit(of: DeadLetters, target: str, number: int, known: str | None) -> Outcome:
    name = f"{target}{number}"
    return of.commit(target, name, {"0": number}, [file(name)], {"decode": 1}, of.opening, known)


def test_nobody_waits_for_a_commit_who_does_not_commit() -> None:
    sent, answered = threading.Event(), threading.Event()

    def wait(clock: Clock, step: str) -> None:
        sent.set()
        assert answered.wait(3 * PATIENCE)

    table = store()
    kept = letters(table, Clock({("send a commit", 1): wait}))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(commit, kept, "a", 1, None)
        assert sent.wait(PATIENCE)
        second = pool.submit(commit, kept, "b", 1, None)

        def look() -> Any:
            kept.publish("c")
            return kept.position("c"), kept.operation("c"), kept.spec.arrow_schema

        try:
            assert pool.submit(look).result(PATIENCE) == (None, None, table.schema)
            assert not first.done()
            assert not second.done(), "it would only be refused"
        finally:
            answered.set()
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (Done(), Done())
    assert sorted(table.live) == ["a1", "b1"]
    assert (kept.operation("a"), kept.operation("b"), kept.commits) == ("a1", "b1", 2)


def test_targets_that_commit_at_the_same_time_keep_each_record_once() -> None:
    table = store()
    kept = letters(table, Clock())

    def commits(target: str) -> None:
        for number in range(50):
            known = kept.operation(target)
            assert known == (f"{target}{number - 1}" if number else None)
            assert commit(kept, target, number, known) == Done()
            assert kept.position(target) == {"0": number}
            again = commit(kept, target, number, known)
            assert isinstance(again, Refused)
            assert again.again == "write"

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(commits, target) for target in "abcd"]:
            done.result(60)
    assert sorted(table.live) == sorted(f"{target}{number}" for target in "abcd" for number in range(50))
