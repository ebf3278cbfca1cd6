"""Processes of a sink die, are told to end, or run twice, while changes come."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Literal, get_args

import pytest

from tests.faults.plugin import Seen
from tests.faults.shop import SECONDS, TARGETS, Shop, Sink, Supervised
from tests.sink.test_submit import complaints
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("fast_start")]

KILLS = int(os.environ.get("ROWDELTA_KILLS", "4"))
Moment = Literal["Spark starts", "tables are opened", "first micro-batch", "later"]


@contextmanager
def changes_coming(shop: Shop, seconds: float) -> Iterator[None]:
    """A file comes every so many seconds."""
    ended = Event()

    def run() -> None:
        while not ended.wait(seconds):
            shop.write()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def moments(random: Random) -> Iterator[Moment]:
    """All of them in a random order, again and again."""
    while True:
        yield from random.sample(get_args(Moment), len(get_args(Moment)))


def has_come(moment: Moment, run: Sink, checkpoint: Path, before: set[Path]) -> bool:
    """:param before: what Spark had noted of micro-batches when the run began."""
    if moment == "Spark starts":
        return True
    if moment == "tables are opened":
        return "Setting default log level" in run.log
    if moment == "first micro-batch":
        return bool(noted(checkpoint) - before)
    return run.log.count(" batch ") >= 4


def noted(checkpoint: Path) -> set[Path]:
    return set(checkpoint.rglob("offsets/[0-9]*"))


LONGEST: dict[Moment, float] = {
    "Spark starts": 4.0,
    "tables are opened": 1.5,
    "first micro-batch": 1.5,
    "later": 1.5,
}
"""Seconds after the moment has come until the kill, at most."""


@pytest.mark.fault(
    "Processes",
    "`kill -9` of the driver and all its children, again and again, while files keep coming",
    "Each start goes on where the tables are. No change is lost or applied twice",
)
@pytest.mark.timeout(600 + 120 * KILLS)
def test_the_driver_is_killed_again_and_again(tmp_path: Path, seen: Seen) -> None:
    shop, random, killed = Shop(tmp_path), Random(KILLS), Counter[Moment]()
    shop.write()
    checkpoint = tmp_path / "state of sink"
    with Supervised(shop, shop.configured("200 milliseconds")) as sink:
        with changes_coming(shop, 0.3):
            for moment, _ in zip(moments(random), range(KILLS), strict=False):
                before = noted(checkpoint)
                run = sink.start()
                run.wait_for(lambda: has_come(moment, run, checkpoint, before))  # noqa: B023
                # a random time, whatever happens then: it must not end by itself
                assert not wait_until(lambda: run.code is not None, random.uniform(0, LONGEST[moment])), run.log  # noqa: B023
                run.kill()
                killed[moment] += 1
        last = sink.start(shop.configured("available-now"))
        assert last.wait_for_end() == 0, last.log
        shop.check()
    told = ", ".join(f"{killed[moment]} in the moment '{moment}'" for moment in get_args(Moment))
    seen(f"{KILLS} kills ({told}), {shop.files} files. Table = source")


@pytest.mark.parametrize(
    "others_checkpoint",
    [
        pytest.param(
            True,
            marks=pytest.mark.fault(
                "Processes",
                "Two drivers with one sink id and checkpoints of their own run at once",
                "One is refused at a commit, and ends with exit code 4. The other goes on, or another table refuses it",
            ),
        ),
        pytest.param(
            False,
            marks=pytest.mark.fault(
                "Processes",
                "Two drivers with one configuration run at once, so the checkpoint is the same too",
                "Likewise. Before that, one may lose its checkpoint to the other, and end with exit code 75",
            ),
        ),
    ],
    ids=["another checkpoint", "one checkpoint"],
)
def test_two_drivers(tmp_path: Path, seen: Seen, others_checkpoint: bool) -> None:
    shop = Shop(tmp_path)
    shop.write()
    one = shop.configured("200 milliseconds")
    other = shop.configured("200 milliseconds", "other") if others_checkpoint else one
    with Supervised(shop, one) as first, Supervised(shop, other) as second:
        sinks = [first, second]
        with changes_coming(shop, 0.3):
            runs = [sink.start() for sink in sinks]
            assert wait_until(lambda: goes_on_until_fenced(sinks, runs), SECONDS), runs[0].log + runs[1].log
        for run in runs:
            assert not complaints(run.log), run.log
        if all(run.code == 4 for run in runs):  # each was first in one of the tables
            first.start()
        finish(first if first.run is not None and first.run.code != 4 else second)
        shop.check()
    seen("Exit code 4: another run with the same sink id. The other one, or the next, did the rest. Table = source")


def goes_on_until_fenced(sinks: Sequence[Supervised], runs: list[Sink]) -> bool:
    """Start again what has ended with 75. Whether a run was fenced."""
    for number, sink in enumerate(sinks):
        if runs[number].code == 75:
            runs[number] = sink.start()
    fenced = [run for run in runs if run.code not in (None, 75)]
    for run in fenced:
        assert run.code == 4, run.log
        assert "another run with the same sink id (shop) committed while this one was working" in run.log
    return bool(fenced)


def finish(sink: Supervised) -> None:
    """Apply all there is, and start again what ends with 75. Or with 4: the run that was fenced may have been the first
    one in another table.
    """
    run = sink.run
    assert run is not None
    while not sink.shop.is_applied():
        ended = partial(is_over, run)
        assert wait_until(lambda: sink.shop.is_applied() or ended(), SECONDS), run.log  # noqa: B023
        if ended():
            assert run.code in (4, 75), run.log
            run = sink.start()


def is_over(run: Sink) -> bool:
    return run.code is not None


Stage = Literal[
    "the JVM is launched",
    "tables are opened",
    "the key index is built",
    "data files are written",
    "data files are written, and the commit comes",
    "it is idle",
]


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory, fast_start: None) -> Iterator[Supervised]:
    shop = Shop(tmp_path_factory.mktemp("signals"))
    with Supervised(shop, shop.configured("200 milliseconds")) as sink:
        shop.write()
        yield sink


def stopped(sink: Supervised) -> None:
    run = sink.running()
    run.signal(signal.SIGTERM, group=False)
    assert run.wait_for_end() == 0, run.log


def at(stage: Stage, sink: Supervised) -> Sink:
    """A run that is at this stage, with changes that it has not applied."""
    shop = sink.shop
    if stage == "it is idle":
        return sink.running()
    if stage == "the JVM is launched":
        stopped(sink)
        shop.write()
        run = sink.start()
        run.wait_for(lambda: bool(run.descendants()))
        return run
    if stage == "tables are opened":
        stopped(sink)
        for target in TARGETS:
            shutil.rmtree(shop.location(target))
        shutil.rmtree(shop.folder / "state of sink")
        run = sink.start()
        run.wait_for(lambda: any(shop.location(target).exists() for target in TARGETS))
        return run
    if stage == "the key index is built":
        stopped(sink)
        shop.write()
        shutil.rmtree(shop.folder / "index")
        run = sink.start()
        run.wait_for(lambda: any((shop.folder / "index").rglob("runs/*")))
        return run
    run = sink.running()

    def present() -> set[Path]:
        if stage == "data files are written":
            return {path for target in TARGETS for path in shop.location(target).rglob("*.parquet")}
        return set((shop.folder / "index").rglob("versions/*.json"))

    before = present()
    shop.write()
    run.wait_for(lambda: bool(present() - before))
    return run


@pytest.mark.parametrize(
    ("stage", "number", "code"),
    [
        pytest.param(
            "the JVM is launched", signal.SIGINT, 130,
            marks=pytest.mark.fault(
                "Processes", "Ctrl-C while the JVM is launched", "Ends at once with exit code 130, and so does the JVM"
            ),
        ),
        pytest.param(
            "tables are opened", signal.SIGTERM, 143,
            marks=pytest.mark.fault(
                "Processes", "SIGTERM while tables are created and opened", "Ends at once with exit code 143"
            ),
        ),
        pytest.param(
            "the key index is built", signal.SIGINT, 0,
            marks=pytest.mark.fault(
                "Processes",
                "Ctrl-C while the key index is built",
                "Finishes the micro-batch, then ends with exit code 0",
            ),
        ),
        pytest.param(
            "data files are written", signal.SIGTERM, 0,
            marks=pytest.mark.fault(
                "Processes",
                "SIGTERM while data files are written",
                "Finishes the micro-batch, then ends with exit code 0",
            ),
        ),
        pytest.param(
            "data files are written, and the commit comes", signal.SIGINT, 0,
            marks=pytest.mark.fault(
                "Processes",
                "Ctrl-C between the write of the files and the commit",
                "Finishes the micro-batch, then ends with exit code 0",
            ),
        ),
        pytest.param(
            "it is idle", signal.SIGTERM, 0,
            marks=pytest.mark.fault("Processes", "SIGTERM while there is nothing to do", "Ends with exit code 0"),
        ),
        pytest.param(
            "data files are written", signal.SIGINT, 130,
            marks=pytest.mark.fault(
                "Processes",
                "Ctrl-C twice while data files are written",
                "Gives the micro-batch up, and ends at once with exit code 130",
            ),
        ),
    ],
)  # fmt: skip
def test_a_signal(supervised: Supervised, seen: Seen, stage: Stage, number: signal.Signals, code: int) -> None:
    """From a terminal or a service manager: Ctrl-C comes to all processes, SIGTERM to the first one."""
    run = at(stage, supervised)
    group, said = number == signal.SIGINT, len(run.log)
    run.signal(number, group=group)
    if code == 130 and stage != "the JVM is launched":
        run.wait_for(lambda: "finishing the micro-batch" in run.log)
        run.signal(number, group=group)
    began = time.monotonic()
    assert run.wait_for_end() == code, run.log
    seconds = time.monotonic() - began
    assert not complaints(run.log), run.log
    assert wait_until(lambda: not run.descendants(), SECONDS), run.descendants()
    if code == 0:
        assert "finishing the micro-batch, then stopping" in run.log
        if stage == "data files are written":
            assert " batch " in run.log[said:], "it was finished"
    else:
        assert "every table is as its last commit left it" in run.log
    supervised.running()
    supervised.shop.check()
    seen(f"Exit code {code} after {seconds:.1f} s. The next run did the rest. Table = source")
