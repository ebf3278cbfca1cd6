"""What a table format can do and can't. The rest of the sink asks here, instead of asking for a format by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sink.targets.delta.table_properties import PROPERTIES as DELTA_PROPERTIES
from sink.targets.delta.table_properties import feature_refusal
from sink.targets.iceberg.table_properties import PROPERTIES as ICEBERG_PROPERTIES
from sink.targets.table_properties import PropertyRules

Format = Literal["iceberg", "delta"]


@dataclass(frozen=True)
class Capabilities:
    """What one format can do.

    :param name: the format's name in messages.
    :param deletes: kinds of deletes, as in `tables[].deletes`.
    :param transforms: partition transforms, as in `sink.config.PartitionField`.
    :param empty_partition_is_null: an empty text in a partition column is read as null.
    :param clustering_columns: a table can be clustered by so many columns; 0 if there is no clustering.
    :param reserved_columns: names that a column can't have.
    :param why_reserved: what has these names.
    :param properties: how the sink treats the format's table properties.
    :param feature_refusal: finds the first property of a new table that asks for a feature which the sink refuses, and
        says why.
    """

    name: str
    deletes: tuple[str, ...]
    transforms: tuple[str, ...]
    empty_partition_is_null: bool
    clustering_columns: int
    reserved_columns: frozenset[str]
    why_reserved: str
    properties: PropertyRules
    feature_refusal: Callable[[Mapping[str, str]], tuple[str, str] | None] = lambda _: None


ICEBERG = Capabilities(
    name="Iceberg",
    deletes=("position", "equality", "copy-on-write"),
    transforms=("identity", "bucket", "truncate", "year", "month", "day", "hour"),
    empty_partition_is_null=False,
    clustering_columns=0,
    reserved_columns=frozenset(
        {
            "_file",
            "_pos",
            "_deleted",
            "_spec_id",
            "_partition",
            "_change_type",
            "_change_ordinal",
            "_commit_snapshot_id",
            "_row_id",
            "_last_updated_sequence_number",
        }
    ),
    # spec, Reserved Field IDs
    why_reserved="Iceberg has a metadata column of this name, and reads no table that has one too",
    properties=ICEBERG_PROPERTIES,
)

DELTA = Capabilities(
    name="Delta",
    # PROTOCOL.md, "Deletion Vectors": there is no delete by value
    deletes=("position", "copy-on-write"),
    # "Partition Value Serialization": the values of columns
    transforms=("identity",),
    # "Partition Value Serialization": both are written as ""
    empty_partition_is_null=True,
    # `spark.databricks.delta.clusteredTable.numClusteringColumnsLimit`
    clustering_columns=4,
    # those of the change data feed ("Reader Requirements for AddCDCFile"), and Spark's own of a file and a row in it
    reserved_columns=frozenset({"_change_type", "_commit_version", "_commit_timestamp", "_metadata"}),
    why_reserved="Spark and Delta's change data feed have columns of their own with this name",
    properties=DELTA_PROPERTIES,
    feature_refusal=feature_refusal,
)

CAPABILITIES: Mapping[Format, Capabilities] = {"iceberg": ICEBERG, "delta": DELTA}
