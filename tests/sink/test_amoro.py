"""Apache Amoro beside the sink. Its packages are not on Maven Central, so these tests commit what its optimizer and its
cleaner commit to a table of version 2 (`UnKeyedTableCommit`, `IcebergTableMaintainer`), by the same calls of Iceberg.

It plans on one snapshot, and gives new data files the sequence number of that one. Deletes become position delete
files, each about one data file. Its tasks can't read deletion vectors, so docs/operations.md advises against it for
tables of version 3.
"""

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

from sink.targets.iceberg.table import IcebergTable
from tests.rewrites import only_sink
from tests.sink.harness import Job, before_commit, by_pyiceberg

pytestmark = pytest.mark.spark

_PATH, _POS = 2147483546, 2147483545  # the field ids of position deletes
_METRICS = ("column-sizes", "value-counts", "null-value-counts", "nan-value-counts", "lower-bounds", "upper-bounds")


@dataclass
class Amoro:
    """What it has planned: the state of the table, to which its later commits refer."""

    job: Job

    def __post_init__(self) -> None:
        self.table = cast("IcebergTable", only_sink(self.job).table)
        self.java = self.job.java_table()
        snapshot = self.java.currentSnapshot()
        self.snapshot, self.number = int(snapshot.snapshotId()), int(snapshot.sequenceNumber())
        scans = self.table.elements(self.java.newScan().planFiles())
        self.data = {str(scan.file().location()): scan.file() for scan in scans}
        self.deletes = {str(file.location()): file for file in self.table.delete_files()}
        places = self.job.spark.sql(f"SELECT _file, _pos FROM {self.job.target}").collect()
        self.live = {path: sorted(pos for file, pos in places if file == path) for path in self.data}

    def rewritten(self, with_deletes: bool) -> None:
        """One rewrite of all data files, with the deletes that applied to them."""
        transaction = self._begun()
        rewrite = self._rewrite(transaction)
        for file in self.data.values():
            rewrite = rewrite.deleteFile(file)
        for file in self.deletes.values() if with_deletes else ():
            rewrite = rewrite.deleteFile(file)
        rewrite.addFile(self._data_file()).commit()
        transaction.commitTransaction()

    def positions(self) -> None:
        """All deletes become one position delete file for each data file."""
        transaction = self._begun()
        rewrite = self._rewrite(transaction)
        for file in self.deletes.values():
            rewrite = rewrite.deleteFile(file)
        for path in self.data:
            rewrite = rewrite.addFile(self._delete_file(path))
        rewrite.commit()
        transaction.commitTransaction()

    def more_positions(self) -> None:
        """A small file is rewritten. For the other one there are position deletes beside those that it has. These are
        two snapshots of one transaction.
        """
        small, other = self.data
        transaction = self._begun()
        self._rewrite(transaction).deleteFile(self.data[small]).addFile(self._data_file(small)).commit()
        transaction.newRowDelta().addDeletes(self._delete_file(other)).commit()
        transaction.commitTransaction()

    def cleaned(self) -> None:
        """All files are rewritten, and delete files that then apply to nothing are removed by another commit."""
        self.rewritten(with_deletes=False)
        java = self.job.java_table()
        applying = {
            str(delete.location())
            for scan in self.table.elements(java.newScan().planFiles())
            for delete in self.table.elements(scan.deletes())
        }
        files = self.table.spark._jvm.java.util.HashSet  # type: ignore[union-attr]
        dangling = files()
        # with the rewrite Iceberg has already dropped those that are older than all data files
        left = {file["file_path"] for file in self.job.files() if file["content"]}
        for path in left - applying:
            dangling.add(self.deletes[path])
        java.newRewrite().rewriteFiles(files(), dangling, files(), files()).commit()

    def _begun(self) -> JavaObject:
        return self.job.java_table().newTransaction()

    def _rewrite(self, transaction: JavaObject) -> JavaObject:
        rewrite = transaction.newRewrite().validateFromSnapshot(self.snapshot).dataSequenceNumber(self.number)
        return rewrite.set("snapshot.producer", "OPTIMIZE")

    def _data_file(self, *paths: str) -> JavaObject:
        """The live rows of data files, as another one."""
        parts = [pq.read_table(_local(path)).take(pa.array(self.live[path])) for path in paths or self.data]
        new = self._new_path()
        pq.write_table(pa.concat_tables(parts), _local(new))
        described = self.table.described(next(iter(self.data.values())))
        return self._content({name: value for name, value in described.items() if name not in _METRICS}, new)

    def _delete_file(self, path: str) -> JavaObject:
        """The positions that are deleted in a data file. Only its bounds say which file that is."""
        file = self.data[path]
        deleted = np.setdiff1d(np.arange(int(file.recordCount())), self.live[path])
        fields = [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(_PATH)}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(_POS)}),
        ]
        new = self._new_path()
        pq.write_table(pa.table([[path] * len(deleted), deleted], schema=pa.schema(fields)), _local(new))
        bounds = {"keys": [_PATH], "values": [path.encode().hex()]}
        described = self.table.described(file)
        kept = {name: described[name] for name in ("spec-id", "partition", "file-format")}
        return self._content(
            {**kept, "content": "POSITION_DELETES", "lower-bounds": bounds, "upper-bounds": bounds}, new
        )

    def _new_path(self) -> str:
        return f"{next(iter(self.data)).rpartition('/')[0]}/{uuid4()}.parquet"

    def _content(self, described: dict[str, Any], path: str) -> JavaObject:
        facts = {
            "file-path": path,
            "record-count": pq.read_metadata(_local(path)).num_rows,
            "file-size-in-bytes": Path(_local(path)).stat().st_size,
        }
        return self.table.content_file(json.dumps({**described, **facts}))


