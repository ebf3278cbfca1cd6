"""The benchmarks of peers: the changelogs' files, one whole case, and the page."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks.peers import changelogs, measure, report
from benchmarks.peers.cases import CHANGELOGS, PEERS, SCALES, SHAPES, Changelog, Scale, refused, scale_of
from benchmarks.processes import cpu_seconds, memory_bytes, tree

SMALL = Scale(rows=500, events=100, marks=(1, 3))
ROWDELTA_V3 = next(peer for peer in PEERS if peer.name == "rowdelta v3 position")


def applied(files: changelogs.Files, batches: int) -> dict[int, dict[str, Any]]:
    """The rows after so many micro-batches, change by change."""
    rows: dict[int, dict[str, Any]] = {}
    for file in [*files.initial, *(file for batch in files.batches[:batches] for file in batch)]:
        for change in pq.read_table(file).to_pylist():
            kind, _ = change.pop("row_kind"), change.pop("seq")
            if kind in ("-U", "-D"):
                assert rows.pop(change["id"]) == change
            else:
                rows[change["id"]] = change
    return rows


@pytest.mark.parametrize("shape", SHAPES)
def test_the_marks_say_what_the_files_lead_to(shape: str, tmp_path: Path) -> None:
    files = changelogs.write(Changelog(shape, "plain"), SMALL, 7, tmp_path / "files")
    assert [len(batch) for batch in files.batches] == [2, 2, 2]
    for mark in files.marks:
        rows = applied(files, mark.batch)
        assert mark.totals.count == len(rows)
        assert mark.totals.balance == sum(row["balance"] for row in rows.values())
        assert set(mark.ids) <= set(rows)
    assert pq.read_table(files.expected).to_pylist() == [row for _, row in sorted(rows.items())]


def test_a_file_has_all_changes_of_its_keys_and_their_times_rise(tmp_path: Path) -> None:
    files = changelogs.write(CHANGELOGS[0], SMALL, 7, tmp_path / "files")
    for batch in files.batches:
        ids = [set(pq.read_table(file)["id"].to_pylist()) for file in batch]
        assert not ids[0] & ids[1]
    in_order = [*files.initial, *(file for batch in files.batches for file in batch)]
    times = [file.stat().st_mtime for file in in_order]
    assert times == sorted(set(times))


def test_the_first_load_spans_days_and_changes_move_rows_to_later_ones(tmp_path: Path) -> None:
    files = changelogs.write(Changelog("uniform", "day"), SMALL, 7, tmp_path / "files")
    first = pc.unique(pa.concat_tables(pq.read_table(file) for file in files.initial)["day"]).to_pylist()
    assert len(first) == 20
    changes = pa.concat_tables(pq.read_table(file) for file in files.batches[0])
    new = changes.filter(pc.is_in(changes["row_kind"], pa.array(["+U", "+I"])))
    assert min(new["day"].to_pylist()) > max(first)


@pytest.mark.spark
def test_a_case_is_measured(tmp_path: Path) -> None:
    [figures] = measure.measure([(ROWDELTA_V3, CHANGELOGS[0])], "tiny", 1, tmp_path)
    assert "failed" not in figures, figures
    assert figures["equal"]
    assert len(figures["seconds"]) == 2
    assert all(mark[reader]["right"] for mark in figures["marks"] for reader in ("spark", "duckdb"))
    assert all(figures[name] > 0 for name in ("cpu_seconds", "table_bytes", "memory_bytes", "load_seconds"))
    measure.append(figures, tmp_path / "figures.jsonl")
    report.write(tmp_path / "figures.jsonl", tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| rowdelta v3 position |" in page
    assert (tmp_path / "images" / "benchmarks-tiny-skewed-plain.png").stat().st_size > 1000


def line(peer: str, changelog: Changelog = CHANGELOGS[0], median: float = 1.0, **figures: Any) -> dict[str, Any]:
    """A line of the results."""
    who = next(each for each in PEERS if each.name == peer)
    read = {"first_scan": 1.0, "scan": 1.0, "point": 0.01, "right": True}
    values = {
        "seconds": [median] * 20,
        "changes": 1000,
        "cpu_seconds": 1.0,
        "table_bytes": 1000,
        "written_bytes": 2000,
        "memory_bytes": 10**9,
        "machine_seconds": [0.1],
        "equal": True,
        "marks": [{"batch": 1, "spark": read, "duckdb": read}],
    }
    said = {"scale": "small", "commit": "abc", "began": "2026-01-31T00:00:00", "spark": "4.1.1"}
    said |= {"changelog": changelog.name}
    return said | asdict(changelog) | asdict(who) | {"peer": peer} | (figures or values)


def written(tmp_path: Path, *lines: dict[str, Any]) -> str:
    for each in lines:
        measure.append(each, tmp_path / "figures.jsonl")
    report.write(tmp_path / "figures.jsonl", tmp_path / "benchmarks.md")
    return (tmp_path / "benchmarks.md").read_text()


def test_the_page_names_where_another_peer_is_better(tmp_path: Path) -> None:
    ours, theirs = line("rowdelta v2 position", median=1.0), line("Flink v2 upsert", median=0.5)
    page = written(tmp_path, ours, theirs, line("MERGE INTO Delta merge-on-read", median=0.1))
    losses = page.partition("## Where we lose")[2].partition("\n## ")[0]
    assert "| rowdelta v2 position | median micro-batch, s | 1.00 | Flink v2 upsert: 0.50 |" in losses
    assert "Delta" not in losses, "it is another kind of table"
    page = written(tmp_path, line("Flink v2 upsert", median=0.95))
    assert "In no case was another peer" in page, "the newest line of a case counts"


def test_the_page_says_what_has_no_figures_and_what_readers_refuse(tmp_path: Path) -> None:
    refusing = line("rowdelta v2 equality")
    refusing["marks"] = [{"batch": 1, "spark": refusing["marks"][0]["spark"], "duckdb": {"failed": "no"}}]
    wrong = line("Flink v2 upsert")
    wrong["marks"] = [{"batch": 1, "spark": {**refusing["marks"][0]["spark"], "right": False}, "duckdb": {"slow": 120}}]
    skipped = line("rowdelta v2 copy-on-write", skipped="there is none yet")
    page = written(tmp_path, refusing, wrong, skipped)
    assert "| rowdelta v2 equality | 1.00 | 0.010 | no | no |" in page
    assert "| Flink v2 upsert | wrong | wrong | > 120 | not tried |" in page
    assert "| rowdelta v2 copy-on-write | skewed, not partitioned, small | skipped: there is none yet |" in page


def test_lines_of_the_page_fit(tmp_path: Path) -> None:
    page = written(tmp_path, *(line(peer.name, changelog) for peer in PEERS for changelog in CHANGELOGS))
    assert [each for each in page.splitlines() if len(each) > 120 and each[0] != "|" and "://" not in each] == []


def test_delta_lake_has_no_buckets() -> None:
    reasons = {(peer.format, of.partitioning) for peer in PEERS for of in CHANGELOGS if refused(peer, of)}
    assert reasons == {("delta", "bucket")}
    assert all(scale.marks for scale in SCALES.values())
    marks = {(of, scale_of(of, SCALES["small"]).marks) for of in CHANGELOGS}
    assert marks == {(CHANGELOGS[0], (1, 5, 20, 100))} | {(of, (1, 5, 20)) for of in CHANGELOGS[1:]}


def test_a_process_is_weighed_with_what_came_of_it(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        while len(tree(child.pid)) < 2:
            assert child.poll() is None
        assert memory_bytes(tree(child.pid)) > memory_bytes([child.pid]) > 0
        assert {child.pid, *tree(child.pid)} < set(tree(os.getpid()))
    finally:
        child.communicate(b"\n")
    assert cpu_seconds([os.getpid()]) > 0


def test_the_published_figures_make_the_published_page(tmp_path: Path) -> None:
    """Who measures again commits both."""
    report.write(report.RESULTS, tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == report.PAGE.read_text(encoding="utf-8")
    names = {json.loads(text)["peer"] for text in report.RESULTS.read_text(encoding="utf-8").splitlines()}
    assert names <= {peer.name for peer in PEERS}
