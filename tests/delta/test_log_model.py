"""The model of the log against delta-spark itself, and against tables that were broken by hand."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


TYPES = {
    "id": ("bigint", ["1", "2", "3"]),
    "s": ("string", ["repeat('é', 40)", "NULL", "repeat('\U0001f600', 40)"]),
    "d": ("double", ["double('NaN')", "-0.0D", "double('Infinity')"]),
    "f": ("float", ["float('NaN')", "float('0.1')", "float('-Infinity')"]),
    "ts": ("timestamp", ["timestamp'2020-01-01 00:00:00.123456'", "timestamp'1900-01-01 00:00:00.123456'", "NULL"]),
    "n": ("timestamp_ntz", ["timestamp_ntz'2020-01-01 00:00:00.1'", "timestamp_ntz'1900-01-01 00:00:00'", "NULL"]),
    "dt": ("date", ["date'2020-02-29'", "date'0001-01-01'", "date'12020-01-01'"]),
    "dec": ("decimal(20,3)", ["1.234", "-12345678901234567.891", "NULL"]),
    "sm": ("smallint", ["1", "-32768", "NULL"]),
    "ti": ("tinyint", ["1", "-128", "NULL"]),
    "b": ("boolean", ["true", "false", "NULL"]),
    "bin": ("binary", ["X'00FF'", "X''", "NULL"]),
    "st": ("struct<x: int, y: struct<z: string>>", ["struct(1, struct('a'))", "struct(2, NULL)", "NULL"]),
    "arr": ("array<struct<x: date>>", ["array(struct(date'2020-01-01'), NULL)", "array()", "NULL"]),
    "m": ("map<string, timestamp>", ["map('a', timestamp'2020-01-01 00:00:00')", "map()", "NULL"]),
    "ps": ("string", ["'ü é/%#?:a'", "NULL", "'a b'"]),
    "pd": ("date", ["date'2020-01-01'", "NULL", "date'12020-01-01'"]),
    "pt": ("timestamp", ["timestamp'2020-01-01 00:00:00.5'", "NULL", "timestamp'12020-01-01 00:00:00.123456'"]),
    "pn": ("timestamp_ntz", ["timestamp_ntz'2020-01-01 00:00:00.5'", "NULL", "timestamp_ntz'1900-01-01 00:00:00'"]),
    "pb": ("boolean", ["true", "NULL", "false"]),
    "pdec": ("decimal(10,2)", ["1.5", "NULL", "-3"]),
    "pf": ("double", ["1.5", "NULL", "double('-Infinity')"]),
}
"""Column -> type and its values in three rows."""


@pytest.mark.spark
@pytest.mark.parametrize("partitioned", [True, False])
def test_values_of_all_types(spark: SparkSession, tmp_path: Path, partitioned: bool) -> None:
    """Extreme values, in columns and as partition values, with their statistics."""
    table = tmp_path / "t"
    columns = ", ".join(f"{name} {type_}" for name, (type_, _) in TYPES.items())
    partition_columns = [name for name in TYPES if name.startswith("p")]
    create(spark, table, columns, Story((), f"PARTITIONED BY ({', '.join(partition_columns)})" if partitioned else ""))
    rows = ["SELECT " + ", ".join(values[row] for _, values in TYPES.values()) for row in range(3)]
    sql(spark, table, "INSERT INTO {t} SELECT /*+ COALESCE(1) */ * FROM (" + " UNION ALL ".join(rows) + ")")
    log = DeltaLog(table)
    log.check()
    assert plain(log.rows()) == plain(spark.read.format("delta").load(str(table)).toArrow())
    assert READERS["DuckDB"](table) == plain(log.rows())


@pytest.mark.spark
@pytest.mark.parametrize("policy", ["classic", "v2"])
def test_commits_below_a_checkpoint_were_cleaned_up(spark: SparkSession, tmp_path: Path, policy: str) -> None:
    table = tmp_path / "t"
    properties = {"delta.checkpointPolicy": policy, "delta.checkpointInterval": "2"}
    create(spark, table, "id int, p int", Story((), "PARTITIONED BY (p)", properties))
    for number in range(5):
        sql(spark, table, f"INSERT INTO {{t}} VALUES ({number}, {number % 2})")
    log = DeltaLog(table)
    before = {version: plain(log.rows(version)) for version in log.versions}
    for version in range(4):
        (table / "_delta_log" / f"{version:020}.json").unlink()
    for path in (table / "_delta_log").glob(f"{2:020}.checkpoint.*"):
        path.unlink()
    (table / "_delta_log" / "_last_checkpoint").write_text("a hint, not to be trusted")
    cleaned = DeltaLog(table)
    cleaned.check()
    assert cleaned.versions == range(4, 6)
    assert {version: plain(cleaned.rows(version)) for version in cleaned.versions} == {v: before[v] for v in (4, 5)}
    with pytest.raises(LookupError):
        cleaned.snapshot(3)


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
BREAKS: list[tuple[str, str, Callable[[Broken], None]]] = []
"""Rule, what is done to the table, and the function that does it."""


def breaks(rule: str) -> Callable[[Callable[[Broken], None]], Callable[[Broken], None]]:
    def registered(function: Callable[[Broken], None]) -> Callable[[Broken], None]:
        BREAKS.append((rule, function.__name__, function))
        return function

    return registered


@breaks("versions are contiguous")
def a_commit_is_missing(broken: Broken) -> None:
    broken.path(2).unlink()


@breaks("versions are contiguous")
def the_first_commits_are_missing_without_a_checkpoint(broken: Broken) -> None:
    broken.without_checkpoint()
    broken.path(0).unlink()


@breaks("an action is a line of JSON")
def a_line_is_cut_off(broken: Broken) -> None:
    broken.path(3).write_text(broken.path(3).read_text()[:-5])


@breaks("an action is a line of JSON")
def a_line_has_two_actions(broken: Broken) -> None:
    broken.append(3, TXN | DOMAIN)


@breaks("checkpoints' actions aren't in commits")
def a_sidecar_is_committed(broken: Broken) -> None:
    broken.append(3, {"sidecar": {"path": "x", "sizeInBytes": 1, "modificationTime": 1}})


@breaks("required fields")
def an_add_without_size(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        del add["size"]


@breaks("required fields")
def a_number_as_text(broken: Broken) -> None:
    broken.append(3, {"txn": {"appId": "app", "version": "1"}})


@breaks("required fields")
def a_remove_that_lies_about_its_fields(broken: Broken) -> None:
    with broken.action(3, "remove") as remove:
        del remove["size"]


@breaks("one add for each path")
def a_path_is_added_twice(broken: Broken) -> None:
    broken.append(3, {"add": broken.live(2, "1")})


@breaks("one txn for each appId")
def two_transactions_of_an_application(broken: Broken) -> None:
    broken.append(3, TXN, TXN)


@breaks("one domainMetadata for each domain")
def two_configurations_of_a_domain(broken: Broken) -> None:
    broken.append(3, DOMAIN, DOMAIN)


@breaks("one metaData for each commit")
def two_metadata(broken: Broken) -> None:
    with broken.commit(0) as actions:
        actions.extend([action for action in actions if "metaData" in action])


@breaks("no logical file is added and removed in a commit")
def a_vector_is_replaced_by_itself(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"] = broken.live(2, "1")["deletionVector"]


@breaks("version 0 has protocol and metadata")
def no_protocol(broken: Broken) -> None:
    broken.drop(0, "protocol")


@breaks("path is a URI")
def a_path_with_a_space(broken: Broken) -> None:
    broken.append(3, _unrelated(path="p=0/a b.parquet"))


@breaks("path is a URI")
def a_path_with_a_lone_percent(broken: Broken) -> None:
    broken.append(3, _unrelated(path="p=0/100%.parquet"))


@breaks("relative path stays below the table")
def a_path_out_of_the_table(broken: Broken) -> None:
    broken.append(3, _unrelated(path="../other/x.parquet"))


@breaks("data files aren't in hidden folders")
def a_data_file_in_a_hidden_folder(broken: Broken) -> None:
    broken.append(3, _unrelated(kind="add", path="_rowdelta/x.parquet"))


@breaks("a path is always spelled the same")
def a_path_is_encoded_in_another_way(broken: Broken) -> None:
    with broken.action(3, "remove") as remove:
        remove["path"] = remove["path"].replace("=", "%3D")


@breaks("partition values of all partition columns")
def no_partition_value(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        add["partitionValues"] = {}


@breaks("partition value is of its column's type")
def a_partition_value_is_no_number(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        add["partitionValues"] = {"p": "one"}


@breaks("partition value is of its column's type")
def a_partition_value_is_too_large(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        add["partitionValues"] = {"p": str(2**31)}


@breaks("features belong to reader version 3 and writer version 7")
def features_of_an_old_version(broken: Broken) -> None:
    with broken.protocol() as protocol:
        protocol["minReaderVersion"] = 2


@breaks("reader features are writer features too")
def a_feature_of_readers_only(broken: Broken) -> None:
    with broken.protocol() as protocol:
        protocol["readerFeatures"].append("columnMapping")


@breaks("deletionVectors needs the feature")
def vectors_are_enabled_without_the_feature(broken: Broken) -> None:
    broken.supports("deletionVectors", is_=False)


@breaks("vectors need the feature")
def a_vector_without_the_feature(broken: Broken) -> None:
    broken.supports("deletionVectors", is_=False)
    broken.set("delta.enableDeletionVectors", "false")


@breaks("new vectors need enableDeletionVectors")
def a_vector_where_they_are_off(broken: Broken) -> None:
    broken.set("delta.enableDeletionVectors", "false")


@breaks("timestampNtz needs the feature")
def a_type_without_its_feature(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["at"]["type"] = "timestamp_ntz"


@breaks("column names are unique")
def two_columns_of_a_name(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["name"]["name"] = "ID"


@breaks("known type")
def a_type_that_does_not_exist(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["name"]["type"] = "varchar"


@breaks("columns have an id and a physical name")
def column_mapping_without_names(broken: Broken) -> None:
    broken.supports("columnMapping", is_=True)
    broken.set("delta.columnMapping.mode", "name")


@breaks("a path is live with one vector")
def the_file_before_its_vector_stays(broken: Broken) -> None:
    broken.drop(2, "remove")


@breaks("a path is live with one vector")
def the_earlier_vector_stays(broken: Broken) -> None:
    broken.drop(3, "remove")


@breaks("a remove names the live vector")
def a_remove_without_the_live_vector(broken: Broken) -> None:
    with broken.action(3, "remove") as remove:
        del remove["deletionVector"]


@breaks("a removed file was live")
def a_remove_of_an_unknown_file(broken: Broken) -> None:
    broken.append(3, _unrelated())


@breaks("a removed file was live")
def a_remove_of_a_removed_file(broken: Broken) -> None:
    with broken.commit(5) as actions:
        first = next(action for action in actions if "remove" in action)
    broken.path(6).write_text(json.dumps(first) + "\n")


@breaks("numRecords beside a vector")
def a_vector_without_the_number_of_records(broken: Broken) -> None:
    with broken.statistics(3, "1") as stats:
        del stats["numRecords"]


@breaks("numRecords beside a vector")
def a_vector_without_statistics(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        del add["stats"]


@breaks("statistics are JSON")
def statistics_that_are_cut_off(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        add["stats"] = add["stats"][:-1]


@breaks("vector's cardinality")
def a_vector_deletes_more_than_there_is(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["cardinality"] = 7


@breaks("vector's cardinality")
def a_vector_deletes_less_than_it_says(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["cardinality"] = 3


@breaks("vector's storage type")
def a_vector_that_is_stored_elsewhere(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["storageType"] = "s"


@breaks("inline vector has no offset")
def an_inline_vector_with_an_offset(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["storageType"] = "i"


@breaks("vector's positions are in the data file")
def a_vector_beyond_the_last_row(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"] = inline([1, 6])


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


@breaks("vector is Z85")
def a_vector_in_another_encoding(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["pathOrInlineDv"] = "~" * 20


@breaks("vector's size")
def a_vector_of_another_size(broken: Broken) -> None:
    with broken.action(3, "add") as add:
        add["deletionVector"]["sizeInBytes"] -= 1


@breaks("vector's file exists")
def a_vector_without_its_file(broken: Broken) -> None:
    vector_path(broken.table, broken.live(3, "1")["deletionVector"]).unlink()


@breaks("vector file's format version is 1")
def a_vector_file_of_another_version(broken: Broken) -> None:
    broken.flip(0)


@breaks("vector's checksum")
def a_vector_with_a_wrong_checksum(broken: Broken) -> None:
    broken.flip(-1)


@breaks("vector's checksum")
def a_vector_with_a_changed_byte(broken: Broken) -> None:
    broken.flip(9)


@breaks("an add without dataChange has a remove")
def a_compaction_that_only_adds(broken: Broken) -> None:
    broken.drop(5, "remove")


@breaks("a remove without dataChange has an add")
def a_compaction_that_only_removes(broken: Broken) -> None:
    broken.drop(5, "add")


@breaks("appendOnly tables lose no rows")
def a_delete_from_an_append_only_table(broken: Broken) -> None:
    broken.set("delta.appendOnly", "true")


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


@breaks("change data files don't change data")
def a_change_data_file_with_data_change(broken: Broken) -> None:
    broken.append(3, _unrelated(kind="cdc"))


@breaks("row tracking needs row ids and commit versions")
def no_row_ids(broken: Broken) -> None:
    broken.set("delta.enableRowTracking", "true")


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


@breaks("checkpoint has the live files")
def a_file_is_missing_in_the_checkpoint(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        rows.remove(next(row for row in rows if row["add"]))


@breaks("checkpoint has the live files")
def a_file_is_another_in_the_checkpoint(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        next(row for row in rows if row["add"])["add"]["size"] += 1


@breaks("checkpoint has the tombstones")
def a_tombstone_is_missing_in_the_checkpoint(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        rows.remove(next(row for row in rows if row["remove"]))


@breaks("no file is live and removed")
def a_tombstone_of_a_live_file(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        add = next(row for row in rows if row["add"])["add"]
        tombstone = next(row for row in rows if row["remove"])["remove"]
        tombstone["path"], tombstone["deletionVector"] = add["path"], add["deletionVector"]


@breaks("checkpoint has one protocol and metadata")
def a_checkpoint_without_protocol(broken: Broken) -> None:
    with broken.checkpoint() as rows:
        rows.remove(next(row for row in rows if row["protocol"]))


@breaks("checkpoint with a uuid is of v2")
def a_v1_checkpoint_with_a_uuid(broken: Broken) -> None:
    path = broken.path(5, "checkpoint.parquet")
    path.rename(broken.path(5, "checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet"))


@breaks("checkpoint has the domains")
def a_domain_is_missing_in_the_checkpoint(broken: Broken) -> None:
    broken.append(3, DOMAIN)


@breaks("checkpoint has the transactions")
def a_transaction_is_missing_in_the_checkpoint(broken: Broken) -> None:
    broken.append(3, TXN)


@breaks("v2 needs the feature")
def a_v2_checkpoint_without_the_feature(broken: Broken) -> None:
    broken.v2_checkpoint()
    broken.supports("v2Checkpoint", is_=False)
    with broken.top() as actions:
        for kind in ("readerFeatures", "writerFeatures"):
            actions[0]["protocol"][kind].remove("v2Checkpoint")


@breaks("sidecar exists")
def a_sidecar_is_missing(broken: Broken) -> None:
    broken.v2_checkpoint().unlink()


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


@breaks("version checksum")
def a_checksum_of_another_table(broken: Broken) -> None:
    broken.path(3, "crc").write_text(
        json.dumps({"tableSizeBytes": 1, "numFiles": 1, "numMetadata": 1, "numProtocol": 1})
    )


@breaks("data file exists")
def a_data_file_is_missing(broken: Broken) -> None:
    (broken.table / broken.live(1, "0")["path"]).unlink()


@breaks("data file's size")
def a_data_file_of_another_size(broken: Broken) -> None:
    with broken.action(1, "add") as add:
        add["size"] += 1


@breaks("data file's types")
def a_column_of_another_type(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["price"]["type"] = "decimal(10,2)"


@breaks("types are widened with the feature only")
def a_wider_column_without_the_feature(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["id"]["type"] = "decimal(20,0)"


@breaks("no null in a column that isn't nullable")
def a_null_that_is_not_allowed(broken: Broken) -> None:
    with broken.schema() as fields:
        fields["name"]["nullable"] = False


@breaks("numRecords")
def a_wrong_number_of_records(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["numRecords"] += 1


@breaks("nullCount")
def a_wrong_number_of_nulls(broken: Broken) -> None:
    with broken.statistics(1, "1") as stats:
        stats["nullCount"]["name"] = 0


@breaks("nullCount")
def wide_statistics_say_that_all_rows_are_null(broken: Broken) -> None:
    with broken.statistics(3, "1") as stats:
        stats["nullCount"]["name"] = stats["numRecords"]


@breaks("bounds hold the live rows")
def a_minimum_above_a_row(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["minValues"]["id"] = 1


@breaks("bounds hold the live rows")
def a_wide_maximum_below_a_row(broken: Broken) -> None:
    with broken.statistics(3, "1") as stats:
        stats["maxValues"]["id"] = 10


@breaks("bounds hold the live rows")
def a_maximum_that_ignores_nan(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["maxValues"]["price"] = 2.5


@breaks("bounds hold the live rows")
def a_maximum_is_cut_off_like_a_minimum(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["maxValues"]["name"] = stats["maxValues"]["name"][:32]


@breaks("bounds hold the live rows")
def a_minimum_is_rounded_up_to_milliseconds(broken: Broken) -> None:
    with broken.statistics(1, "1") as stats:
        stats["minValues"]["at"] = "1969-12-31T23:59:59.995Z"


@breaks("tight bounds are a row's")
def a_tight_minimum_that_no_row_has(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["minValues"]["id"] = -1


@breaks("tight bounds are a row's")
def statistics_stay_tight_beside_a_vector(broken: Broken) -> None:
    with broken.statistics(3, "1") as stats:
        del stats["tightBounds"]
        stats["nullCount"]["name"] = 0
        stats["minValues"]["id"] = 0


@breaks("statistics are of their column's type")
def a_minimum_of_another_type(broken: Broken) -> None:
    with broken.statistics(1, "0") as stats:
        stats["minValues"]["id"] = "zero"


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Broken:
    """A copy that isn't broken yet."""
    table = shutil.copytree(good, tmp_path / "t")
    for checksum in (table / "_delta_log").glob("*.crc"):
        checksum.unlink()
    return Broken(table)


