"""`.ci/run` chooses the Python with which `make` sets up its environments, and gives failed tests a second run."""

import re
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
    code, calls = ci_run(tmp_path, {"make": 'echo "$@" "$PYTHON"', **scripts})
    assert (code, calls) == (0, [f"{target} {chosen}" for target in ("setup", "test", "test-all", "audit")])


def test_tests_that_fail_end_it(tmp_path: Path) -> None:
    make = 'echo "$@"; case "$*" in test) exit 2;; esac'
    assert ci_run(tmp_path, {"make": make, "python3.11": "exit 0"}) == (2, ["setup", "test"])


@pytest.mark.parametrize("target", ["test", "test-all", "test-nightly", "versions"])
def test_what_fails_in_the_crowd_runs_once_more_alone(tmp_path: Path, target: str) -> None:
    """Each call of pytest for itself: what the next one failed in isn't what this one failed in."""
    _, (again, *_) = ci_run(tmp_path, {"make": 'echo "$AGAIN"', "python3.11": "exit 0"})
    command = ["make", "--dry-run", target, f"AGAIN={again}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    calls = [line for line in printed.splitlines() if " -m pytest" in line]
    assert calls
    assert all(re.search(r" \|\| \S+python -m pytest --last-failed .*--maxfail 1$", call) for call in calls)


def test_the_environment_of_another_spark_is_made_meanwhile(tmp_path: Path) -> None:
    """One that can't be made ends nothing here."""
    make = f"""
        case "$*" in
            .with*) echo "$@" >> {tmp_path}/made; exit 2;;
            test-all) cat {tmp_path}/made;;
        esac"""
    code, printed = ci_run(tmp_path, {"make": make, "python3.11": "exit 0"})
    assert (code, printed) == (0, [".with-test SPARK=3.5.7"])


def ci_run(folder: Path, scripts: dict[str, str]) -> tuple[int, list[str]]:
    """Its exit code and what it prints, where these scripts are the programs that there are."""
    java = "echo 'openjdk version \"17.0.1\"' >&2"
    there = dict.fromkeys(("python3", "openssl", "chromium", "promtool", "faketime"), "exit 0")
    for name, body in {**there, "java": java, **scripts}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "cat", "dirname", "grep", "nice"):
        (folder / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()
