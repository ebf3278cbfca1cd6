"""The machine of a sink has a full disk, or a clock that jumps."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.faults.plugin import Seen
from tests.faults.shop import Shop, Supervised
from tests.sink.test_submit import complaints

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("fast_start")]

SIZES = {"state of sink": 8, "local": 8, "index": 8, "warehouse": 32}
"""Megabytes of the disks."""


class Disk:
    """A small disk, which is a part of memory."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        assert shutil.disk_usage(self._filler.parent).free == 0

    def free(self) -> None:
        self._filler.unlink()


class Disks:
    def __init__(self, sink: Supervised, disks: dict[str, Disk]) -> None:
        self.sink = sink
        self.disks = disks


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory, fast_start: None) -> Iterator[Disks]:
    """A sink whose folders are on disks of their own."""
    folder = tmp_path_factory.mktemp("disks")
    with ExitStack() as stack:
        for name, size in SIZES.items():
            (folder / name).mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", str(folder / name)]
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"only root can mount a small disk: {done.stderr}")
            stack.callback(subprocess.run, ["umount", "--lazy", str(folder / name)], check=True)
        shop = Shop(folder)
        config = shop.configured("200 milliseconds", **{"spark.local.dir": str(folder / "local")})
        sink = stack.enter_context(Supervised(shop, config))
        shop.write()
        yield Disks(sink, {name: Disk(folder / name) for name in SIZES})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "state of sink",
            marks=pytest.mark.fault(
                "Machine", "The disk of the checkpoint is full", "The run says so, and ends with exit code 75"
            ),
        ),
        pytest.param(
            "local",
            marks=pytest.mark.fault(
                "Machine",
                "The disk of `spark.local.dir` is full, and a micro-batch is shuffled",
                "The run says so, and ends with exit code 75",
            ),
        ),
        pytest.param(
            "index",
            marks=pytest.mark.fault(
                "Machine",
                "The disk of the key index is full",
                "The run says so. Tables without an index go on",
            ),
        ),
        pytest.param(
            "warehouse",
            marks=pytest.mark.fault(
                "Machine", "The disk of the tables is full", "The run says so, and ends with exit code 75"
            ),
        ),
    ],
)
def test_a_full_disk(disks: Disks, seen: Seen, name: str) -> None:
    sink, shop = disks.sink, disks.sink.shop
    run, disk = sink.running(), disks.disks[name]
    disk.fill()
    shop.write(20_000 if name == "local" else 60)
    try:
        run.wait_for(lambda: "No space left on device" in run.log or run.code is not None)
        code = run.wait_for_end()
    finally:
        disk.free()
    print(run.log)
    assert code == 75
    assert not complaints(run.log), run.log
    sink.running()
    shop.check()
    seen("TODO")


HOUR = 3600
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Clock:
    """The clock of the sink's processes: their wall clock, not the one that only counts on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ahead = 0
        self.jump(0)

    def jump(self, seconds: int) -> None:
        self._ahead += seconds
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._ahead:+d}\n")
        new.rename(self._file)

    def now(self) -> float:
        return time.time() + self._ahead


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of all processes that the test starts."""
    if LIBRARY is None:
        pytest.skip("libfaketime isn't installed (Debian: apt install faketime)")
    clock = Clock(tmp_path / "clock")
    variables = {
        "LD_PRELOAD": LIBRARY,
        "FAKETIME_TIMESTAMP_FILE": tmp_path / "clock",
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return clock


def clocked(folder: Path, clock: Clock) -> Supervised:
    """A sink whose change files have modification times of this clock."""
    shop = Shop(folder)
    shop.now = clock.now
    shop.write()
    return Supervised(shop, shop.configured("1 second"))


@pytest.mark.fault(
    "Machine",
    "The clock jumps ahead by an hour, and back by two, while the sink runs; the files' modification times too",
    "The run goes on",
)
def test_the_clock_jumps_while_the_sink_runs(tmp_path: Path, clock: Clock, seen: Seen) -> None:
    with clocked(tmp_path, clock) as sink:
        run, waits = sink.running(), list[float]()
        for seconds in (HOUR, -2 * HOUR):
            clock.jump(seconds)
            for _ in range(2):
                began = time.monotonic()
                sink.shop.write()
                sink.wait_until_applied()
                waits.append(time.monotonic() - began)
        sink.shop.check()
        assert run.code is None
    seen(f"Changes came into the tables within {max(waits):.0f} s. Table = source")


@pytest.mark.fault(
    "Machine",
    "The clock jumps ahead by an hour, and back by two, between two runs; the files' modification times too",
    "The next run goes on",
)
def test_the_clock_jumps_between_runs(tmp_path: Path, clock: Clock, seen: Seen) -> None:
    with clocked(tmp_path, clock) as sink:
        sink.running()
        for seconds in (HOUR, -2 * HOUR):
            assert sink.run is not None
            sink.run.kill()
            clock.jump(seconds)
            sink.shop.write()
            sink.running()
        sink.shop.check()
    seen("Both next runs went on. Table = source")
