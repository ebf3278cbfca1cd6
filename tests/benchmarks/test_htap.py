"""Tables that are changed and read at the same time: the model of the source, and the page."""

import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.htap import report
from benchmarks.htap.orders import DISTRICTS, Orders
from benchmarks.htap.run import Plan
from benchmarks.processes import FolderGrowth


def test_the_model_is_what_the_changes_lead_to() -> None:
    source = Orders(stock=300, orders=200, most=2_000, seed=3)
    rows: dict[int, dict[str, Any]] = {}
    sizes = []
    for changed in [source.first_load(), *(source.batch(100) for _ in range(20))]:
        for row in changed.to_pylist():
            if row.pop("row_kind") == "-D":
                assert rows.pop(row["id"], None) is not None
            else:
                rows[row["id"]] = row
        sizes.append(len(rows))
    assert set(sizes) == {DISTRICTS + 300 + 200}
    assert source.expected().to_pylist() == [row for _, row in sorted(rows.items())]
    assert source.newest() == max(rows)
    hot = [row["seq"] for key, row in rows.items() if key < 6]
    cold = [row["seq"] for key, row in rows.items() if DISTRICTS <= key < DISTRICTS + 300]
    assert min(hot) > np.median(cold)


def test_the_page_compares_the_second_sixth_with_the_last_one(tmp_path: Path) -> None:
    plan = {**vars(Plan(seconds=120)), "formats": ["v3", "delta"], "commit": "abc", "began": "2026-01-01"}

    def sample(number: int) -> dict[str, Any]:
        of_tables = ("v3", "delta")
        seconds = {
            f"{engine} {query} {name}": 1.0
            for engine in ("spark", "duckdb")
            for query in ("scan", "point")
            for name in of_tables
        }
        return {
            "second": 10.0 * number,
            "since": 10.0,
            "seconds": seconds | {"spark scan v3": float(number)},
            "ages": {"v3": [0.5, 0.7], "delta": []},
            "written": {"v3": 2_000_000, "delta": 20, "index": 0},
            "processes": {f"{group}_memory_bytes": 5e6 for group in ("driver", "jvm", "workers")},
            "live": {name: {"live_data_files": 8.0, "commits": 2.0} for name in of_tables},
            "beside_compacted": {"v3": 1.25, "delta": 1.5},
            "machine_seconds": 0.05,
        }

    end = {"compared": {"v3": [], "delta": ["3 rows, not 4"]}, "rows": 2_000_100}
    lines = [plan, *(sample(number) for number in range(1, 13)), end]
    results, page = tmp_path / "htap.jsonl", tmp_path / "htap.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(results, page)
    text = page.read_text()
    assert "| v3: spark scan | 3.50 s | 11.50 s | 3.29 | no |" in text
    assert "| v3: bytes written for a change | 100 B | 100 B | 1.00 | yes |" in text
    assert "| v3: data files | 8 | 8 | 1.00 | yes |" in text
    assert "| delta: age of a change, p99 | nan s | nan s | nan | no |" in text
    assert "**delta: 3 rows, not 4**" in text
    assert "- v3: 1.25, 1.25" in text
    assert (tmp_path / "images" / "htap.png").stat().st_size > 1000


def test_a_folder_is_asked_while_files_come(tmp_path: Path) -> None:
    growth, ended = FolderGrowth(tmp_path), threading.Event()

    def come() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            growth._known[tmp_path / str(number)] = 1
            growth._known.pop(tmp_path / str(number - 100), None)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=come)
    thread.start()
    try:
        for _ in range(200):
            assert set(growth.files.values()) <= {1}
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
