"""`docs/benchmarks.md` and its plots, from the lines of figures that `python -m benchmarks.peers` left.

    python -m benchmarks.peers.report

The newest line of a case counts. So a part of the cases may be measured again, and a run that was ended in the middle
makes a page too. The page says in which run each case was measured, and how busy the machine was.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import OTHERS, OURS, drawn, folded, p99, report
from benchmarks.peers.cases import CHANGELOGS, PEERS, SCALES, SHAPES

Figures = dict[str, Any]

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results" / "peers.jsonl"
PAGE = _ROOT / "docs" / "benchmarks.md"
KEY_INDEX = _ROOT / "benchmarks" / "results" / "keyindex.md"
"""A table that is put into the page as it is, if it is there."""
_BUSY = 1.5
"""The machine was busy if the same piece of work took so many times as long as at its best."""
_BETTER = 0.9
"""Another peer is better than ours if its figure is below ours times this."""

_BEGIN = Path(__file__).with_name("page.md")
"""The text before the figures, with names in braces for what depends on them."""

_INDEX = """\
## The key index beside published figures

What Hudi's developers publish of its record index, against which `python -m benchmarks.keyindex` measures rowdelta's:
48 bytes a key on disk; about two minutes for a billion keys at each restart; 10 ms for a key that isn't cached.
"""


def write(results: Path, page: Path) -> None:
    """Write the page, and its plots into `images` beside it."""
    cases = newest(results)
    parts = [_BEGIN.read_text(encoding="utf-8").format(**_facts(cases))]
    parts += [_run(cases)]
    parts += [_changelog(of, page.parent / "images") for of in _tables(cases)]
    parts.append(_bytes(cases))
    parts.append(_losses(cases))
    parts.append(_left_out(cases))
    index = KEY_INDEX.read_text(encoding="utf-8") if KEY_INDEX.exists() else "rowdelta's figures are still to come.\n"
    parts += [f"{_INDEX}\n{index}"]
    page.write_text(folded("\n".join(part for part in parts if part)), encoding="utf-8")


def newest(results: Path) -> list[Figures]:
    """The last line of each case, in the order of the cases."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    by_case = {(figures["scale"], figures["changelog"], figures["peer"]): figures for figures in lines}
    names = [(scale, changelog.name, peer.name) for scale in SCALES for changelog in CHANGELOGS for peer in PEERS]
    return [by_case[name] for name in names if name in by_case]


def _tables(cases: Iterable[Figures]) -> list[list[Figures]]:
    """What was measured of each changelog at each scale."""
    tables: dict[str, list[Figures]] = {}
    for figures in _measured(cases):
        tables.setdefault(_changelog_of(figures), []).append(figures)
    return list(tables.values())


def _changelog_of(figures: Figures) -> str:
    return f"{figures['changelog']}, {figures['scale']}"


def _measured(cases: Iterable[Figures]) -> list[Figures]:
    return [figures for figures in cases if "seconds" in figures]


def _facts(cases: Sequence[Figures]) -> dict[str, str]:
    scales = []
    for name in dict.fromkeys(figures["scale"] for figures in cases):
        scale = SCALES[name]
        events = f"{scale.events:,} ({scale.events * 17 // 10:,})"
        scales.append(f"| {name} | {scale.rows:,} | {events} | {scale.marks[-1]} |")
    shapes = []
    for changelog in CHANGELOGS[:4]:
        shape = SHAPES[changelog.shape]
        inserts = 1 - shape.updates - shape.deletes
        keys = f"Zipf({shape.zipf})" if shape.zipf else "any, with the same chance"
        shapes.append(f"| {changelog.shape} | {shape.updates:.0%}, {shape.deletes:.0%}, {inserts:.0%} | {keys} |")
    return {
        "scales": "\n".join(scales),
        "shapes": "\n".join(shapes),
        "spark": ", ".join(sorted({figures["spark"] for figures in cases})),
    }


def _run(cases: Sequence[Figures]) -> str:
    measured = _measured(cases)
    if not measured:
        return ""
    best = _best_machine(measured)
    worst = max(max(figures["machine_seconds"]) for figures in measured)
    commits = sorted({figures["commit"] for figures in measured})
    days = sorted({figures["began"][:10] for figures in measured})
    text = (
        f"## The run\n\nMeasured on {', '.join(days)} at commit {', '.join(commits)}, in "
        f"{len({figures['began'] for figures in measured})} run(s), on two cores, local disk. "
        f"The same small piece of work took {best:.2f} s at best, and {worst:.2f} s at worst."
    )
    if worst > _BUSY * best:
        text += (
            " **The machine was busy with other work meanwhile**, so the column `machine` says how many times as long "
            "as at its best this piece of work took beside each case (the median). Compare figures only where it is "
            "alike; CPU time and bytes suffer least."
        )
    return f"{text}\n"