@pytest.mark.spark
@pytest.mark.parametrize(("rule", "name", "damage"), BREAKS, ids=[name for _, name, _ in BREAKS])
def test_a_broken_rule_is_found(broken: Broken, rule: str, name: str, damage: Callable[[Broken], None]) -> None:
    damage(broken)
    with pytest.raises(ProtocolViolation) as violation:
        DeltaLog(broken.table).check()
    assert violation.value.rule == rule, str(violation.value)
    assert violation.value.version is not None


@pytest.mark.spark
def test_checkpoints_in_parts_and_of_v2(broken: Broken) -> None:
    """They say what the classic one does, also when it alone can say it. One that lacks a part isn't there."""
    expected = plain(DeltaLog(broken.table).rows())
    classic = broken.path(5, "checkpoint.parquet").read_bytes()
    parts = broken.in_parts()
    DeltaLog(broken.table).check()
    commits = [broken.path(version).read_bytes() for version in range(6)]
    for version in range(5):
        broken.path(version).unlink()
    log = DeltaLog(broken.table)
    log.check()
    assert (log.versions, plain(log.rows())) == (range(5, 6), expected)
    parts[1].unlink()
    with pytest.raises(ProtocolViolation, match="versions are contiguous"):
        DeltaLog(broken.table)
    for version, commit in enumerate(commits):
        broken.path(version).write_bytes(commit)
    assert plain(DeltaLog(broken.table).rows()) == expected
    broken.path(5, "checkpoint.parquet").write_bytes(classic)
    broken.v2_checkpoint()
    log = DeltaLog(broken.table)
    log.check()
    assert plain(log.rows()) == expected


