"""Bytes by kind: the names of the files that rowdelta and Iceberg write."""

from pathlib import Path

import pytest

from benchmarks.peers.kinds import bytes_of_kinds

MOVES, CHANGES, MERGES = "1" * 16, "2" * 16, "3" * 32


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"data/00000-4-{CHANGES}-00001.parquet", "changed rows"),
        (f"data/day=1/00000-4-{MOVES}-00001.parquet", "moved rows"),
        ("data/00000-0-8f14e45f-ceea-467f-a8a5-7d3c2f0b1a11-0-00001.parquet", "changed rows"),
        (f"data/{CHANGES}-7-8f14-deletes.puffin", "deletes"),
        ("data/00000-0-8f14e45f-ceea-467f-a8a5-7d3c2f0b1a11-0-00001-deletes.parquet", "deletes"),
        ("deletion_vector_8f14e45f.bin", "deletes"),
        ("metadata/v2.metadata.json", "metadata"),
        ("_delta_log/00000000000000000001.json", "metadata"),
        ("_delta_log/_sidecars/8f14.parquet", "metadata"),
        (f"index/t/runs/{CHANGES}-44-00000", "key index: changed rows"),
        (f"index/t/runs/{MERGES}-0-60-0", "key index: merged runs"),
        (f"index/t/runs/{CHANGES}-44-00000-merged-0", "key index: merged runs"),
        ("index/t/versions/v.json", "key index: versions"),
        ("offsets/1", "checkpoint"),
    ],
)
def test_a_file_is_of_a_kind(path: str, kind: str) -> None:
    run_of_moved_rows = Path(f"index/t/runs/{MOVES}-00000-62-0")
    assert bytes_of_kinds({Path(path): 3, run_of_moved_rows: 5}) == {"key index: moved rows": 5, kind: 3}