def _best_machine(measured: Sequence[Figures]) -> float:
    return min(float(min(figures["machine_seconds"])) for figures in measured)


def _changelog(measured: Sequence[Figures], images: Path) -> str:
    name = _changelog_of(measured[0])
    image = "benchmarks-{scale}-{shape}-{partitioning}.png".format_map(measured[0])
    _plot(measured, images / image)
    after = ", ".join(str(mark["batch"]) for mark in measured[0]["marks"])
    return "\n".join(
        [
            f"## {name[0].upper()}{name[1:]}\n",
            f"![Seconds of a micro-batch, and of a scan after each mark](images/{image})\n",
            "| peer | seconds a micro-batch: median, mean, p99 | rows/s | CPU ms per 1,000 rows "
            "| bytes a change: table, all | memory, MB | machine |",
            "|---|---|---:|---:|---|---:|---:|",
            *(_writes(figures, _best_machine(measured)) for figures in measured),
            "",
            f"Readers, after {after} micro-batches, in seconds:\n",
            "| peer | Spark: scan | look-up | DuckDB: scan | look-up |",
            "|---|---|---|---|---|",
            *(_reads(figures) for figures in measured),
            "",
        ]
    )


def bytes_by_kind(figures: Figures) -> str:
    """Bytes a change of each kind of file (`benchmarks.peers.kinds`)."""
    kinds = figures.get("bytes_of_kinds", {})
    return ", ".join(f"{kind} {size / figures['changes']:.1f}" for kind, size in kinds.items())