def _local(path: str) -> str:
    return path.removeprefix("file:")


def _read(job: Job) -> list[dict[str, Any]]:
    """The table's rows, as Spark and PyIceberg read them. The latter refuses tables with equality deletes."""
    rows = job.rows()
    if not any(file["content"] == 2 for file in job.files()):
        assert by_pyiceberg(job) == rows
    return rows


COMMITS: dict[str, Callable[[Amoro], None]] = {
    "data files": lambda amoro: amoro.rewritten(with_deletes=False),
    "data files and deletes": lambda amoro: amoro.rewritten(with_deletes=True),
    "deletes": Amoro.positions,
    "more deletes": Amoro.more_positions,
    "dangling deletes": Amoro.cleaned,
}


@pytest.mark.parametrize(
    ("left", "when"),
    [("position deletes", "before the commit"), ("equality deletes of another writer", "before the look-up")],
)
@pytest.mark.parametrize("commit", COMMITS)
def test_what_amoro_commits(
    spark: SparkSession, tmp_path: Path, commit: str, left: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(20), "eu")
    for numbers in (range(8), range(8, 20)):
        job.write([("+I", {"id": number, "region": "eu"}) for number in numbers])
    job.run()
    writer = job
    if left != "position deletes":
        writer = replace(job.second_driver(), deletes="equality", sink_id="flink", folder=tmp_path / "flink")
    for number in (3, 13):  # a delete file for each data file
        writer.write([("-D", {"id": number, "region": None})])
    writer.run()
    del rows[3], rows[13]

    def optimize() -> None:
        before = job.rows()
        COMMITS[commit](amoro)
        assert _read(job) == before

    amoro = Amoro(job)
    assert amoro.deletes
    if when == "before the look-up":
        optimize()
    job.write([*(("+U", {"id": n, "region": "us"}) for n in (4, 14, 30)), ("-D", {"id": 6, "region": None})])
    rows |= dict.fromkeys((4, 14, 30), "us")
    del rows[6]
    with before_commit(optimize) if when == "before the commit" else nullcontext():
        job.run()
    expected = [{"id": number, "region": region} for number, region in sorted(rows.items())]
    assert _read(job) == expected
    job.write([("+U", {"id": number, "region": "ap"}) for number in rows])
    job.run()
    assert _read(job) == [{"id": number, "region": "ap"} for number in sorted(rows)]
    assert job.check_index() is not None
    job.check_deletes()
