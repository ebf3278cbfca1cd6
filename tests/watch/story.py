"""A state as a running sink would tell it, without a sink."""

from collections.abc import Iterable

from sink.sources.source import Behind
from sink.table import observer
from sink.table.observer import Event, Files
from sink.targets.values import FileCounts
from sink.watch.state import State


class Clock:
    """Seconds that only grow when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def new_state(clock: Clock, ready_seconds: float = 600.0) -> State:
    return State("shop", "1.2.3", ready_seconds, clock, lambda: 1_767_225_600.0 + clock.now)


def tell(state: State, events: Iterable[Event]) -> None:
    for event in events:
        state(event)


def opened(table: str, source: str = "shop.public.orders") -> list[Event]:
    return [
        observer.TableFound(table, source),
        observer.TableOpened(table, None, None, None),
    ]


def micro_batch(table: str, number: int, rows: int = 100, snapshot: int = 7_000_000_000_000_000_001) -> list[Event]:
    """All that is told of a micro-batch, with a dead letter and a refused attempt."""
    return [
        observer.BatchStarted(table, number),
        observer.StageStarted(table, "index"),
        observer.StageDone(table, "index", 0.25),
        observer.StageStarted(table, "write"),
        observer.StageDone(table, "write", 2.0),
        observer.StageStarted(table, "prepare"),
        observer.DeadLettersKept(table, {"type_mismatch": 1}),
        observer.StageDone(table, "prepare", 0.5),
        observer.CommitTried(table),
        observer.StageStarted(table, "commit"),
        observer.StageDone(table, "commit", 0.5),
        observer.CommitRefused(table, "conflict"),
        observer.CommitTried(table),
        observer.StageStarted(table, "commit"),
        observer.StageDone(table, "commit", 0.5),
        observer.Committed(
            table,
            number,
            snapshot + number,
            {"0": 100 * number, "1": 7},
            {"+I": rows, "-U": 3, "+U": 3, "-D": 1},
            {"DATA": Files(2, 5_000), "POSITION_DELETES": Files(1, 300)},
            FileCounts(20 + number, 4),
            observer.Index(1_000 * number, 24_000 * number),
            0.125,
            512_000_000,
            4.0,
        ),
    ]


def lags(behind: dict[str, dict[str, tuple[int, float | None]]]) -> observer.Lags:
    return observer.Lags(
        {table: {part: Behind(*numbers) for part, numbers in parts.items()} for table, parts in behind.items()},
        "messages",
    )
