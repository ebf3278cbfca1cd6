"""Stories whose session can't be that of the other tests."""

import subprocess
import sys
from pathlib import Path

from tests.sink.test_submit import environment

ROOT = Path(__file__).parents[2]


def follow_in_own_process(module: str, folder: Path, *arguments: str) -> None:
    """Run a module that prints `done` at its end.

    :param folder: its first argument, and where it works.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *arguments],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == "done"
