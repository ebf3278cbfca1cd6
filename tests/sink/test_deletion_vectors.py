"""The log of deletion vectors against a dictionary, and how much of it a version writes."""

import json
from random import Random

import pytest

from deltawriters.keyindex import vector_log as deletion_vectors
from deltawriters.keyindex.vector_log import DeletionVectors, Vector
from deltawriters.keyindex.versions import IndexLostError, IndexVersion


def vector(number: int) -> Vector:
    return {"referenced-data-file": f"data/{number}", "record-count": number}


@pytest.mark.parametrize("inline", [0, 4, 64])
def test_any_history_is_found_again(monkeypatch: pytest.MonkeyPatch, inline: int) -> None:
    monkeypatch.setattr(deletion_vectors, "_INLINE", inline)
    random = Random(7)
    expected: dict[str, Vector] = {}
    files: dict[str, bytes] = {}
    log = DeletionVectors()
    for step in range(300):
        paths = [f"data/{random.randrange(60)}" for _ in range(random.choice([0, 1, 2, 9, 40]))]
        changes = {path: vector(step) if random.random() < 0.7 else None for path in paths}
        log = log.changed(changes).stored(f"v{step}", files.__setitem__)
        expected = {path: found for path, found in (expected | changes).items() if found is not None}
        if random.random() < 0.3:  # another run
            log = DeletionVectors.from_json(json.loads(json.dumps(log.to_json())), files.__getitem__)
        assert {path: log.get(path) for path in map("data/{}".format, range(60)) if log.get(path)} == expected
        assert set(log.files) <= files.keys()


def test_a_version_writes_what_changed_and_not_what_the_table_holds() -> None:
    """100,000 data files with a vector, of which each of 200 commits changes 50."""
    random = Random(7)
    written: list[int] = []
    log = DeletionVectors().changed({f"data/{n}": vector(n) for n in range(100_000)})
    log = log.stored("first", lambda name, content: written.append(len(content)))
    (whole,) = written
    written.clear()
    manifests = 0
    for step in range(200):
        changes = {f"data/{random.randrange(100_000)}": vector(step) for _ in range(50)}
        log = log.changed(changes).stored(f"v{step}", lambda name, content: written.append(len(content)))
        manifests += len(json.dumps(log.to_json()))
    assert (sum(written) + manifests) / 200 < whole / 100
    assert len(log.parts) <= 12


def test_a_manifest_that_is_damaged_or_of_another_format_is_not_read() -> None:
    """An index can be built again from the table."""
    files: dict[str, bytes] = {}
    vectors = DeletionVectors().changed({"data/1": vector(1)}).stored("v", files.__setitem__)
    version = IndexVersion("3 0a 0b: 1 long; v3", sequence=7, vectors=vectors)
    text = version.to_json()
    read = IndexVersion.from_json(text, files.__getitem__)
    assert (read.bases, read.sequence, read.vectors.get("data/1")) == ((10, 11), 7, vector(1))
    with pytest.raises(IndexLostError, match="damaged"):
        IndexVersion.from_json(text[:-1], files.__getitem__)
    assert read.is_encoded("1 long; v3")
    for earlier in ("1: 1 long; v3", "2 0a: 1 long; v3"):
        assert not IndexVersion(earlier).is_encoded("1 long; v3"), "their hashes were others"
    with pytest.raises(IndexLostError, match="of another format"):
        IndexVersion.from_json(text.replace(b'"format": 3', b'"format": 1'), files.__getitem__)
    assert IndexVersion.from_json(text.replace(b'"format": 3', b'"format": 2'), files.__getitem__) == read
