"""The model of the log against delta-spark itself, and against tables that were broken by hand."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from tests.delta.data_files import deleted_rows, vector_path, z85_decoded
from tests.delta.log_model import DeltaLog
from tests.delta.readers import NAMES, READERS, plain
from tests.delta.violations import ProtocolViolation

VECTORS = {"delta.enableDeletionVectors": "true"}


INSERT = "INSERT INTO {t} SELECT id, concat('n', id), id / 4, id % 3 FROM range(0, 24, 1, 1)"
DELETE = "DELETE FROM {t} WHERE id IN (1, 5)"
UPDATE = "UPDATE {t} SET name = 'updated', price = NULL WHERE id % 5 = 0"
MERGE = (
    "MERGE INTO {t} USING (SELECT id FROM range(20, 30)) s ON {t}.id = s.id "
    "WHEN MATCHED AND s.id = 20 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'merged', p = 1 "
    "WHEN NOT MATCHED THEN INSERT (id, name, price, p) VALUES (s.id, NULL, -0.0D, NULL)"
)
ADD_COLUMN = "ALTER TABLE {t} ADD COLUMN note struct<text: string, at: timestamp>"
WITH_NOTE = "INSERT INTO {t} VALUES (40, 'é', double('NaN'), 2, struct('é', timestamp'1969-12-31 23:59:59.999999'))"
OPTIMIZE = "OPTIMIZE {t}"
OVERWRITE = "INSERT OVERWRITE {t} (id, name, p) VALUES (50, 'over', 0), (51, 'written', 1)"
RESTORE = "RESTORE TABLE {t} TO VERSION AS OF 3"
TRUNCATE = "TRUNCATE TABLE {t}"
MORE = "INSERT INTO {t} (id, name, p) VALUES (60, 'a longer text, of which statistics have a part', 0), (61, '', 0)"
LAST = "DELETE FROM {t} WHERE id = 61"
WIDENED = (
    "ALTER TABLE {t} ALTER COLUMN p TYPE bigint",
    "INSERT INTO {t} (id, name, p) VALUES (70, 'wide', 5000000000), (71, 'wider', 1)",
    "ALTER TABLE {t} RENAME COLUMN name TO title",
    "ALTER TABLE {t} DROP COLUMN price",
    "INSERT INTO {t} (id, title, p) VALUES (72, 'renamed', 0), (73, 'renamed', 0)",
    "DELETE FROM {t} WHERE id = 72",
)


@dataclass(frozen=True)
class Story:
    """A table with a history.

    :param statements: `{t}` is the table.
    :param refusals: reader -> its error, if it can't read such a table.
    """

    statements: tuple[str, ...]
    partition_by: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


STORIES = {
    "copy-on-write": Story(
        (INSERT, DELETE, MERGE, OVERWRITE, RESTORE, TRUNCATE, MORE), properties={"delta.checkpointInterval": "4"}
    ),
    "vectors": Story(
        (INSERT, DELETE, UPDATE, MERGE, ADD_COLUMN, WITH_NOTE, OPTIMIZE, OVERWRITE, RESTORE, TRUNCATE, MORE, LAST),
        "PARTITIONED BY (p)",
        VECTORS | {"delta.checkpointInterval": "5"},
    ),
    "v2 checkpoints": Story(
        (INSERT, DELETE, UPDATE, MERGE, OPTIMIZE, MORE, LAST),
        properties=VECTORS
        | {
            "delta.checkpointPolicy": "v2",
            "delta.checkpointInterval": "3",
            "delta.enableInCommitTimestamps": "true",
            "delta.enableRowTracking": "true",
        },
        refusals={"polars": "v2Checkpoint"},
    ),
    "mapped by name": Story(
        (INSERT, DELETE, MERGE, *WIDENED),
        properties=VECTORS
        | {
            "delta.columnMapping.mode": "name",
            "delta.enableTypeWidening": "true",
            "delta.enableChangeDataFeed": "true",
        },
        refusals={"delta-rs": "TypeWidening", "polars": "typeWidening"},
    ),
    "mapped by id": Story(
        (INSERT, DELETE, ADD_COLUMN, WITH_NOTE),
        properties={"delta.columnMapping.mode": "id"},
        refusals={"polars": "column mapping"},
    ),
}


def sql(spark: SparkSession, table: Path, statement: str) -> None:
    spark.sql(statement.replace("{t}", f"delta.`{table}`"))


def create(spark: SparkSession, table: Path, columns: str, story: Story) -> None:
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in story.properties.items())
    with_ = f"TBLPROPERTIES ({properties})" if properties else ""
    sql(spark, table, f"CREATE TABLE {{t}} ({columns}) USING delta {story.partition_by} {with_}")


def minutes_apart(log: DeltaLog) -> list[int]:
    """Give commits file times of which one is before that of the version before it.

    :return: by version, the milliseconds since 1970 that the commit counts as.
    """
    began = int(time.time()) - 3600
    times = [1000 * (began + 60 * version) for version in log.versions]
    for version in log.versions:
        moved = times[version] - 90_000 if version == 2 else times[version]
        os.utime(log.table / "_delta_log" / f"{version:020}.json", (moved / 1000,) * 2)
    times[2] = times[1] + 1
    return [info.get("inCommitTimestamp", times[version]) for version, info in log.history().items()]


@pytest.mark.spark
@pytest.mark.parametrize("name", STORIES)
def test_the_model_reads_what_delta_reads(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """At every version and at some times; the other engines at the latest version."""
    table, story = tmp_path / "t", STORIES[name]
    create(spark, table, "id bigint, name string, price double, p int", story)
    for statement in story.statements:
        sql(spark, table, statement)
    log = DeltaLog(table)
    log.check()
    times = minutes_apart(log)
    as_of = spark.read.format("delta")
    for version in log.versions:
        expected = plain(spark.read.format("delta").option("versionAsOf", version).load(str(table)).toArrow())
        assert plain(log.rows(version)) == expected, version
        assert log.version_at(times[version]) == version
        assert version == 0 or log.version_at(times[version] - 1) == version - 1
        if version % 4 == 2:
            at = datetime.fromtimestamp(times[version] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
            assert plain(as_of.option("timestampAsOf", at).load(str(table)).toArrow()) == expected, version
    with pytest.raises(LookupError):
        log.version_at(times[0] - 1)
    assert tuple(READERS) == NAMES, "all are installed"
    for reader, read in READERS.items():
        if reader in story.refusals:
            with pytest.raises(Exception, match=story.refusals[reader]):
                read(table)
        else:
            assert read(table) == plain(log.rows()), reader


def test_examples_of_the_protocol() -> None:
    """ "Deletion Vector Descriptor Schema", examples 1 and 3."""
    relative = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
    path = vector_path(Path("/mytable"), relative)
    assert path == Path("/mytable/ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin")
    text = "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    inline = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": 40, "cardinality": 6}
    # this example has another magic number than the format's description, and in another byte order
    with pytest.raises(ProtocolViolation, match="vector's magic number: b'd9"):
        deleted_rows(Path("/mytable"), inline)


def test_z85() -> None:
    """The example of ZeroMQ's RFC 32."""
    assert z85_decoded("HelloWorld") == bytes.fromhex("864FD26FB559F75B")
    for not_z85 in ("HelloWorl", "HelloWorl~", "#####"):
        with pytest.raises(ProtocolViolation, match="vector is Z85"):
            z85_decoded(not_z85)


