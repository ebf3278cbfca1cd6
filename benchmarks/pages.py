"""What pages that are made of figures share: plots, and lines that fit. Matplotlib is imported when something is drawn:
only those who draw need it.
"""

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS, OTHERS = "#1f6fb4", "#b0b0b0"
_SETTINGS: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


@contextmanager
def drawn(path: Path, rows: int, columns: int, width: float, height: float) -> Iterator[Any]:
    """Yield the axes of a picture, in rows, and write it when this context ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_SETTINGS):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        # without the time of writing: the same figures give the same bytes
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def p99(seconds: Sequence[float]) -> float:
    """By the nearest rank: the slowest, of fewer than a hundred."""
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def folded(text: str, width: int = 120) -> str:
    """The text with its long lines folded, but for rows of tables and pictures."""

    def fold(line: str) -> str:
        if len(line) <= width or line.startswith(("|", "!")):
            return line
        indent = "  " if line.startswith("- ") else ""
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(fold(line) for line in text.split("\n"))


def report(name: str, description: str, write: Callable[[Path, Path], object], results: Path, page: Path) -> None:
    """The command that makes a page of figures.

    :param name: of the package that has them.
    :param write: makes the second, the page, of the first, the results.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}.report", description=description.splitlines()[0]
    )
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--page", type=Path, default=page)
    options = parser.parse_args()
    write(options.results, options.page)
