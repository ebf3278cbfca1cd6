"""What files cost in an object store: its requests, counted by a proxy."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from pyiceberg.io import FileIO

from deltawriters.keyindex import Entries, IndexedFile, open_run, runs, write_run
from deltawriters.storage import file_io
from tests.stack.counting import CountingProxy, counted, counting, s3_operation
from tests.stack.s3 import S3, running_s3


@pytest.fixture(scope="module")
def store() -> Iterator[CountingProxy]:
    with running_s3() as s3, counting(s3.endpoint) as proxy:
        yield proxy


def reached(store: CountingProxy) -> FileIO:
    return file_io(
        (
            ("s3.endpoint", store.uri),
            ("s3.access-key-id", S3.KEY),
            ("s3.secret-access-key", S3.SECRET),
            ("s3.region", "us-east-1"),
        )
    )


@pytest.mark.parametrize(
    ("size", "requests"),
    [
        (0, {"Put": 1}),
        (5_000_000, {"Put": 1}),
        (21_000_000, {"UploadPart": 3, "CreateMultipartUpload": 1, "CompleteMultipartUpload": 1}),
    ],
)  # fmt: skip
def test_a_small_file_is_one_request(store: CountingProxy, size: int, requests: dict[str, int]) -> None:
    store.take()
    with reached(store).new_output("s3://lake/a/file").create(overwrite=True) as stream:
        stream.write(b"x" * size)
    assert counted(store.take(), s3_operation) == requests
    assert len(reached(store).new_input("s3://lake/a/file")) == size


def test_a_process_has_one_client() -> None:
    """The tasks of the next micro-batch needn't connect again."""
    properties = (("s3.endpoint", "http://127.0.0.1:1"), ("s3.region", "us-east-1"))
    io = file_io(properties)
    assert io is file_io(properties)
    assert io is not file_io((*properties, ("s3.access-key-id", "other")))


def test_a_run_is_read_once_in_large_parts(
    store: CountingProxy, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the machine that wrote it not at all; by another one with a request for each 16 MB."""
    count = 1_000_000
    hashes = np.arange(count, dtype=np.uint64)
    run = Entries(hashes, hashes, np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32),
                  (IndexedFile("s3://lake/f.parquet", 0, {}),))  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("writer")))
    store.take()
    info = write_run(reached(store), "s3://lake/index", "r", 1, run)
    store.take()
    open_run(reached(store), "s3://lake/index", info)
    assert store.take() == []

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("reader")))
    runs._opened.clear()
    opened = open_run(reached(store), "s3://lake/index", info)
    assert counted(store.take(), s3_operation) == {"Get": 2, "Head": 1}
    assert opened.info == dataclasses.replace(info)
    assert np.array_equal(opened.high, hashes)
    runs._opened.clear()
    open_run(reached(store), "s3://lake/index", info)
    assert store.take() == []
