"""`make demo-database`, to its end."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 160
"""Of processor time, so that it ends within two minutes on two quiet cores, of which it takes little more than one."""


@pytest.mark.spark
def test_a_bank_is_mirrored_under_load_within_two_minutes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stack.demo_database", "--folder", "bank"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    for target, rows in {"ice.bank.accounts": "100,000", "lake.bank.tellers": "10"}.items():
        assert f"{target} load: +I {rows} " in done.stdout
        assert f"{target} batch 0: +U " in done.stdout, "it was followed"
        assert f"{target} against public.pgbench_{target.split('.')[2]} of " in done.stdout
    assert done.stdout.count(": EQUAL") == 2
    assert (tmp_path / "bank" / "warehouse" / "lake" / "bank" / "tellers" / "_delta_log").exists()
    spent = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    assert spent < MOST_SECONDS, done.stdout
