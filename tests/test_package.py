"""The built wheel, as `pip install` brings it to a machine that has no checkout."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.spark
def test_the_wheel_runs_the_demo_in_an_empty_environment(tmp_path: Path) -> None:
    of_checkout = ("PYTHONPATH", "PYSPARK_PYTHON", "SPARK_HOME", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if name not in of_checkout}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # of a copy: `build` in the checkout may hold files of an earlier state
    sources = tmp_path / "sources"
    for name in ("changelog", "deltawriters", "sink"):
        shutil.copytree(ROOT / name, sources / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sources)
    (wheel,) = tmp_path.glob("rowdelta-*.whl")
    assert "sink/spark/pools.xml" in zipfile.ZipFile(wheel).namelist()
    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    # the Spark of these tests, so that pip has it in its cache; few of its modules are ever imported here
    install: list[str | Path] = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    run(*install, wheel, f"pyspark=={pyspark.__version__}")
    assert f"Spark {pyspark.__version__}" in run(programs / "rowdelta", "--version")
    assert run(programs / "rowdelta", "demo").count(": EQUAL") == 2
