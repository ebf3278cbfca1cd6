"""What a table knows of its load from a database: how it is divided, and how far it has got."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from sink.sources.source import Position
from sink.targets.seam import TableView

LOAD = "load"
"""Part of a sink's state: the `Load`."""
LOADED = "loaded"
"""Part of a sink's state that a commit of a load stores: the `Loaded`."""
MARGIN = 600.0
"""Seconds. Clocks differ by less, and a connector has a change less long before other sessions of the database do."""


def times_before() -> dict[str, Any]:
    """What rows that are read from now on have for times in `order_by`: they are before those of all changes that the
    rows may lack, whatever the clock of the database says.
    """
    millis = int((time.time() - MARGIN) * 1000)
    return {"source.ts_ms": millis, "ts_ms": millis, "source.ts_us": millis * 1000}


@dataclass(frozen=True)
class Load:
    """What was decided before the first part of the source's table was read.

    :param parts: conditions in SQL that divide the source's table, in the order in which they are loaded. None after
        the load: they have values of keys.
    :param count: how many parts there are.
    :param estimated: about how many rows the source's table had.
    :param files: what the parts depend on (`sink.table.loading.SourceTable.files`).
    :param begin: where the topic ended then. All that is before it was committed before the first part was read.
    :param order: what the rows have for names in `order_by` that are no columns of the source's table.
    :param until: the position at which the table is equal to the source. None until all parts are there.
    """

    parts: tuple[str, ...]
    count: int
    estimated: int
    files: str
    begin: Position
    order: Mapping[str, Any]
    until: Position | None = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        return cls(**(found | {"parts": tuple(found["parts"])}))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Loaded:
    """How far a load has got.

    :param parts: how many parts are in the table.
    :param rows: how many rows they had.
    """

    parts: int
    rows: int

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def load_of(table: TableView, prefix: str) -> tuple[Load, Loaded] | None:
    """The load that a table has had, and how far it has got. None if there was none.

    :param prefix: `rowdelta.<sink id>`.
    """
    text, loaded = table.property(f"{prefix}.{LOAD}"), table.property(f"{prefix}.{LOADED}")
    return None if text is None else (Load.from_json(text), Loaded.from_json(loaded) if loaded else Loaded(0, 0))


def stage_of(
    load: Load, loaded: Loaded, position: Position | None, is_ahead: Callable[[Position, Position], bool]
) -> str:
    """How far a load is, for people.

    :param position: the table's.
    :param is_ahead: see `Source.is_ahead`.
    """
    if loaded.parts < load.count:
        return f"loading, {100 * loaded.parts // load.count} %"
    return "catching up" if load.until is None or is_ahead(load.until, position or {}) else "equal"
