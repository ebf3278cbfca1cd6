"""The machine of a sink has a full disk, or a clock that jumps."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.plugin import Seen
from tests.faults.shop import SECONDS, Shop, Supervised
from tests.sink.test_submit import complaints

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("fast_start")]

SIZES = {"state of sink": 8, "local": 8, "index": 8, "warehouse": 32}
"""Megabytes of the disks."""


class Disk:
    """A small disk, which is a part of memory."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        with pytest.raises(OSError, match="No space left on device"), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)

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
