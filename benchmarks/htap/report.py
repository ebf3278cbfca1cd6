"""`docs/htap.md` and its plot, from the samples that `python -m benchmarks.htap` left.

python -m benchmarks.htap.report
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import drawn, folded, report

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results" / "htap.jsonl"
PAGE = _ROOT / "docs" / "htap.md"
MOST_GROWTH = 1.1
_TEXT = Path(__file__).with_name("page.md")

Sample = Mapping[str, Any]
Figure = Callable[[Sequence[Sample]], float]
"""Of some samples that follow each other."""


def write(results: Path, page: Path) -> None:
    """Write the page, and its plot into `images` beside it."""
    plan, *samples, end = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    wrong = [f"{name}: {'; '.join(found)}" for name, found in end["compared"].items() if found]
    equal = "**" + "; ".join(wrong) + "**" if wrong else "all tables were equal to the source at the end."
    _plot(plan, samples, page.parent / "images" / "htap.png")
    text = _TEXT.read_text(encoding="utf-8").format(
        rate=f"{plan['rate']:,}",
        minutes=f"{plan['seconds'] / 60:,.0f}",
        titles=" and ".join("a Delta table" if name == "delta" else f"an Iceberg {name}" for name in plan["formats"]),
        read_every=plan["read_every"],
        stock=f"{plan['stock']:,}",
        rows=f"{end['rows']:,}",
        compare_every=plan["compare_every"],
        most=MOST_GROWTH,
        commit=plan["commit"],
        began=plan["began"],
        equal=equal,
        table="\n".join(_table(plan, samples)),
        compacted="\n".join(_compacted(plan, samples)),
    )
    page.write_text(folded(text), encoding="utf-8")


def _figures(plan: Sample) -> Iterator[tuple[str, str, Figure]]:
    """Name, unit and value of each row of the table."""
    for name in plan["formats"]:
        for percent in (50, 99):
            yield f"{name}: age of a change, p{percent}", "s", _age(name, percent)
        for query in ("spark scan", "spark point", "duckdb scan", "duckdb point"):
            yield f"{name}: {query}", "s", _seconds(f"{query} {name}")
        yield f"{name}: data files", "", _data_files(name)
        yield f"{name}: bytes written for a change", "B", _bytes(plan, name)
    yield "index: bytes written for a change", "B", _bytes(plan, "index")
    for group in ("driver", "jvm", "workers"):
        yield f"memory, {group}", "MB", _memory(group)
    yield "machine: the same piece of work", "ms", _machine


def _age(name: str, percent: int) -> Figure:
    def age(samples: Sequence[Sample]) -> float:
        found = [age for sample in samples for age in sample["ages"][name]]
        return float(np.percentile(found, percent)) if found else np.nan

    return age


def _seconds(query: str) -> Figure:
    return lambda samples: statistics.median(sample["seconds"][query] for sample in samples)


def _data_files(name: str) -> Figure:
    return lambda samples: statistics.median(sample["live"][name]["live_data_files"] for sample in samples)


def _bytes(plan: Sample, name: str) -> Figure:
    def written(samples: Sequence[Sample]) -> float:
        seconds = sum(sample["since"] for sample in samples)
        return float(sum(sample["written"][name] for sample in samples) / plan["rate"] / seconds)

    return written


def _memory(group: str) -> Figure:
    return lambda samples: statistics.median(sample["processes"][f"{group}_memory_bytes"] / 1e6 for sample in samples)


def _machine(samples: Sequence[Sample]) -> float:
    return float(statistics.median(sample["machine_seconds"] * 1000 for sample in samples))


def _table(plan: Sample, samples: Sequence[Sample]) -> Iterator[str]:
    yield f"| figure | second sixth | last sixth | ratio | at most {MOST_GROWTH} |"
    yield "|---|---:|---:|---:|---|"
    sixth = len(samples) // 6
    parts = samples[sixth : 2 * sixth], samples[-sixth:]
    for name, unit, value in _figures(plan):
        second, last = map(value, parts)
        ratio = last / second if second else 1.0
        shown = [f"{found:,.2f}" if unit == "s" else f"{found:,.0f}" for found in (second, last)]
        cells = " | ".join(f"{each} {unit}".strip() for each in shown)
        yield f"| {name} | {cells} | {ratio:.2f} | {'yes' if ratio <= MOST_GROWTH else 'no'} |"


def _compacted(plan: Sample, samples: Sequence[Sample]) -> Iterator[str]:
    yield "Scans by Spark, as multiples of that of the compacted copy, in order of time:\n"
    for name in plan["formats"]:
        found = [sample["beside_compacted"][name] for sample in samples if "beside_compacted" in sample]
        yield f"- {name}: {', '.join(f'{ratio:.2f}' for ratio in found)}"


def _plot(plan: Sample, samples: Sequence[Sample], path: Path) -> None:
    shown = {
        "age of a change, p99, s": {name: _age(name, 99) for name in plan["formats"]},
        "scan by Spark, s": {name: _seconds(f"spark scan {name}") for name in plan["formats"]},
        "scan by DuckDB, s": {name: _seconds(f"duckdb scan {name}") for name in plan["formats"]},
        "data files": {name: _data_files(name) for name in plan["formats"]},
        "bytes written for a change": {name: _bytes(plan, name) for name in (*plan["formats"], "index")},
        "memory, MB": {group: _memory(group) for group in ("driver", "jvm", "workers")},
    }
    minutes = [sample["second"] / 60 for sample in samples]
    with drawn(path, 2, 3, 10, 4) as axes:
        for axis, (title, figures) in zip(axes.flat, shown.items(), strict=True):
            for name, value in figures.items():
                axis.plot(minutes, [value([sample]) for sample in samples], linewidth=0.8, label=name)
            axis.set_title(title, fontsize=8)
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=6)


if __name__ == "__main__":
    report("htap", __doc__, write, RESULTS, PAGE)
