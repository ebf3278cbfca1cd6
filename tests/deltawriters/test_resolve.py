"""What the driver finds out about rows that were moved."""

from pathlib import Path

import numpy as np
import pytest

from deltawriters import resolve
from deltawriters.keyindex import SUPERSEDES, Entries, IndexedFile, IndexSlice, write_run
from deltawriters.resolve import rows_superseded_meanwhile
from deltawriters.storage import file_io


@pytest.mark.parametrize("compared", [1, 7, 1000])
def test_moved_rows_are_compared_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: int) -> None:
    monkeypatch.setattr(resolve, "_COMPARED", compared)

    def index(name: str, keys: range, *files: str) -> IndexSlice:
        hashes = np.array(keys, np.uint64) << np.uint64(40)
        file = np.arange(len(keys), dtype=np.uint32) % len(files) | SUPERSEDES
        pos, named = np.array(keys, np.uint32), tuple(IndexedFile(path, 0, {}) for path in files)
        info = write_run(file_io(()), str(tmp_path), name, 1, Entries(hashes, hashes, file, pos, named))
        return IndexSlice(str(tmp_path), (), (info,), {})

    found = rows_superseded_meanwhile(index("moved", range(20), "a", "b"), index("newer", range(3, 99, 4), "c"))
    assert {old.file.path: sorted(old.positions.tolist()) for old in found} == {"b": [3, 7, 11, 15, 19]}
