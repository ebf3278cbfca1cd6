"""The soak: its model of the source, a short one with kills, and its page."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.soak import report
from benchmarks.soak.changes import Changes, differences
from benchmarks.soak.job import Job
from benchmarks.soak.run import Plan, run

SHORT = Plan(
    batches=300,
    keys=2_000,
    events=50,
    kill_every=80,
    column_every=40,
    comparisons_between=2,
    sample_every=50,
    regions=2,
)
"""In three tables at the same time."""


def test_the_model_is_what_the_changes_lead_to() -> None:
    changes = Changes(keys=200, events=150, column_every=3, seed=4)
    rows: dict[int, dict[str, Any]] = {}
    moved = 0
    for changed in [changes.first_load(), *(changes.batch() for _ in range(8))]:
        for row in changed.to_pylist():
            kind = row.pop("row_kind")
            before = rows.pop(row["id"], None)
            if kind == "+U":
                rows[row["id"]] = row
                moved += before is not None and before["region"] != row["region"]
    expected = changes.expected()
    assert expected.column_names[-2:] == ["added_1", "added_2"]
    assert moved > 10
    assert 0 < len(rows) < 200
    model = [{"added_1": None, "added_2": None, **row} for _, row in sorted(rows.items())]
    assert [dict(sorted(row.items())) for row in expected.to_pylist()] == [dict(sorted(row.items())) for row in model]


def test_differences_are_seen() -> None:
    changes = Changes(keys=50, events=10, column_every=3, seed=4)
    changes.first_load()
    expected = changes.expected()
    assert differences(expected.take(pa.array(range(49, -1, -1))), expected) == []
    assert differences(expected.slice(1), expected) == ["49 rows, not 50"]
    assert differences(expected.drop_columns(["note"]), expected) == ["no columns ['note']"]
    other = expected.set_column(2, "amount", pa.array([0] * 50))
    assert differences(other, expected) == ["column amount differs"]


@pytest.mark.parametrize(("plan", "kills"), [(Plan(), 50), (Plan(batches=300, kill_every=60), 5), (SHORT, 3)])
def test_kills_come_where_the_sink_has_something_to_do(plan: Plan, kills: int) -> None:
    assert len(plan.kills()) == kills
    assert not plan.kills() & plan.comparisons()


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_a_short_soak_ends_with_tables_that_equal_the_source(tmp_path: Path) -> None:
    told: list[str] = []
    job = Job(tmp_path / "soak", memory="512m")
    assert run(SHORT, job, tmp_path / "soak.jsonl", told.append) == []
    assert len(told) == 3
    assert job.starts == 4
    (soaked,) = report.runs(tmp_path / "soak.jsonl")
    for name in soaked.formats:
        files = [count for _, count in soaked.series("index_files", name)]
        assert max(files[-3:]) <= 60, files
    opened = [count for _, count in soaked.series("jvm_open_files")]
    assert opened[-1] <= opened[-2] + 40, opened
    report.write(tmp_path / "soak.jsonl", tmp_path / "soak.md")
    assert "The tables were equal to the source at 3 of 3 points." in (tmp_path / "soak.md").read_text()
    assert (tmp_path / "images" / "soak-delta.png").stat().st_size > 1000


def lines(tmp_path: Path, figures: list[float], compared: dict[str, list[str]], commit: str = "abc") -> Path:
    """A file with one more run."""
    path = tmp_path / "soak.jsonl"
    plan = {"batches": 100, "events": 5, "keys": 9, "column_every": 10, "kill_every": 20, "formats": [*compared]}
    samples = [
        {
            "batch": 10 * number,
            "tables": {name: {"live_data_files": figure, "scan_seconds": 1.0} for name in compared},
            "processes": {"jvm_open_files": 100},
            "machine_seconds": 0.1,
        }
        for number, figure in enumerate(figures, 1)
    ]
    end = {"batch": 100, "compared": compared, "rows": 9, "starts": 5}
    said = [plan | {"commit": commit, "began": "2026-01-31T00:00:00"}, *samples, end]
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in said)
    return path


def test_a_run_takes_the_place_of_older_ones_of_its_formats(tmp_path: Path) -> None:
    figures: list[float] = [1, 7, 5, 5, 5, 5, 5, 5, 5, 7]
    lines(tmp_path, figures, {"v3": ["3 rows, not 4"]}, "first")
    lines(tmp_path, figures, {"v2": [], "v3": ["3 rows, not 4"], "delta": []}, "second")
    results = lines(tmp_path, figures, {"v3": []}, "third")
    assert [(soaked.plan["commit"], soaked.formats) for soaked in report.runs(results)] == [
        ("second", ["v2", "delta"]),
        ("third", ["v3"]),
    ]
    report.write(results, tmp_path / "soak.md")
    page = (tmp_path / "soak.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("##")]
    assert headings[-7:] == [
        *("## Iceberg v2, Delta Lake", "### Iceberg v2", "### Delta Lake", "### Processes with Iceberg v2, Delta Lake"),
        *("## Iceberg v3", "### Iceberg v3", "### Processes with Iceberg v3"),
    ]
    assert "differed" not in page
    report.keep_others(results, ["v2", "v3"])
    assert [soaked.plan["commit"] for soaked in report.runs(results)] == ["second"], "for its Delta table"
    report.keep_others(results, ["v2", "v3", "delta"])
    assert report.runs(results) == []
    report.keep_others(tmp_path / "none.jsonl", ["v2"])
    assert not (tmp_path / "none.jsonl").exists()


def test_the_page_says_what_grows(tmp_path: Path) -> None:
    results = lines(tmp_path, [1, 100, 5, 5, 5, 5, 5, 5, 5, 111], {"v2": []})
    report.write(results, tmp_path / "soak.md")
    page = (tmp_path / "soak.md").read_text()
    said = " ".join(page.split())
    assert "| live files | 100 | 111 | 1.11 | no: it grows |" in page
    assert "| seconds of a scan | 1.000 | 1.000 | 1.00 | yes |" in page
    assert "| open files of the JVM | 100 | 100 | 1.00 | yes |" in page
    assert "equal to the source at 1 of 1 points" in said
    assert [each for each in page.splitlines() if len(each) > 120 and each[0] != "|"] == []


def test_the_published_samples_make_the_published_page(tmp_path: Path) -> None:
    """Who soaks again commits both."""
    published = report.PAGE.read_text(encoding="utf-8")
    report.write(report.RESULTS, tmp_path / "soak.md")
    assert (tmp_path / "soak.md").read_text() == published


def test_the_page_says_what_differs_and_that_a_run_ended_early(tmp_path: Path) -> None:
    results = lines(tmp_path, [1, 1], {"v2": ["3 rows, not 4"]})
    results.write_text(results.read_text().replace('"batches": 100', '"batches": 1000'))
    report.write(results, tmp_path / "soak.md")
    page = " ".join((tmp_path / "soak.md").read_text().split())
    assert "**These differed from the source: v2 after 100.**" in page
    assert "The run ended after 100 micro-batches." in page
    assert "| live files | | | | not known |" in page
