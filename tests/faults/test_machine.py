"""The machine of a sink has a full disk, or a clock that jumps."""

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.faults.plugin import Seen
from tests.faults.shop import DELTA_ORDERS, EVENTS, ORDERS, TARGETS, Shop, Supervised
from tests.sink.test_submit import complaints
from tests.stack.process import java_command

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("fast_start")]

SIZES = {"state of sink": 8, "local": 128, "index": 8, "warehouse": 32}
"""Megabytes of the disks. Spark may copy its jars to `local`."""


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
    ("name", "hit"),
    [
        pytest.param(
            "state of sink",
            TARGETS,
            marks=pytest.mark.fault(
                "Machine", "The disk of the checkpoint is full", "The run says so, and ends with exit code 75"
            ),
        ),
        pytest.param(
            "local",
            (ORDERS, DELTA_ORDERS),
            marks=pytest.mark.fault(
                "Machine",
                "The disk of `spark.local.dir` is full",
                "The run says so. Tables whose micro-batches are shuffled wait, others go on",
            ),
        ),
        pytest.param(
            "index",
            (ORDERS, DELTA_ORDERS),
            marks=pytest.mark.fault(
                "Machine",
                "The disk of the key indexes is full",
                "The run says so. Tables with an index wait, others go on",
            ),
        ),
        pytest.param(
            "warehouse",
            TARGETS,
            marks=pytest.mark.fault(
                "Machine", "The disk of the tables is full", "The run says so, and ends with exit code 75"
            ),
        ),
    ],
)
def test_a_full_disk(disks: Disks, seen: Seen, name: str, hit: Sequence[str]) -> None:
    """If all tables fail the run ends. Otherwise those that failed are tried again, two seconds later at first."""
    sink, shop = disks.sink, disks.sink.shop
    run, disk = sink.running(), disks.disks[name]
    code, before = None, len(run.log)
    disk.fill()
    try:
        shop.write(20_000)  # few rows are not shuffled
        if len(hit) == len(TARGETS):
            code = run.wait_for_end()
            assert "no space left on device" in run.log[before:].lower(), run.log
        else:
            run.wait_for(lambda: bool(lack_of_space(run.log[before:])))
    finally:
        disk.free()
    began = time.monotonic()
    if code is None:
        sink.wait_until_applied()
        assert run.code is None, run.log
    else:
        assert code == 75, run.log
        sink.running()
    shop.check()
    assert lack_of_space(run.log) <= set(hit)
    assert not complaints(run.log), run.log
    assert "(FileOutputStream.java" not in run.log, run.log
    how = "The same run went on by itself" if code is None else f"Exit code {code}. The next run went on"
    seen(f"{how}, {time.monotonic() - began:.0f} s after there was space again. Table = source")


def lack_of_space(log: str) -> set[str]:
    """Targets of the tables that were set aside because of it. They may be set aside for nothing else."""
    found = set()
    for line in log.splitlines():
        if " set aside: " in line:
            assert "no space left on device" in line.lower(), line
            found.add(line.split(" set aside: ")[0].split()[-1])
    return found


HOUR = 3600
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Clock:
    """The wall clock of a JVM. The clock that only counts on stays as it is."""

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
    """Of all JVMs that the test starts.

    Spark's triggers and heartbeats, and the times of Iceberg's snapshots and of Delta's commits, are the JVM's. Python
    keeps the true time: libfaketime breaks its `time.sleep`.
    """
    if LIBRARY is None:
        pytest.skip("libfaketime isn't installed (Debian: apt install faketime)")
    variables = {
        "LD_PRELOAD": LIBRARY,
        "FAKETIME_TIMESTAMP_FILE": tmp_path / "clock",
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # or waits of threads end at once
        "NO_FAKE_STAT": "1",
    }
    words = [f"{name}={value}" for name, value in variables.items()]
    java = tmp_path / "jvm" / "bin" / "java"
    java.parent.mkdir(parents=True)
    real = shutil.which(java_command())
    java.write_text(f'#!/bin/sh\nexec env {shlex.join(words)} {shlex.quote(str(real))} "$@"\n')
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jvm"))
    return Clock(tmp_path / "clock")


@pytest.mark.fault(
    "Machine",
    "The clock jumps ahead by an hour, back, and ahead again, while the sink runs and while it doesn't",
    "Only Iceberg tables wait for the clock: Iceberg refuses a snapshot that is older than the one before it. The run "
    "says so, and goes on when the clock is right. A run waits for its next micro-batch, until it is started anew",
)
def test_the_clock_jumps(tmp_path: Path, clock: Clock, seen: Seen) -> None:
    shop, waits = Shop(tmp_path), list[float]()
    config = shop.configured("1 second", **{"spark.executorEnv.LD_PRELOAD": ""})

    def applied(*targets: str) -> None:
        began = time.monotonic()
        run.wait_for(lambda: shop.is_applied(*targets))
        waits.append(time.monotonic() - began)

    def refused() -> bool:
        return all(f"{target}: this machine's clock is behind" in run.log for target in (ORDERS, EVENTS))

    with Supervised(shop, config) as sink:
        run = sink.running()
        clock.jump(HOUR)
        while any(shop.last_snapshot(target) < clock.now() - HOUR / 2 for target in (ORDERS, EVENTS)):
            shop.write()  # the JVM may see another clock a second later
            applied()
        run.kill()
        clock.jump(-HOUR)
        shop.write()
        run = sink.start()
        run.wait_for(lambda: shop.is_applied(DELTA_ORDERS) and refused())
        clock.jump(HOUR)
        applied()
        shop.check()
        assert "Cannot find endpoint" not in run.log, run.log  # as if the executor were lost
    seen(f"Changes were applied within {max(waits):.0f} s. Table = source")
