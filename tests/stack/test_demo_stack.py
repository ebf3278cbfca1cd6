"""`make demo-stack`, interrupted. What it shows when it isn't, `test_replay.py` checks with more."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: PostgreSQL runs as another user, who can't pass there."""
    with TemporaryDirectory(prefix="rowdelta-demo-", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.kafka
@pytest.mark.parametrize("shown", ["starting Postgres", "Postgres after"])
def test_nothing_runs_after_ctrl_c(folder: Path, shown: str) -> None:
    command = [sys.executable, "-m", "tests.stack.demo"]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    # In a group of its own, as a terminal would have it: all get the signal, some twice.
    demo = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert demo.stdout is not None
    with demo.stdout:
        for line in demo.stdout:
            if shown in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        os.killpg(demo.pid, signal.SIGINT)
        said = demo.stdout.read()
    assert demo.wait(120) == 130, said
    assert "stopped" in said
    assert using(folder) == []
    assert list(folder.iterdir()) == []


def using(folder: Path) -> list[str]:
    """Command lines of the processes with the folder's path in them."""
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in line:
            lines.append(line)
    return lines