def inline(positions: list[int]) -> dict[str, Any]:
    """The descriptor of an inline vector."""
    data = struct.pack("<i", 1681511377) + BitMap64(positions).serialize()
    padded = data + bytes(-len(data) % 4)
    characters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    numbers = struct.unpack(f">{len(padded) // 4}I", padded)
    text = "".join(characters[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(positions)}


@pytest.mark.parametrize("positions", [[], [0], [7, 65536, 2**32 + 1, 2**40]])
def test_inline_vectors(positions: list[int]) -> None:
    assert list(deleted_rows(Path("/mytable"), inline(positions))) == positions


@pytest.fixture(scope="module")
def good(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table without a fault: 1 writes two files, 2 and 3 delete from the one with p = 1, 4 appends two files, and 5
    rewrites all; it has a checkpoint.
    """
    table = tmp_path_factory.mktemp("good") / "t"
    features = {f"delta.feature.{name}": "supported" for name in ("domainMetadata", "changeDataFeed", "appendOnly")}
    properties = VECTORS | features | {"delta.checkpointInterval": "5"}
    create(
        spark,
        table,
        "id bigint, name string, price double, at timestamp, p int",
        Story((), "PARTITIONED BY (p)", properties),
    )
    for statement in (
        "INSERT INTO {t} SELECT /*+ COALESCE(1) */ id, CASE WHEN id <> 3 THEN concat(repeat('x', 40), id) END, "
        "CASE WHEN id = 4 THEN double('NaN') ELSE id - 7.5D END, timestamp_micros(id * 1500 - 7000), id % 2 "
        "FROM range(12)",
        "DELETE FROM {t} WHERE id = 3",
        "DELETE FROM {t} WHERE id = 5",
        "INSERT INTO {t} VALUES (20, 'a', 0, NULL, 0), (21, 'b', 0, NULL, 1)",
        OPTIMIZE,
    ):
        sql(spark, table, statement)
    DeltaLog(table).check()
    return table


class Broken:
    """A copy of the table, to be broken by hand. It has no checksums, unless they are what is broken."""

    def __init__(self, table: Path) -> None:
        self.table, self.log = table, table / "_delta_log"

    def path(self, version: int, ending: str = "json") -> Path:
        return self.log / f"{version:020}.{ending}"

    @contextmanager
    def commit(self, version: int) -> Iterator[list[dict[str, Any]]]:
        """The actions of a commit, to be changed."""
        actions = [json.loads(line) for line in self.path(version).read_text().splitlines()]
        yield actions
        self.path(version).write_text("".join(json.dumps(action) + "\n" for action in actions))

    @contextmanager
    def action(self, version: int, kind: str, partition: str | None = None) -> Iterator[dict[str, Any]]:
        """The first action of a kind, in a partition."""
        with self.commit(version) as actions:
            yield next(
                action[kind]
                for action in actions
                if kind in action and partition in (None, action[kind].get("partitionValues", {}).get("p"))
            )

    def drop(self, version: int, kind: str) -> None:
        with self.commit(version) as actions:
            actions[:] = [action for action in actions if kind not in action]

    def append(self, version: int, *actions: dict[str, Any]) -> None:
        with self.commit(version) as present:
            present.extend(actions)

    @contextmanager
    def statistics(self, version: int, partition: str) -> Iterator[dict[str, Any]]:
        with self.action(version, "add", partition) as add:
            stats = json.loads(add["stats"])
            yield stats
            add["stats"] = json.dumps(stats)

    @contextmanager
    def schema(self) -> Iterator[dict[str, Any]]:
        """Column -> field."""
        with self.action(0, "metaData") as metadata:
            schema = json.loads(metadata["schemaString"])
            yield {field["name"]: field for field in schema["fields"]}
            metadata["schemaString"] = json.dumps(schema)

    def set(self, name: str, value: str | None) -> None:
        with self.action(0, "metaData") as metadata:
            metadata["configuration"][name] = value

    @contextmanager
    def protocol(self) -> Iterator[dict[str, Any]]:
        with self.action(0, "protocol") as protocol:
            yield protocol

    def supports(self, feature: str, *, is_: bool) -> None:
        with self.protocol() as protocol:
            for kind in ("readerFeatures", "writerFeatures"):
                protocol[kind] = [name for name in protocol[kind] if name != feature] + [feature] * is_

    def without_checkpoint(self) -> None:
        self.path(5, "checkpoint.parquet").unlink()

    @contextmanager
    def checkpoint(self) -> Iterator[list[dict[str, Any]]]:
        path = self.path(5, "checkpoint.parquet")
        actions = pq.read_table(path)
        rows = actions.to_pylist()
        yield rows
        pq.write_table(pa.Table.from_pylist(rows, actions.schema), path)

    def v2_checkpoint(self) -> Path:
        """Replace the checkpoint with one of v2.

        :return: its sidecar.
        """
        self.supports("v2Checkpoint", is_=True)
        actions = DeltaLog(self.table).snapshot(0)
        classic = pq.read_table(self.path(5, "checkpoint.parquet"))
        sidecar = self.log / "_sidecars" / "3a0d65cd.parquet"
        sidecar.parent.mkdir(exist_ok=True)
        is_file = pc.or_(classic["add"].is_valid(), classic["remove"].is_valid())
        pq.write_table(classic.filter(is_file).select(["add", "remove"]), sidecar)
        self.without_checkpoint()
        named = {"path": sidecar.name, "sizeInBytes": sidecar.stat().st_size, "modificationTime": 1}
        top = [{"protocol": actions.protocol}, {"metaData": actions.metadata}]
        top += [{"checkpointMetadata": {"version": 5}}, {"sidecar": named}]
        self.path(5, V2).write_text("".join(json.dumps(action) + "\n" for action in top))
        return sidecar

    @contextmanager
    def top(self) -> Iterator[list[dict[str, Any]]]:
        """The actions of the v2 checkpoint itself."""
        actions = [json.loads(line) for line in self.path(5, V2).read_text().splitlines()]
        yield actions
        self.path(5, V2).write_text("".join(json.dumps(action) + "\n" for action in actions))

    def in_parts(self) -> list[Path]:
        """Split the checkpoint."""
        whole = pq.read_table(self.path(5, "checkpoint.parquet"))
        self.without_checkpoint()
        parts = [self.path(5, f"checkpoint.{part:010}.{3:010}.parquet") for part in (1, 2, 3)]
        for number, path in enumerate(parts):
            pq.write_table(whole.take(list(range(number, whole.num_rows, 3))), path)
        return parts

    def live(self, version: int, partition: str) -> dict[str, Any]:
        files = DeltaLog(self.table).snapshot(version).files.values()
        return dict(next(add for add in files if add["partitionValues"]["p"] == partition))

    def flip(self, where: int) -> None:
        """Change a byte of the vector's file of version 3, beginning at the vector's offset, or at the end."""
        vector = self.live(3, "1")["deletionVector"]
        path = vector_path(self.table, vector)
        data = bytearray(path.read_bytes())
        data[where if where < 0 else where and vector["offset"] + where - 1] ^= 1
        path.write_bytes(bytes(data))


def _unrelated(*, kind: str = "remove", **more: Any) -> dict[str, Any]:
    action = {"path": "p=0/other.parquet", "partitionValues": {"p": "0"}, "size": 1, "dataChange": True}
    return {kind: action | {"modificationTime": 1, "deletionTimestamp": 1} | more}


V2 = "checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
TXN = {"txn": {"appId": "app", "version": 1}}
DOMAIN = {"domainMetadata": {"domain": "d", "configuration": "", "removed": False}}


def inside(context: AbstractContextManager[Any], change: Callable[[Any], object]) -> None:
    with context as it:
        change(it)


BREAKS: dict[str, Callable[[Broken], object]] = {
    "versions are contiguous": lambda b: b.path(2).unlink(),
    "an action is a line of JSON": lambda b: b.path(3).write_text(b.path(3).read_text()[:-5]),
    "checkpoints' actions aren't in commits": lambda b: b.append(
        3, {"sidecar": {"path": "x", "sizeInBytes": 1, "modificationTime": 1}}
    ),
    "required fields": lambda b: inside(b.action(1, "add"), lambda add: add.pop("size")),
    "one add for each path": lambda b: b.append(3, {"add": b.live(2, "1")}),
    "one txn for each appId": lambda b: b.append(3, TXN, TXN),
    "one domainMetadata for each domain": lambda b: b.append(3, DOMAIN, DOMAIN),
    "one metaData for each commit": lambda b: inside(
        b.commit(0), lambda actions: actions.extend([action for action in actions if "metaData" in action])
    ),
    "no logical file is added and removed in a commit": lambda b: inside(
        b.action(3, "add"), lambda add: add.update(deletionVector=b.live(2, "1")["deletionVector"])
    ),
    "version 0 has protocol and metadata": lambda b: b.drop(0, "protocol"),
    "path is a URI": lambda b: b.append(3, _unrelated(path="p=0/a b.parquet")),
    "relative path stays below the table": lambda b: b.append(3, _unrelated(path="../other/x.parquet")),
    "data files aren't in hidden folders": lambda b: b.append(3, _unrelated(kind="add", path="_rowdelta/x.parquet")),
    "a path is always spelled the same": lambda b: inside(
        b.action(3, "remove"), lambda remove: remove.update(path=remove["path"].replace("=", "%3D"))
    ),
    "partition values of all partition columns": lambda b: inside(
        b.action(1, "add"), lambda add: add.update(partitionValues={})
    ),
    "partition value is of its column's type": lambda b: inside(
        b.action(1, "add"), lambda add: add.update(partitionValues={"p": "one"})
    ),
    "features belong to reader version 3 and writer version 7": lambda b: inside(
        b.protocol(), lambda protocol: protocol.update(minReaderVersion=2)
    ),
    "reader features are writer features too": lambda b: inside(
        b.protocol(), lambda protocol: protocol["readerFeatures"].append("columnMapping")
    ),
    "deletionVectors needs the feature": lambda b: b.supports("deletionVectors", is_=False),
    "new vectors need enableDeletionVectors": lambda b: b.set("delta.enableDeletionVectors", "false"),
    "timestampNtz needs the feature": lambda b: inside(
        b.schema(), lambda fields: fields["at"].update(type="timestamp_ntz")
    ),
    "column names are unique": lambda b: inside(b.schema(), lambda fields: fields["name"].update(name="ID")),
    "known type": lambda b: inside(b.schema(), lambda fields: fields["name"].update(type="varchar")),
    "a path is live with one vector": lambda b: b.drop(2, "remove"),
    "a remove names the live vector": lambda b: inside(
        b.action(3, "remove"), lambda remove: remove.pop("deletionVector")
    ),
    "a removed file was live": lambda b: b.append(3, _unrelated()),
    "numRecords beside a vector": lambda b: inside(b.statistics(3, "1"), lambda stats: stats.pop("numRecords")),
    "statistics are JSON": lambda b: inside(b.action(1, "add"), lambda add: add.update(stats=add["stats"][:-1])),
    "vector's cardinality": lambda b: inside(
        b.action(3, "add"), lambda add: add["deletionVector"].update(cardinality=7)
    ),
    "vector's storage type": lambda b: inside(
        b.action(3, "add"), lambda add: add["deletionVector"].update(storageType="s")
    ),
    "inline vector has no offset": lambda b: inside(
        b.action(3, "add"), lambda add: add["deletionVector"].update(storageType="i")
    ),
    "vector's positions are in the data file": lambda b: inside(
        b.action(3, "add"), lambda add: add.update(deletionVector=inline([1, 6]))
    ),
    "vector is Z85": lambda b: inside(
        b.action(3, "add"), lambda add: add["deletionVector"].update(pathOrInlineDv="~" * 20)
    ),
    "vector's size": lambda b: inside(
        b.action(3, "add"),
        lambda add: add["deletionVector"].update(sizeInBytes=add["deletionVector"]["sizeInBytes"] - 1),
    ),
    "vector's file exists": lambda b: vector_path(b.table, b.live(3, "1")["deletionVector"]).unlink(),
    "vector file's format version is 1": lambda b: b.flip(0),
    "vector's checksum": lambda b: b.flip(-1),
    "an add without dataChange has a remove": lambda b: b.drop(5, "remove"),
    "a remove without dataChange has an add": lambda b: b.drop(5, "add"),
    "appendOnly tables lose no rows": lambda b: b.set("delta.appendOnly", "true"),
    "change data files don't change data": lambda b: b.append(3, _unrelated(kind="cdc")),
    "row tracking needs row ids and commit versions": lambda b: b.set("delta.enableRowTracking", "true"),
    "checkpoint has the live files": lambda b: inside(
        b.checkpoint(), lambda rows: rows.remove(next(row for row in rows if row["add"]))
    ),
    "checkpoint has the tombstones": lambda b: inside(
        b.checkpoint(), lambda rows: rows.remove(next(row for row in rows if row["remove"]))
    ),
    "checkpoint has one protocol and metadata": lambda b: inside(
        b.checkpoint(), lambda rows: rows.remove(next(row for row in rows if row["protocol"]))
    ),
    "checkpoint has the domains": lambda b: b.append(3, DOMAIN),
    "checkpoint has the transactions": lambda b: b.append(3, TXN),
    "sidecar exists": lambda b: b.v2_checkpoint().unlink(),
    "version checksum": lambda b: b.path(3, "crc").write_text(
        json.dumps({"tableSizeBytes": 1, "numFiles": 1, "numMetadata": 1, "numProtocol": 1})
    ),
    "data file exists": lambda b: (b.table / b.live(1, "0")["path"]).unlink(),
    "data file's size": lambda b: inside(b.action(1, "add"), lambda add: add.update(size=add["size"] + 1)),
    "data file's types": lambda b: inside(b.schema(), lambda fields: fields["price"].update(type="decimal(10,2)")),
    "types are widened with the feature only": lambda b: inside(
        b.schema(), lambda fields: fields["id"].update(type="decimal(20,0)")
    ),
    "no null in a column that isn't nullable": lambda b: inside(
        b.schema(), lambda fields: fields["name"].update(nullable=False)
    ),
    "numRecords": lambda b: inside(
        b.statistics(1, "0"), lambda stats: stats.update(numRecords=stats["numRecords"] + 1)
    ),
    "nullCount": lambda b: inside(b.statistics(1, "1"), lambda stats: stats["nullCount"].update(name=0)),
    "bounds hold the live rows": lambda b: inside(b.statistics(1, "0"), lambda stats: stats["minValues"].update(id=1)),
    "bounds hold the live rows / wide": lambda b: inside(b.statistics(3, "1"), lambda s: s["maxValues"].update(id=10)),
    "bounds hold the live rows / NaN": lambda b: inside(
        b.statistics(1, "0"), lambda s: s["maxValues"].update(price=2.5)
    ),
    "bounds hold the live rows / cut off": lambda b: inside(
        b.statistics(1, "0"), lambda s: s["maxValues"].update(name=s["maxValues"]["name"][:32])
    ),
    "bounds hold the live rows / rounded up": lambda b: inside(
        b.statistics(1, "1"), lambda s: s["minValues"].update(at="1969-12-31T23:59:59.995Z")
    ),
    "tight bounds are a row's": lambda b: inside(b.statistics(1, "0"), lambda stats: stats["minValues"].update(id=-1)),
    "statistics are of their column's type": lambda b: inside(
        b.statistics(1, "0"), lambda stats: stats["minValues"].update(id="zero")
    ),
}
"""Rule -> what breaks it."""


def breaks(rule: str) -> Callable[[Callable[[Broken], None]], Callable[[Broken], None]]:
    def registered(function: Callable[[Broken], None]) -> Callable[[Broken], None]:
        BREAKS[rule] = function
        return function

    return registered


@breaks("vectors need the feature")
def a_vector_without_the_feature(broken: Broken) -> None:
    broken.supports("deletionVectors", is_=False)
    broken.set("delta.enableDeletionVectors", "false")


@breaks("columns have an id and a physical name")
def column_mapping_without_names(broken: Broken) -> None:
    broken.supports("columnMapping", is_=True)
    broken.set("delta.columnMapping.mode", "name")


@breaks("vector's magic number")
def a_vector_of_another_format(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"] = inline([1, 2])
        add["deletionVector"]["pathOrInlineDv"] = "0" + add["deletionVector"]["pathOrInlineDv"][1:]


@breaks("vector is a 64-bit Roaring bitmap")
def a_vector_that_ends_early(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        vector = add["deletionVector"] = inline([1, 2])
        vector["pathOrInlineDv"], vector["sizeInBytes"] = vector["pathOrInlineDv"][:20], 16


@breaks("domains need the feature")
def a_domain_without_the_feature(broken: Broken) -> None:
    with broken.protocol() as protocol:
        protocol["writerFeatures"].remove("domainMetadata")
    broken.append(3, DOMAIN)


@breaks("change data files need the feature")
def a_change_data_file_without_the_feature(broken: Broken) -> None:
    with broken.protocol() as protocol:
        protocol["writerFeatures"].remove("changeDataFeed")
    broken.append(3, _unrelated(kind="cdc", dataChange=False))


@breaks("commitInfo with inCommitTimestamp comes first")
def no_in_commit_timestamp(broken: Broken) -> None:
    with broken.protocol() as protocol:
        protocol["writerFeatures"].append("inCommitTimestamp")
    broken.set("delta.enableInCommitTimestamps", "true")


@breaks("in-commit timestamps grow")
def in_commit_timestamps_go_back(broken: Broken) -> None:
    no_in_commit_timestamp(broken)
    for version in range(6):
        with broken.action(version, "commitInfo") as info:
            info["inCommitTimestamp"] = 100 - version


@breaks("no file is live and removed")
def a_tombstone_of_a_live_file(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        add = next(row for row in rows if row["add"])["add"]
        tombstone = next(row for row in rows if row["remove"])["remove"]
        tombstone["path"], tombstone["deletionVector"] = add["path"], add["deletionVector"]


@breaks("checkpoint with a uuid is of v2")
def a_v1_checkpoint_with_a_uuid(broken: Broken) -> None:
    path = broken.path(5, "checkpoint.parquet")
    path.rename(broken.path(5, "checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet"))


@breaks("v2 needs the feature")
def a_v2_checkpoint_without_the_feature(broken: Broken) -> None:
    broken.v2_checkpoint()
    broken.supports("v2Checkpoint", is_=False)
    with broken.top() as actions:
        for kind in ("readerFeatures", "writerFeatures"):
            actions[0]["protocol"][kind].remove("v2Checkpoint")


@breaks("sidecar's size")
def a_sidecar_of_another_size(broken: Broken) -> None:
    broken.v2_checkpoint()
    with broken.top() as actions:
        actions[-1]["sidecar"]["sizeInBytes"] += 1


@breaks("checkpoint says its version")
def a_checkpoint_of_another_version(broken: Broken) -> None:
    broken.v2_checkpoint()
    with broken.top() as actions:
        actions[2]["checkpointMetadata"]["version"] = 4


@breaks("files are in the checkpoint or in sidecars")
def files_in_the_checkpoint_and_in_sidecars(broken: Broken) -> None:
    broken.v2_checkpoint()
    with broken.top() as actions:
        actions.append({"add": broken.live(1, "0")})


@breaks("checkpoint has the state only")
def a_checkpoint_with_provenance(broken: Broken) -> None:
    broken.v2_checkpoint()
    with broken.top() as actions:
        actions.append({"commitInfo": {}})


@breaks("no checkpoint in parts with the feature v2Checkpoint")
def a_checkpoint_in_parts_with_the_feature(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        for kind in ("readerFeatures", "writerFeatures"):
            next(row for row in rows if row["protocol"])["protocol"][kind].append("v2Checkpoint")
    broken.supports("v2Checkpoint", is_=True)
    broken.in_parts()


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Broken:
    """A copy that isn't broken yet."""
    table = shutil.copytree(good, tmp_path / "t")
    for checksum in (table / "_delta_log").glob("*.crc"):
        checksum.unlink()
    return Broken(table)


@pytest.mark.spark
@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_found(broken: Broken, rule: str) -> None:
    BREAKS[rule](broken)
    with pytest.raises(ProtocolViolation) as violation:
        DeltaLog(broken.table).check()
    assert violation.value.rule == rule.partition(" / ")[0], str(violation.value)
    assert violation.value.version is not None
