"""How many requests a micro-batch is: upper bounds, since each costs money and 20 to 100 ms."""

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.spark
def test_a_warm_micro_batch_asks_for_little() -> None:
    """Without small files that are merged meanwhile. What is a request of a driver to whom is in `benchmarks.s3`."""
    command = [sys.executable, "-m", "benchmarks.s3", "--json", "--cases", "rest", "s3"]
    command += ["--batches", "8", "--rows", "100", "--keys", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    rest, s3 = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))

    # whether others changed the table, the transaction's metadata, and right before the commit; then commit and report
    catalog = fewest(rest, "catalog")
    reads = sum(count for name, count in catalog.items() if name.startswith("GET "))
    writes = sum(count for name, count in catalog.items() if name.startswith("POST "))
    assert reads <= 3, catalog
    assert writes <= 2, catalog
    assert fewest(rest, "s3") == {}

    # data, deletes, a run and a version of the index; two manifests, their list and the metadata
    assert fewest(s3, "s3").get("Put", 0) <= 8, s3
    assert sum(fewest(s3, "s3").values()) <= 13, s3
    of_cold = s3["cold"]["s3"]
    assert sum(of_cold.values()) <= 40, of_cold


def fewest(measured: dict[str, Any], service: str) -> dict[str, int]:
    """Of the warm micro-batch with the fewest requests: others merge small files or the index's runs too."""
    found: dict[str, int] = min((cost[service] for cost in measured["warm"]), key=lambda counts: sum(counts.values()))
    return found