def _bytes(cases: Sequence[Figures]) -> str:
    rows = [
        f"| {_changelog_of(figures)} | {figures['peer']} | {told} |"
        for figures in _measured(cases)
        if (told := bytes_by_kind(figures))
    ]
    if not rows:
        return ""
    return "\n".join(
        [
            "## Where the bytes go\n",
            "Bytes a change of the files that came, also of those that are gone by now:\n",
            "| changelog | peer | bytes a change |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _writes(figures: Figures, best: float) -> str:
    changes = figures["changes"]
    equal = "" if figures["equal"] else " **differs from the source**"
    busy = statistics.median(figures["machine_seconds"]) / best
    seconds = ", ".join(f"{of(figures):.2f}" for of in (_median, _mean, _p99))
    return (
        f"| {figures['peer']}{equal} | {seconds} "
        f"| {changes / sum(figures['seconds']):,.0f} | {figures['cpu_seconds'] / changes * 1e6:,.0f} "
        f"| {figures['table_bytes'] / changes:,.0f}, {figures['written_bytes'] / changes:,.0f} "
        f"| {figures['memory_bytes'] / 1e6:,.0f} | {busy:.1f} |"
    )


def _median(figures: Figures) -> float:
    return float(statistics.median(figures["seconds"]))


def _mean(figures: Figures) -> float:
    return statistics.fmean(figures["seconds"])


def _p99(figures: Figures) -> float:
    return p99(figures["seconds"])


def _reads(figures: Figures) -> str:
    cells = [
        ", ".join(_read(mark[reader], query) for mark in figures["marks"])
        for reader in ("spark", "duckdb")
        for query in ("scan", "point")
    ]
    return f"| {figures['peer']} | {' | '.join(cells)} |"


def _read(found: Figures, query: str) -> str:
    if "failed" in found:
        return "no"
    if "slow" in found:
        return f"> {found['slow']}" if query == "scan" else "not tried"
    return f"{found[query]:.{2 if found[query] >= 0.1 else 3}f}" if found["right"] else "wrong"


def _last(reader: str, query: str) -> Callable[[Figures], float]:
    def of(figures: Figures) -> float:
        found = figures["marks"][-1][reader]
        return float(found[query]) if found.get("right") else float("inf")

    return of


_FIGURES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("median micro-batch", "s", _median),
    ("mean micro-batch", "s", _mean),
    ("slowest or p99 micro-batch", "s", _p99),
    ("CPU per 1,000 rows", "ms", lambda figures: figures["cpu_seconds"] / figures["changes"] * 1e6),
    ("bytes a change in the table", "B", lambda figures: figures["table_bytes"] / figures["changes"]),
    ("memory", "MB", lambda figures: figures["memory_bytes"] / 1e6),
    ("last scan, Spark", "s", _last("spark", "scan")),
    ("last look-up, Spark", "s", _last("spark", "point")),
    ("last scan, DuckDB", "s", _last("duckdb", "scan")),
    ("last look-up, DuckDB", "s", _last("duckdb", "point")),
)


def _losses(cases: Sequence[Figures]) -> str:
    """Where another peer of the same kind of table is better than rowdelta's default."""
    rows = []
    for of in _tables(cases):
        for ours in (each for each in of if each["program"] == "rowdelta" and each["deletes"] == "position"):
            for name, unit, figure in _FIGURES:
                better = [
                    other
                    for other in of
                    if other["program"] != "rowdelta"
                    and (other["format"] == "delta") == (ours["format"] == "delta")
                    and figure(other) < _BETTER * figure(ours)
                    and (unit != "s" or _alike(ours, other))
                ]
                if better:
                    told = "; ".join(f"{other['peer']}: {_number(figure(other))}" for other in better)
                    rows.append(
                        f"| {_changelog_of(ours)} | {ours['peer']} | {name}, {unit} | {_number(figure(ours))} "
                        f"| {told} |"
                    )
    if not _measured(cases):
        return ""
    if not rows:
        return "## Where we lose\n\nIn no case was another peer more than 10 % better than `deletes: position`.\n"
    return "\n".join(
        [
            "## Where we lose\n",
            "Every figure in which another peer is more than 10 % better than rowdelta's default, `deletes: position`, "
            "on the same kind of table. Of Iceberg's tables all versions are compared. "
            f"Seconds are compared only where the machine was alike: within a factor of {_BUSY}.\n",
            "| changelog | rowdelta | figure | rowdelta's | better |",
            "|---|---|---|---:|---|",
            *rows,
            "",
        ]
    )


def _alike(one: Figures, other: Figures) -> bool:
    """Whether the machine was equally busy."""
    ratio = float(statistics.median(one["machine_seconds"]) / statistics.median(other["machine_seconds"]))
    return 1 / _BUSY <= ratio <= _BUSY


def _number(value: float) -> str:
    if value == float("inf"):
        return "wrong, or refused"
    return f"{value:,.0f}" if value >= 20 else f"{value:.2f}"


def _left_out(cases: Sequence[Figures]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for figures in cases:
        for kind in ("skipped", "failed"):
            if kind in figures:
                reason = " ".join(figures[kind].split())[-300:].replace("|", "\\|")
                reasons.setdefault((figures["peer"], f"{kind}: {reason}"), []).append(_changelog_of(figures))
    if not reasons:
        return ""
    rows = [f"| {peer} | {'; '.join(of)} | {reason} |" for (peer, reason), of in reasons.items()]
    return "\n".join(["## What has no figures\n", "| peer | changelogs | why |", "|---|---|---|", *rows, ""])


def _plot(measured: Sequence[Figures], path: Path) -> None:
    with drawn(path, 1, 2, 11, 0.8 + 0.32 * len(measured)) as axes:
        left, right = axes[0]
        names = [figures["peer"] for figures in measured]
        colors = [OURS if figures["program"] == "rowdelta" else OTHERS for figures in measured]
        medians = [_median(figures) for figures in measured]
        left.barh(names, medians, color=colors)
        left.plot([_p99(figures) for figures in measured], names, "|", color="black", markersize=9)
        left.invert_yaxis()
        left.set_xlabel("seconds a micro-batch: median, and p99 (black)")
        for figures in measured:
            ours = figures["program"] == "rowdelta"
            right.plot(
                [mark["batch"] for mark in figures["marks"]],
                [_last_of(mark["spark"]) for mark in figures["marks"]],
                marker="o",
                markersize=3,
                linestyle="-" if ours else "--",
                label=figures["peer"],
            )
        right.set_yscale("log")
        right.set_xlabel("micro-batches")
        right.set_ylabel("seconds of a scan by Spark")
        right.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _last_of(found: Figures) -> float:
    return float(found["scan"]) if found.get("right") else float("nan")


if __name__ == "__main__":
    report("peers", __doc__, write, RESULTS, PAGE)
