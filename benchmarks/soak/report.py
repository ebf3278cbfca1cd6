"""`docs/soak.md` and its plots, from the samples that `python -m benchmarks.soak` left.

python -m benchmarks.soak.report
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import drawn, folded, report

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results" / "soak.jsonl"
PAGE = _ROOT / "docs" / "soak.md"
NOTES = RESULTS.with_name("soak.md")
"""What is known about the run, in words: it is put into the page if it is there. Who soaks again writes it anew."""
MOST_GROWTH = 1.1
_TEXT = Path(__file__).with_name("page.md")
_RUN = Path(__file__).with_name("run.md")

OF_TABLES = {
    "live_files": "live files",
    "all_files": "files in the table's folder",
    "metadata_bytes": "bytes of all metadata",
    "newest_metadata_bytes": "bytes of the newest metadata file",
    "index_bytes": "bytes of the index",
    "index_files": "files of the index",
    "batch_seconds": "seconds of a micro-batch",
    "commit_seconds": "seconds of a commit",
    "scan_seconds": "seconds of a scan",
}
OF_PROCESSES = {
    "driver_memory_bytes": "memory of the driver's Python",
    "jvm_memory_bytes": "memory of the JVM",
    "workers_memory_bytes": "memory of the Python workers",
    "driver_open_files": "open files of the driver's Python",
    "jvm_open_files": "open files of the JVM",
    "workers_open_files": "open files of the Python workers",
}


@dataclass(frozen=True)
class Growth:
    """A figure in the second and in the last tenth of the micro-batches: the medians of its samples."""

    second: float
    last: float

    @property
    def ratio(self) -> float:
        return self.last / self.second if self.second else 1.0 if not self.last else float("inf")

    @property
    def grows(self) -> bool:
        return self.ratio > MOST_GROWTH


class Soaked:
    """The lines of a soak.

    :param formats: those whose figures count. Another run has newer ones of the others.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], formats: Sequence[str]) -> None:
        self.lines, self.plan = lines, lines[0]
        self.samples = [line for line in lines if "tables" in line]
        self.compared = [line for line in lines if "compared" in line]
        self.formats = formats

    @property
    def titles(self) -> str:
        return ", ".join(map(_title, self.formats))

    def series(self, figure: str, name: str | None = None) -> list[tuple[int, float]]:
        """A figure of a table, or of the processes, by micro-batches. Those without a value are left out."""
        found = []
        for sample in self.samples:
            values = sample["processes"] if name is None else sample["tables"][name]
            value = values.get(figure)
            if figure == "live_files":
                value = sum(number for key, number in values.items() if key.startswith("live_"))
            if value is not None:
                found.append((int(sample["batch"]), float(value)))
        return found

    def growth(self, figure: str, name: str | None = None) -> Growth | None:
        """None if the soak hasn't got so far."""
        series, batches = self.series(figure, name), self.plan["batches"]
        second = [value for batch, value in series if 0.1 * batches < batch <= 0.2 * batches]
        last = [value for batch, value in series if batch > 0.9 * batches]
        return Growth(statistics.median(second), statistics.median(last)) if second and last else None


def runs(results: Path) -> list[Soaked]:
    """The runs of a file that have figures of a format that no later one has. Each begins with its plan."""
    runs = list[list[Mapping[str, Any]]]()
    for line in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        if "formats" in line:
            runs.append([])
        runs[-1].append(line)
    newest = {name: number for number, run in enumerate(runs) for name in run[0]["formats"]}
    found = [Soaked(run, [name for name in newest if newest[name] == number]) for number, run in enumerate(runs)]
    return [soaked for soaked in found if soaked.formats]


def keep_others(results: Path, formats: Sequence[str]) -> None:
    """Leave out the runs of a file of which a run of these formats leaves nothing."""
    if results.exists():
        kept = [soaked for soaked in runs(results) if not set(soaked.formats) <= set(formats)]
        lines = [line for soaked in kept for line in soaked.lines]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write(results: Path, page: Path) -> None:
    """Write the page, and its plots into `images` beside it."""
    told = [_told(soaked, page.parent / "images") for soaked in runs(results)]
    text = _TEXT.read_text(encoding="utf-8").format(
        notes=f"\n{NOTES.read_text(encoding='utf-8')}" if NOTES.exists() and results == RESULTS else "",
        runs="\n".join(told).rstrip(),
    )
    page.write_text(folded(text), encoding="utf-8")


