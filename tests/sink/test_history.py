"""A table's commits, read from its metadata, and the state that a position, a time or an id stands for."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sink.errors import ConfigError, TableError
from sink.targets.iceberg.history import IcebergHistory

SECOND = 1_000
NOON = 1_767_268_800_000  # 2026-01-01 12:00 UTC


def snapshot(number: int, position: Any = None, parent: int | None = None, **summary: Any) -> dict[str, Any]:
    """Snapshot `number`, made `number` seconds after noon; by the sink `shop` if it has a position."""
    said = {"operation": "overwrite"} | {name.replace("_", "-"): str(value) for name, value in summary.items()}
    if position is not None:
        stored = {"position": position, "operation": f"op{number}"}
        said |= {"rowdelta.sink-id": "shop", "rowdelta.shop.position": json.dumps(stored)}
    made = {"snapshot-id": number, "sequence-number": number, "timestamp-ms": NOON + number * SECOND, "summary": said}
    return made if parent is None else made | {"parent-snapshot-id": parent}


def history(
    *snapshots: dict[str, Any],
    properties: Mapping[str, str] | None = None,
    current: int = 0,
    position_in: Callable[[int], Any] = lambda _: None,
) -> IcebergHistory:
    metadata = {
        "current-snapshot-id": current or snapshots[-1]["snapshot-id"],
        "snapshots": list(snapshots),
        "snapshot-log": [{"snapshot-id": s["snapshot-id"], "timestamp-ms": s["timestamp-ms"]} for s in snapshots],
        "properties": dict(properties or {}),
    }
    return IcebergHistory("lake.shop.orders", metadata, "shop", position_in)


CHAIN = history(
    snapshot(1, {"0": 10}),
    snapshot(2, {"0": 20, "1": 5}, parent=1, added_data_files=2, added_records=7, removed_delete_files=1),
    snapshot(3, parent=2, engine_name="spark", engine_version="4.0.2", app_id="local-1"),
    snapshot(4, {"0": 30, "1": 9}, parent=3),
    properties={"rowdelta.shop.start": json.dumps({"0": 3})},
)


def test_commits_have_their_positions_and_authors() -> None:
    shown = [(c.snapshot_id, c.by, c.begin, c.end, c.position) for c in CHAIN.commits]
    assert shown == [
        (4, "sink shop", {"0": 20, "1": 5}, {"0": 30, "1": 9}, {"0": 30, "1": 9}),
        (3, "spark 4.0.2 (local-1)", None, None, {"0": 20, "1": 5}),
        (2, "sink shop", {"0": 10}, {"0": 20, "1": 5}, {"0": 20, "1": 5}),
        (1, "sink shop", {"0": 3}, {"0": 10}, {"0": 10}),
    ]
    assert list(CHAIN.commits[2].lines()) == [
        "2026-01-01 12:00:02 UTC  snapshot 2  overwrite by sink shop",
        '  position: {"0": 20, "1": 5} (before: {"0": 10})',
        "  files:    +2 data files, -1 delete file with 7 rows",
    ]


@pytest.mark.parametrize(
    ("wanted", "found", "later"),
    [
        ({"0": 10}, 1, 2),
        ({"0": 19}, 1, 2),
        ({"0": 20}, 3, 4),  # another program's commit after it has the same position
        ({"0": 25, "1": 5}, 3, 4),
        ({"0": 25, "1": 4}, 1, 2),  # ahead of snapshot 2 in one partition and behind it in the other
        ({"1": 5}, 3, 4),  # partition 0 may be anywhere
        ({"0": 1000}, 4, None),
    ],
)
def test_the_newest_snapshot_that_is_not_past_a_position(wanted: dict[str, int], found: int, later: int | None) -> None:
    commit, after = CHAIN.at_position(wanted)
    assert (commit.snapshot_id, after and after.snapshot_id) == (found, later)


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ({"0": 9}, TableError, r'before the first one that is known, \{"0": 10\} of snapshot 1 .*held nothing'),
        ({"7": 1}, ConfigError, r"the next offset by partition \(0, 1\)"),
        ({"0": "x"}, ConfigError, "expected the next offset by partition"),
        ({}, ConfigError, "expected the next offset by partition"),
    ],
)
def test_a_position_that_no_snapshot_has(wanted: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CHAIN.at_position(wanted)


def test_expired_snapshots_are_named() -> None:
    left = history(*[s for s in CHAIN._metadata["snapshots"] if s["snapshot-id"] > 1])
    assert left.has_expired
    assert left.commits[-1].begin is None
    assert "the commit before has expired" in "\n".join(left.commits[-1].lines())
    with pytest.raises(TableError, match="older snapshots have expired"):
        left.at_position({"0": 10})
    with pytest.raises(TableError, match=r"made at 2026-01-01 12:00:02 UTC; older snapshots have expired"):
        left.at_time(NOON + SECOND)
    with pytest.raises(TableError, match=r"no snapshot 1; it has expired.*4, 3, 2"):
        left.check_version(1)


def test_the_sinks_last_commit_has_expired() -> None:
    """The table may still know its position."""
    left = history(snapshot(3, parent=2), snapshot(4, parent=3), position_in={3: {"0": 20}}.get)
    assert [c.position for c in left.commits] == [{"0": 20}, {"0": 20}]
    left = history(snapshot(3, parent=2))
    assert [c.position for c in left.commits] == [None]
    with pytest.raises(TableError, match="no snapshot that is left has a position"):
        left.at_position({"0": 20})


def test_a_rolled_back_snapshot_is_no_commit_but_was_once_current() -> None:
    rolled_back = history(snapshot(1, {"0": 10}), snapshot(2, {"0": 20}, parent=1), current=1)
    assert [c.snapshot_id for c in rolled_back.commits] == [1]
    assert rolled_back.at_position({"0": 20})[0].snapshot_id == 1
    assert rolled_back.at_time(NOON + 2 * SECOND) == 2
    assert rolled_back.check_version(2) == 2


def test_positions_of_files() -> None:
    """The time of the newest file decides, and if it is the same, the names."""
    first, second = {"modified": 5, "files": ["a"]}, {"modified": 7, "files": ["b", "c"]}
    files = history(snapshot(1, first), snapshot(2, second, parent=1))
    found = [files.at_position(wanted)[0].snapshot_id for wanted in ({"modified": 6}, {"modified": 7})]
    assert found == [1, 2]
    assert files.at_position({"modified": 7, "files": ["b"]})[0].snapshot_id == 1
    with pytest.raises(ConfigError, match="milliseconds since 1970"):
        files.at_position({"0": 1})
