"""A small file that is larger than the memory when it is read."""

import gzip
import json
from pathlib import Path

import pytest

from tests.stack.sink_process import SinkProcess, written

pytestmark = pytest.mark.spark

MILLION = 1_000_000


def test_a_line_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """The run says so and ends. When the file is gone, the next run goes on."""
    changes = tmp_path / "changes"
    changes.mkdir()
    with gzip.open(changes / "1.json.gz", "wb") as file:
        file.write(json.dumps({"row_kind": "+I", "id": 1, "seq": 1, "v": ""}).encode()[:-2])
        for _ in range(500):
            file.write(b"a" * MILLION)
        file.write(b'"}\n')
    assert (changes / "1.json.gz").stat().st_size < MILLION
    values = {
        "sink": {"id": "shop", "checkpoint": str(tmp_path / "state"), "trigger": "available-now"},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")}},
        "tables": [
            {
                "source": str(changes),
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "string"},
                "order_by": ["seq bigint"],
            }
        ],
        "spark": {"spark.master": "local[1]", "spark.driver.memory": "600m", "spark.ui.enabled": "false"},
    }
    sink = SinkProcess(written(tmp_path / "sink", values), tmp_path)
    done = sink.finish("run", str(sink.config))
    assert done.returncode == 75, done.stderr
    assert "lake.shop.orders: the Spark job failed; nothing was applied" in done.stderr
    assert "java.lang.OutOfMemoryError" in done.stderr
    (changes / "1.json.gz").unlink()
    (changes / "1.json").write_text(json.dumps({"row_kind": "+I", "id": 2, "seq": 1, "v": "small"}))
    again = sink.finish("run", str(sink.config))
    assert again.returncode == 0, again.stderr
    assert "batch 0: +I 1" in again.stderr + again.stdout
