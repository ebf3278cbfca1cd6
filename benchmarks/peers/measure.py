"""Measures each case: a peer and a changelog. `python -m benchmarks.peers` is its command line."""

import json
import platform
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import changelogs, kinds
from benchmarks.peers.cases import PEERS, SCALES, Changelog, Peer, Scale, refused, scale_of
from benchmarks.peers.changelogs import Files, Mark
from benchmarks.peers.writers import (
    FlinkWriter,
    PythonProgram,
    RefusedError,
    SparkWriter,
    Writer,
    WriterError,
    flink_program,
    kind_of,
    location_of,
)
from benchmarks.processes import FolderGrowth, PeakMemory, commit, cpu_seconds, machine_seconds, tree, written_bytes
from sink.spark import versions

Figures = dict[str, Any]
"""What one case came to, as it stands in a line of the results."""


def measure(cases: Sequence[tuple[Peer, Changelog]], scale_name: str, seed: int, work: Path) -> Iterator[Figures]:
    """Measure cases in their order, each peer in a process of its own, and yield the figures of each as soon as it is
    done.
    """
    scale = SCALES[scale_name]
    of_run = {
        "scale": scale_name,
        "seed": seed,
        "commit": commit(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "spark": versions.installed().full,
    }
    files = {
        changelog: changelogs.write(changelog, scale_of(changelog, scale), seed, work / "changelogs" / str(number))
        for number, changelog in enumerate(dict.fromkeys(changelog for _, changelog in cases))
    }
    warehouse = work / "warehouse"
    with PythonProgram("benchmarks.peers.readers", work / "readers.log", str(warehouse)) as readers:
        for peer, changelog in cases:
            figures: Figures = {"peer": peer.name, "changelog": changelog.name, **asdict(changelog)}
            try:
                if reason := refused(peer, changelog):
                    raise RefusedError(reason)
                with _writer(peer, warehouse, work, readers) as writer:
                    if scale.warm:
                        _warm_up(writer, peer, changelog, warehouse, work, readers)
                    figures |= _of_case(writer, peer, changelog, files[changelog], scale, warehouse, work, readers)
            except RefusedError as error:
                figures["skipped"] = str(error)
            except WriterError as error:
                figures["failed"] = str(error)[-2000:]
            yield of_run | asdict(peer) | figures


@contextmanager
def _writer(peer: Peer, warehouse: Path, work: Path, readers: PythonProgram) -> Iterator[Writer]:
    number = PEERS.index(peer)
    log, folder = work / f"writer-{number}.log", _work_of(peer, work)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier changelog
    if peer.program == "flink":
        with flink_program(log) as program:
            yield FlinkWriter(program, peer, folder, readers)
    else:
        arguments = (str(number), str(warehouse), str(folder))
        with PythonProgram("benchmarks.peers.spark_writer", log, *arguments) as spark:
            yield SparkWriter(spark)


def _warm_up(
    writer: Writer, peer: Peer, changelog: Changelog, warehouse: Path, work: Path, readers: PythonProgram
) -> None:
    """A small table, so that no case pays for the JVM's first compilations and the first imports."""
    files = work / "changelogs" / f"warm-{PEERS.index(peer)}"
    shutil.rmtree(files, ignore_errors=True)
    scale = Scale(rows=20_000, events=2_000, marks=(3,))
    small = changelogs.write(changelog, scale, 0, files)
    table = _table(peer, changelog) + "_warm"
    _begin(table, warehouse)
    writer.open(table, changelog)
    writer.load(small.initial)
    writer.apply(small.batches)
    _read(readers, table, peer, small.marks[-1], scale)
    writer.leave()


def _of_case(
    writer: Writer,
    peer: Peer,
    changelog: Changelog,
    files: Files,
    scale: Scale,
    warehouse: Path,
    work: Path,
    readers: PythonProgram,
) -> Figures:
    table = _table(peer, changelog)
    location = _begin(table, warehouse)
    writer.open(table, changelog)
    figures: Figures = {"machine_seconds": [machine_seconds()], "marks": []}
    with PeakMemory(writer.pid) as memory, ExitStack() as stack:
        figures["load_seconds"] = writer.load(files.initial)
        # rowdelta's index is in its checkpoint's folder
        growth = stack.enter_context(FolderGrowth(location, _work_of(peer, work) / table / "state"))
        seconds: list[float] = []
        settled: list[float] = []
        cpu, written = 0.0, 0
        for mark in files.marks:
            cpu_before, written_before = _used(writer)
            seconds += writer.apply(files.batches[len(seconds) : mark.batch])
            settled.append(writer.settle())
            cpu_after, written_after = _used(writer)
            cpu += cpu_after - cpu_before
            written += written_after - written_before
            figures["marks"].append(_read(readers, table, peer, mark, scale))
            figures["machine_seconds"].append(machine_seconds())
    writer.leave()
    equal = readers.tell("compare", table=table, kind=kind_of(peer.format), expected=str(files.expected))["equal"]
    changes = sum(files.rows)
    shutil.rmtree(location, ignore_errors=True)
    return figures | {
        "equal": equal,
        "changes": changes,
        "rows": scale.rows,
        "seconds": seconds,
        "settle_seconds": settled,
        "cpu_seconds": cpu,
        "written_bytes": written,
        "table_bytes": sum(growth.files.values()),
        "bytes_of_kinds": kinds.bytes_of_kinds(growth.files),
        "memory_bytes": memory.bytes,
    }


def _work_of(peer: Peer, work: Path) -> Path:
    return work / f"writer-{PEERS.index(peer)}"


def _used(writer: Writer) -> tuple[float, int]:
    pids = tree(writer.pid)
    return cpu_seconds(pids), written_bytes(pids)


def _read(readers: PythonProgram, table: str, peer: Peer, mark: Mark, scale: Scale) -> Figures:
    """What readers pay, and whether what they read is right."""
    expected = [str(mark.totals.count), str(mark.totals.balance), str(mark.totals.version)]
    figures: Figures = {"batch": mark.batch}
    for reader in ("spark", "duckdb"):
        try:
            answer = readers.tell(reader, table=table, kind=kind_of(peer.format), ids=mark.ids, scans=scale.scans)
        except WriterError as error:
            figures[reader] = {"failed": str(error)[:300]}
            continue
        if "slow" in answer:
            figures[reader] = answer
            continue
        figures[reader] = {
            "first_scan": answer["scans"][0],
            "scan": statistics.median(answer["scans"]),
            "point": statistics.median(answer["points"]),
            "right": answer["totals"] == expected,
        }
        if answer["totals"] != expected:
            figures[reader] |= {"found": answer["totals"], "expected": expected}
    return figures


def _begin(table: str, warehouse: Path) -> Path:
    location = location_of(warehouse, table)
    shutil.rmtree(location, ignore_errors=True)
    return location


def _table(peer: Peer, changelog: Changelog) -> str:
    return f"p{PEERS.index(peer)}_{changelog.shape.replace('-', '_')}_{changelog.partitioning}"


def append(figures: Figures, path: Path) -> None:
    """Add a line to the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(figures) + "\n")
