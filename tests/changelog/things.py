"""A table of things, as tests of several formats have it."""

from decimal import Decimal
from typing import Any

from tests.changelog.messages import Decoded

COLUMNS = {"id": "int", "title": "string", "weight": "decimal(8,3)", "shelf": "string"}


def row(number: int, **values: Any) -> dict[str, Any]:
    """A thing that is in the table."""
    return {"id": number, "title": "lamp", "weight": Decimal("0.750"), "shelf": "a1"} | values


def removal(number: int, **values: Any) -> dict[str, Any]:
    """A row that removes a thing: all but the key and what partitions derive from is null."""
    return dict.fromkeys(COLUMNS) | {"id": number} | values


def brief(found: list[Decoded]) -> list[tuple[int | None, int | None, str, dict[str, Any]]]:
    """Offset, half, kind and columns of good rows. Fails if there is a bad one."""
    assert [d.error for d in found if d.error] == []
    return [(d.offset, d.half, d.kind, d.row) for d in found]
