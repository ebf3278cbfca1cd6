"""The search for small files of an Iceberg table, which two threads use; and which of them are merged."""

from typing import Any
from unittest.mock import Mock

import pytest

from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from sink.table import minor_compaction
from sink.targets.iceberg.small_files import SmallFiles
from sink.targets.scan_costs import V3
from sink.targets.upkeep_values import Mergeable, MergeCandidates


def test_what_is_read_beside_the_stream_is_not_known_under_another_partitioning() -> None:
    """Else files would be merged in partitions of the new spec by values of the old one."""
    snapshot, table = Mock(), Mock()
    snapshot.snapshotId.return_value = snapshot.sequenceNumber.return_value = 7
    table.summary.return_value = {}
    table.as_list.return_value = table.described_files.return_value = []
    small = SmallFiles(table)
    looking = False

    def search(spec: Any) -> None:
        table.java.currentSnapshot.return_value = None
        small.search(spec, "rowdelta.shop", lambda commits, files: False)
        table.java.currentSnapshot.return_value = snapshot

    class Spec:
        current_spec_id = 0
        current_spec = Mock(fields=[])

        @property
        def format_version(self) -> int:
            if looking:  # at this moment the stream's thread follows a change of the spec
                search(Mock(current_spec_id=1, format_version=2))
            return 2

    spec: Any = Spec()
    search(spec)
    looking = True
    small.look_at_last(spec, "rowdelta.shop")
    assert small._known == ((1, 2), {})


MB = 1024 * 1024


@pytest.mark.parametrize(
    ("sizes", "order", "merged"),
    [
        ([15] * 4, None, [15] * 4),
        ([2] * 16 + [17], None, [2] * 16),
        ([17] * 4, None, None),
        ([17] * 4, Mock(), [17] * 4),
    ],
    ids=["small", "a large one beside small ones", "large", "large, in an order"],
)
def test_files_are_merged_while_they_are_small(sizes: list[int], order: Any, merged: list[int] | None) -> None:
    files = [
        Mergeable("{}", DataFile(IndexedFile(f"data/{number}", 0, {}), size * MB), number)
        for number, size in enumerate(sizes)
    ]
    opened = Mock()
    opened.plan.order, opened.spec.target_file_size = order, 128 * MB
    opened.table.upkeep().merge_candidates.return_value = MergeCandidates(4, 16, 16, 0, {"{}": files}, {}, set())
    opened.table.upkeep().scan_costs = V3
    chosen = minor_compaction.SmallFiles(opened).choose(())
    found = chosen and [file.size_in_bytes // MB for group in chosen.groups for file in group.files]
    assert found == merged