@pytest.mark.spark
def test_tombstones_expire(broken: Broken) -> None:
    """After the table's own retention, by default a week."""
    log = DeltaLog(broken.table)
    tombstones = log.snapshot().tombstones
    removed = [remove["deletionTimestamp"] for remove in tombstones.values()]
    assert sorted(vector is None for _, vector in tombstones) == [False, False, True, True, True, True]
    week = 7 * 24 * 3600 * 1000
    assert log.snapshot().unexpired(min(removed) + week - 1).keys() == tombstones.keys()
    assert not log.snapshot().unexpired(max(removed) + week)
    broken.without_checkpoint()
    broken.set("delta.deletedFileRetentionDuration", "interval 2 hours")
    assert not DeltaLog(broken.table).snapshot().unexpired(max(removed) + 2 * 3600 * 1000)
    assert DeltaLog(broken.table).snapshot().unexpired(max(removed) + 2 * 3600 * 1000 - 1)


@pytest.mark.spark
def test_transactions_and_domains(broken: Broken) -> None:
    """The latest wins, removed domains are gone, and a transaction's version may go back."""
    broken.without_checkpoint()
    removed = {"domainMetadata": DOMAIN["domainMetadata"] | {"removed": True}}
    broken.append(1, {"txn": TXN["txn"] | {"version": 7}}, DOMAIN)
    broken.append(3, TXN, {"domainMetadata": {"domain": "e", "configuration": "{}", "removed": False}})
    broken.append(4, removed)
    log = DeltaLog(broken.table)
    versions = [log.snapshot(version) for version in log.versions]
    assert [s.transactions.get("app", {}).get("version") for s in versions] == [None, 7, 7, 1, 1, 1]
    assert [sorted(s.domains) for s in versions] == [[], ["d"], ["d"], ["d", "e"], ["e"], ["e"]]
    assert [info["operation"] for info in log.history().values()][-2:] == ["WRITE", "OPTIMIZE"]
