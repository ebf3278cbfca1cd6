"""`.ci/run` chooses the Python with which `make` sets up its environments, and gives failed tests a second run."""

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
    assert ci_run(tmp_path, {"make": 'echo "$@"', **scripts}) == (
        0,
        [
            f"setup PYTHON={chosen}",
            f"test PYTHON={chosen}",
            f"test-spark SPARK=3.5.7 PYTHON={chosen}",
            f"test-spark SPARK=4.1.1 PYTHON={chosen}",
            f"audit PYTHON={chosen}",
        ],
    )


@pytest.mark.parametrize("passes_alone", [True, False])
def test_what_fails_in_the_crowd_runs_once_more_alone(tmp_path: Path, passes_alone: bool) -> None:
    make = f"""
        echo "$@"
        case "$*" in
            *TESTS=*) {"exit 0" if passes_alone else "exit 2"};;
            "test "*) exit 2;;
        esac"""
    code, calls = ci_run(tmp_path, {"make": make, "python3.11": "exit 0"})
    assert calls[1:3] == [
        "test PYTHON=python3.11",
        "test PYTHON=python3.11 TESTS=--last-failed --last-failed-no-failures none --maxfail 1",
    ]
    assert (code, len(calls)) == ((0, 6) if passes_alone else (2, 3))


def test_the_environments_of_other_versions_are_made_meanwhile(tmp_path: Path) -> None:
    """Those of one after the other: both write the project's metadata. One that can't be made ends nothing here."""
    make = f"""
        case "$*" in
            .venv*) echo "$@" >> {tmp_path}/made; exit 2;;
            "test-spark "*) cat {tmp_path}/made;;
        esac"""
    code, printed = ci_run(tmp_path, {"make": make, "python3.11": "exit 0"})
    made = [f".venv-spark-{spark}/.installed SPARK={spark} PYTHON=python3.11" for spark in ("3.5.7", "4.1.1")]
    assert (code, printed) == (0, 2 * made)


def ci_run(folder: Path, scripts: dict[str, str]) -> tuple[int, list[str]]:
    """Its exit code and what it prints, where these scripts are the programs that there are."""
    java = "echo 'openjdk version \"17.0.1\"' >&2"
    there = dict.fromkeys(("python3", "openssl", "chromium", "promtool", "faketime", "javac"), "exit 0")
    for name, body in {**there, "java": java, **scripts}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "cat", "dirname", "grep", "nice"):
        (folder / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()
