"""The demo: a faithful changelog, a folder that only a demo may clear, and a run from an empty folder to
exit code 0.
"""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sink.commands import demo
from sink.errors import ConfigError
from sink.targets.capabilities import CAPABILITIES, Format


def extension(name: str) -> Path:
    """Of DuckDB: a package has it, so that nothing is downloaded."""
    package = importlib.import_module(f"duckdb_extension_{name}")
    (found,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
    return found


@pytest.mark.parametrize("entity", [demo.CUSTOMERS, demo.ORDERS], ids=lambda entity: entity.name)
def test_the_changelog_leads_to_the_expected_rows(entity: demo.Entity, tmp_path: Path) -> None:
    """By a model of its own: a dict from key to row, change by change."""
    demo.generate(entity, np.random.default_rng(demo.SEED), tmp_path)
    expected = pq.read_table(tmp_path / "expected" / f"{entity.name}.parquet")
    key, kinds = expected.column_names[0], set()
    rows: dict[object, dict[str, object]] = {}
    for file in sorted((tmp_path / "changes" / entity.name).iterdir(), key=lambda file: file.stat().st_mtime):
        for change in pq.read_table(file).to_pylist():
            kind, _ = change.pop("row_kind"), change.pop("seq")
            kinds.add(kind)
            if kind in ("-U", "-D"):
                assert rows.pop(change[key]) == change
            else:
                assert change[key] not in rows
                rows[change[key]] = change
    assert kinds == {"+I", "-U", "+U", "-D"}
    assert pa.Table.from_pylist(list(rows.values()), expected.schema).sort_by(key).equals(expected.sort_by(key))


def test_files_have_strictly_rising_modification_times(tmp_path: Path) -> None:
    demo.generate(demo.CUSTOMERS, np.random.default_rng(demo.SEED), tmp_path)
    times = [file.stat().st_mtime_ns for file in sorted((tmp_path / "changes" / "customers").iterdir())]
    assert len(times) == demo.BATCHES
    assert times == sorted(set(times))


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "warehouse").mkdir()
    (tmp_path / "warehouse" / "precious").touch()
    with pytest.raises(ConfigError, match="no demo made it"):
        demo.run(tmp_path)
    assert (tmp_path / "warehouse" / "precious").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").touch()
    with pytest.raises(ConfigError, match="is a file"):
        demo.run(tmp_path / "demo")


def test_a_folder_below_a_file_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--folder: got '.*/file/demo', expected a folder to write into: Not a dir"):
        demo.run(tmp_path / "file" / "demo")


@pytest.mark.spark
def test_a_demo_that_is_stopped_claims_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "sink", "demo", "--folder", "shop"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if " batch 0" in line:
                running.send_signal(signal.SIGINT)
                break
        rest = running.stdout.read()
        assert running.wait(timeout=60) == 0
    assert "Stopped as asked. It goes on with: rowdelta run shop/sink.yaml" in rest
    assert "EQUAL" not in rest
    assert "DIFFERENT" not in rest


@pytest.mark.spark
@pytest.mark.parametrize("table_format", ["iceberg", "delta"])
def test_the_demo_proves_its_tables_and_can_be_run_again(tmp_path: Path, table_format: Format) -> None:
    command = [sys.executable, "-m", "sink", "demo", "--folder", "shop", "--format", table_format]
    # `-m` from another folder: the package is the installed one
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / demo.MARKER).touch()
    (tmp_path / "shop" / "sink.yaml").write_text("of the last time")
    (tmp_path / "shop" / "notes.txt").write_text("mine")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "removed the last demo's sink.yaml" in done.stdout
    assert done.stdout.count(f"what {CAPABILITIES[table_format].name}'s reader") == 2
    assert done.stdout.count(": EQUAL") == 2
    made = (tmp_path / "shop" / "warehouse" / "shop" / "orders" / "_delta_log").exists()
    assert made == (table_format == "delta")
    for table in ("customers", "orders"):
        assert done.stdout.count(f"lake.shop.{table} batch ") == demo.BATCHES
    assert (tmp_path / "shop" / "notes.txt").read_text() == "mine"
    page = (Path(__file__).parents[1] / "docs" / "getting-started.md").read_text()
    example = dict(zip(CAPABILITIES, re.findall(r"```python\n(.*?)```", page, re.DOTALL), strict=True))[table_format]
    example = re.sub(r'"demo2?/', '"shop/', example).replace(
        f"INSTALL {table_format}; LOAD {table_format}",
        "; ".join(f"LOAD '{extension(name)}'" for name in ("avro", "iceberg", "delta")),
    )
    read = [sys.executable, "-c", example]
    printed = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = pq.read_metadata(tmp_path / "shop" / "expected" / "orders.parquet").num_rows
    assert "INSTALL" not in example
    assert printed.count("customer_id") >= 3, "three readers"
    assert re.search(rf"shape: \({rows:_}, ", printed)
    assert "Exception" not in done.stderr
