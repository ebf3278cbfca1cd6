"""A sink with five hundred tables and an hour behind it, for the page: `python -m tests.watch.shop` serves it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from sink.table import observer
from sink.watch import server as served
from sink.watch.server import WatchServer
from sink.watch.state import State
from tests.watch.story import Clock, lags, micro_batch, new_state, opened, tell

TABLES = 500
HOSTILE = '<img src=x onerror="document.title=1">"\'&</td>${7*7}\u202e'
"""A name, and an error, that wants to become a part of the page."""
_NOUNS = ("orders", "lines", "items", "prices", "customers", "parcels", "returns", "coupons", "stock", "events")


def names() -> list[str]:
    return [f"lake.shop{number // 10:02d}.{_NOUNS[number % 10]}" for number in range(TABLES)]


def shop() -> tuple[State, Clock]:
    """:return: its state, at a moment at which one table fails, one is overdue and one writes."""
    random, clock = Random(7), Clock()
    state = new_state(clock)
    state._wall = lambda: 1_769_860_800.0 + clock.now
    known = names()
    for name in known:
        tell(state, opened(name, f"{name.removeprefix('lake.')}.topic"))
    for minute in range(60):
        for second in range(0, 60, 10):
            clock.now += 10
            wave = 1 + math.sin(minute / 8)
            for number in random.sample(range(TABLES), 10):
                rows = int(wave * random.randrange(1_000, 2_000))
                events = micro_batch(known[number], minute + 1, rows)
                took = 2.0 + wave + random.random()
                events = [replace(e, seconds=took) if isinstance(e, observer.Committed) else e for e in events]
                tell(state, events if random.random() < 0.002 else [e for e in events if not _is_letter(e)])
            if second == 0:
                behind = int(40_000 * max(0, math.sin(minute / 10)) ** 3)
                state(lags({name: {"0": (behind // 500, behind / 4_000)} for name in known}))
    state(lags({name: {"0": (at % 7 * 11 * (at < 40), at % 7 * 0.4)} for at, name in enumerate(known)}))
    tell(state, micro_batch(known[3], 61)[:4])
    state(observer.JvmMemory(1_700_000_000))
    reason = (
        "lake.shop00.prices: column amount is decimal(12,2) in the table and text in the messages. Correct the "
        "source, or name the column's type under tables[].columns."
    )
    state(observer.TableFailed(known[3 + 4], "TableError", reason.replace("prices", "coupons")))
    clock.now += 4
    return state, clock


def _is_letter(event: observer.Event) -> bool:
    return isinstance(event, observer.DeadLettersKept)


@contextmanager
def serving(state: State, port: int = 0) -> Iterator[str]:
    """:return: the page's address."""
    server = WatchServer(state, "127.0.0.1", port)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.stop()


if __name__ == "__main__":
    served.KEPT_SECONDS = 0.0
    with serving(shop()[0], 8088) as address:
        print(address, flush=True)
        time.sleep(3600)
