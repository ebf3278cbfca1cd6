"""`.ci/run` chooses the Python with which `make` sets up its environments."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("scripts", "chosen"),
    [
        ({"python3.11": "exit 0"}, "python3.11"),
        ({"python3.11": "exit 127"}, "python3"),  # as pyenv has it, of a version that isn't the current one
        ({}, "python3"),
    ],
    ids=["3.11", "3.11 that doesn't run", "no 3.11"],
)
def test_the_python_of_the_suite(tmp_path: Path, scripts: dict[str, str], chosen: str) -> None:
    java = "echo 'openjdk version \"17.0.1\"' >&2"
    there = dict.fromkeys(
        ("python3", "postgres", "mariadbd", "openssl", "chromium", "promtool", "faketime", "javac"), "exit 0"
    )
    for name, body in {**there, "java": java, "make": 'echo "$@"', **scripts}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    command = [ROOT / ".ci" / "run"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"test PYTHON={chosen}",
        f"test-spark SPARK=3.5.7 PYTHON={chosen}",
        f"test-spark SPARK=4.1.1 PYTHON={chosen}",
        f"audit PYTHON={chosen}",
    ]
