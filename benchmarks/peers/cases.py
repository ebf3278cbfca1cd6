"""The cases as data: who writes, what is written, and how much."""

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.workload import Shape

Program = Literal["rowdelta", "merge", "flink"]
Format = Literal["v2", "v3", "delta"]
Partitioning = Literal["plain", "day", "bucket"]

BUCKETS = 8
_MANY = 100
"""So many micro-batches of all peers take an hour and more: only the first changelog has them."""
DAYS = 20
"""The rows of the first load were last changed within so many days."""


@dataclass(frozen=True)
class Peer:
    """Who writes a table, and how.

    :param deletes: rowdelta's key of this name; of others the mode in which they write.
    :param maintenance: of Flink's sink: the name of the task that it runs beside the writes.
    """

    program: Program
    format: Format
    deletes: str
    maintenance: str = ""

    @property
    def name(self) -> str:
        program = {"rowdelta": "rowdelta", "merge": "MERGE INTO", "flink": "Flink"}[self.program]
        kind = "Delta" if self.format == "delta" else self.format
        return f"{program} {kind} {self.deletes}{f' + {self.maintenance}' if self.maintenance else ''}"


@dataclass(frozen=True)
class Changelog:
    """What is written: its shape, and how the table is partitioned."""

    shape: str
    partitioning: Partitioning

    @property
    def name(self) -> str:
        return f"{self.shape}, {PARTITIONINGS[self.partitioning]}"


@dataclass(frozen=True)
class Scale:
    """How much.

    :param rows: of the first load.
    :param events: of a micro-batch.
    :param marks: the micro-batches after which the table is read and compared with the source.
    :param scans: how often each query is run at a mark.
    :param warm: whether a peer writes a small table first.
    """

    rows: int
    events: int
    marks: tuple[int, ...]
    scans: int = 5
    warm: bool = True


PEERS = (
    Peer("rowdelta", "v2", "position"),
    Peer("rowdelta", "v2", "equality"),
    Peer("rowdelta", "v2", "copy-on-write"),
    Peer("rowdelta", "v3", "position"),
    Peer("rowdelta", "v3", "equality"),
    Peer("rowdelta", "v3", "copy-on-write"),
    Peer("rowdelta", "delta", "position"),
    Peer("rowdelta", "delta", "copy-on-write"),
    Peer("merge", "v2", "merge-on-read"),
    Peer("merge", "v2", "copy-on-write"),
    Peer("merge", "v3", "merge-on-read"),
    Peer("merge", "v3", "copy-on-write"),
    Peer("merge", "delta", "merge-on-read"),
    Peer("merge", "delta", "copy-on-write"),
    Peer("flink", "v2", "upsert"),
    Peer("flink", "v2", "upsert", "rewrite"),
)

SHAPES = {
    "skewed": Shape(),
    "uniform": Shape(zipf=0.0),
    "append-mostly": Shape(updates=0.05, deletes=0.01),
    "delete-heavy": Shape(updates=0.3, deletes=0.5),
}
"""What is not an update or a delete is an insert. `skewed` draws keys from Zipf(1.1), as the last two do."""

PARTITIONINGS: dict[Partitioning, str] = {
    "plain": "not partitioned",
    "day": "by the day of the last change",
    "bucket": f"bucket({BUCKETS}, id)",
}

CHANGELOGS = (
    *(Changelog(shape, "plain") for shape in SHAPES),
    Changelog("skewed", "day"),
    Changelog("skewed", "bucket"),
)

SCALES = {
    "tiny": Scale(rows=2_000, events=200, marks=(1, 2), scans=1, warm=False),
    "small": Scale(rows=200_000, events=10_000, marks=(1, 5, 20, 100)),
    "large": Scale(rows=2_000_000, events=100_000, marks=(20,), scans=3),
}


def refused(peer: Peer, changelog: Changelog) -> str:
    """Why there is no such case. Empty if there is one."""
    if peer.format == "delta" and changelog.partitioning == "bucket":
        return "Delta Lake has no buckets"
    return ""


def scale_of(changelog: Changelog, scale: Scale) -> Scale:
    """The scale as far as it goes for a changelog: see `_MANY`."""
    if changelog == CHANGELOGS[0]:
        return scale
    return replace(scale, marks=tuple(mark for mark in scale.marks if mark < _MANY))


def shape_of(changelog: Changelog, scale: Scale) -> Shape:
    """The shape, with `updated_at` such that the first load spans `DAYS` days."""
    shape = SHAPES[changelog.shape]
    return Shape(shape.updates, shape.deletes, shape.zipf, DAYS * 86_400_000_000 // scale.rows)