def _told(soaked: Soaked, images: Path) -> str:
    """A run's part of the page."""
    plan = soaked.plan
    done = max((line["batch"] for line in soaked.compared), default=0)
    wrong = [
        f"{name} after {line['batch']:,}"
        for line in soaked.compared
        for name in soaked.formats
        if line["compared"][name]
    ]
    equal = (
        f"The tables were equal to the source at {len(soaked.compared)} of {len(soaked.compared)} points."
        if not wrong
        else f"**These differed from the source: {'; '.join(wrong)}.**"
    )
    if done < plan["batches"]:
        equal += f" The run ended after {done:,} micro-batches."
    machine = [sample["machine_seconds"] for sample in soaked.samples]
    for name in soaked.formats:
        _plot(soaked, OF_TABLES, name, images / f"soak-{name}.png")
    plot = f"soak-processes-{'-'.join(soaked.formats)}.png"
    _plot(soaked, OF_PROCESSES, None, images / plot)
    return _RUN.read_text(encoding="utf-8").format(
        titles=soaked.titles,
        batches=f"{plan['batches']:,}",
        events=f"{plan['events']:,}",
        keys=f"{plan['keys']:,}",
        starts=soaked.compared[-1]["starts"] if soaked.compared else 0,
        commit=plan["commit"],
        began=plan["began"][:10],
        equal=equal,
        machine=f"{min(machine):.2f} to {max(machine):.2f}" if machine else "unknown",
        tables="\n\n".join(_table(soaked, name) for name in soaked.formats),
        processes="\n".join(_rows(soaked, OF_PROCESSES, None)),
        plot=plot,
    )


def _title(name: str) -> str:
    return "Delta Lake" if name == "delta" else f"Iceberg {name}"


def _table(soaked: Soaked, name: str) -> str:
    title = _title(name)
    rows = "\n".join(_rows(soaked, OF_TABLES, name))
    return (
        f"### {title}\n\n| figure | second tenth | last tenth | ratio | at most {MOST_GROWTH} |\n"
        f"|---|---:|---:|---:|---|\n{rows}\n\n![Figures of {title} by micro-batches](images/soak-{name}.png)"
    )


def _rows(soaked: Soaked, figures: Mapping[str, str], name: str | None) -> list[str]:
    rows = []
    for figure, words in figures.items():
        growth = soaked.growth(figure, name)
        if growth is None:
            rows.append(f"| {words} | | | | not known |")
        elif growth.second or growth.last:
            verdict = "no: it grows" if growth.grows else "yes"
            shown = [_number(value, figure) for value in (growth.second, growth.last)]
            rows.append(f"| {words} | {shown[0]} | {shown[1]} | {growth.ratio:.2f} | {verdict} |")
    return rows


def _number(value: float, figure: str) -> str:
    if figure.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    return f"{value:.3f}" if figure.endswith("_seconds") else f"{value:,.0f}"


def _plot(soaked: Soaked, figures: Mapping[str, str], name: str | None, path: Path) -> None:
    shown = {figure: words for figure, words in figures.items() if any(v for _, v in soaked.series(figure, name))}
    columns = 3
    rows = max(1, -(-len(shown) // columns))
    with drawn(path, rows, columns, 10, 2 * rows) as axes:
        for axis in axes.flat[len(shown) :]:
            axis.set_visible(False)
        for axis, (figure, words) in zip(axes.flat, shown.items(), strict=False):
            series = soaked.series(figure, name)
            scale = 1e6 if figure.endswith("_bytes") else 1
            axis.plot([batch for batch, _ in series], [value / scale for _, value in series], linewidth=0.8)
            axis.set_title(f"{words}, MB" if scale > 1 else words, fontsize=8)
            axis.set_ylim(bottom=0)


if __name__ == "__main__":
    report("soak", __doc__, write, RESULTS, PAGE)
