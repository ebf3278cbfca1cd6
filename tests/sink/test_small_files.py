"""The search for small files of an Iceberg table, which two threads use."""

from typing import Any
from unittest.mock import Mock

from sink.targets.iceberg.small_files import SmallFiles


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
