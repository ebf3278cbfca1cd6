"""How the sink treats each table property and each table feature of Delta Lake. docs/table-properties.md has the same
tables.

Sources: PROTOCOL.md ("Table Features", "Writer Version Requirements", "Valid Feature Names in Table Features"), and for
what only the reference implementation knows, its `DeltaConfig.scala` and `TableFeature.scala`.

A feature that a protocol names may be unused: writer versions 4 to 6 name six features without being asked
("Writer Version Requirements"). So most features are judged by what uses them: a property, or the metadata of a column.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sink.errors import TableError
from sink.targets.table_properties import PropertyRules, Rule

_OFF = ("false",)
_LOG_CLEANUP = Rule("Delta's", "its library removes old log files")
_TIMESTAMPS = Rule("Delta's", "its library puts the time into each commit")
_CONVERTED = Rule("Delta's", "of tables that were converted from Iceberg")
_PROTOCOL = Rule("Delta's", "its library raises the protocol to what the table's features need")
_FILE_SIZES = Rule("warning", "the sink's own merges set the sizes of files: see merge_small_files", unless=_OFF)
_CHANGE_DATA = Rule(
    "refused",
    "an update would have to write its rows into change data files too; set it to false, or use mode: append",
    unless=_OFF,
    append_may=True,
)
_NO_VECTORS_ALLOWED = Rule(
    "refused", "it forbids deletion vectors, or demands more than the sink writes; set it to false", unless=_OFF
)
_ICEBERG_METADATA = Rule("refused", "the formats that it adds forbid deletion vectors; remove it")
_PARTITION_COLUMNS = Rule("refused", "partition columns are not in the sink's data files; set it to false", unless=_OFF)
_COORDINATED = Rule("refused", "commits go to the table's own log, not to a coordinator")
_REDIRECTED = Rule("refused", "the table is only a pointer to another one; write to that one")

RULES: Mapping[str, Rule] = {
    "delta.targetFileSize": Rule("followed", "a larger data file is closed, and another one begun"),
    "delta.parquet.compression.codec": Rule("followed", "of data files"),
    "delta.dataSkippingNumIndexedCols": Rule("followed", "how many columns have bounds in the log"),
    "delta.dataSkippingStatsColumns": Rule("followed", "which columns have bounds in the log"),
    "delta.dataSkippingStringPrefixLength": Rule("followed", "how long the bounds of texts may be"),
    "delta.columnMapping.mode": Rule("followed", "none, name or id"),
    "delta.enableTypeWidening": Rule("followed", "columns get wider types only where it is true"),
    "delta.checkpointInterval": Rule("followed", "how many commits may come between two checkpoints"),
    "delta.appendOnly": Rule(
        "refused", "rows are updated and deleted; set it to false, or use mode: append", unless=_OFF, append_may=True
    ),
    "delta.enableDeletionVectors": Rule(
        "refused",
        "rows are deleted with deletion vectors; set it to true, or use deletes: copy-on-write or mode: append",
        unless=("true",),
        append_may=True,
        copy_may=True,
    ),
    "delta.enableChangeDataFeed": _CHANGE_DATA,
    "delta.enableChangeDataCapture": _CHANGE_DATA,
    "delta.enableRowTracking": Rule(
        "refused",
        "a row that moves to another file would get a new id; set it to false, or use mode: append",
        unless=_OFF,
        append_may=True,
    ),
    "delta.rowTracking*": Rule("Delta's", "its library gives ids to new files"),
    "delta.constraints.*": Rule(
        "refused", "rows are not checked against it; remove it with ALTER TABLE … DROP CONSTRAINT"
    ),
    "delta.enableIcebergCompat*": _NO_VECTORS_ALLOWED,
    "delta.enableIcebergWriterCompat*": _NO_VECTORS_ALLOWED,
    "delta.universalFormat.*": _ICEBERG_METADATA,
    "delta.compatibility.symlinkFormatManifest.enabled": Rule(
        "refused", "readers of manifests know no deletion vectors; set it to false", unless=_OFF
    ),
    "delta.enableMaterializePartitionColumnsFeature": _PARTITION_COLUMNS,
    "delta.writePartitionColumnsToParquet": _PARTITION_COLUMNS,
    "delta.coordinatedCommits*": _COORDINATED,
    "delta.redirectReaderWriter*": _REDIRECTED,
    "delta.redirectWriterOnly*": _REDIRECTED,
    "delta.setTransactionRetentionDuration": Rule(
        "warning", "the sink's txn entry may expire, and then its domain alone keeps two drivers apart"
    ),
    "delta.randomizeFilePrefixes": Rule("followed", "data files lie in folders with random names"),
    "delta.randomPrefixLength": Rule("followed", "how long these names are"),
    "delta.parquet.format.version": Rule("warning", "data pages of version 1 are written", unless=("1.0.0",)),
    "delta.autoOptimize": _FILE_SIZES,
    "delta.autoOptimize.*": _FILE_SIZES,
    "delta.tuneFileSizesForRewrites": _FILE_SIZES,
    "delta.enableVariantShredding": Rule("warning", "variants are not shredded", unless=_OFF),
    "delta.isolationLevel": Rule(
        "Delta's", "each commit declares that it has read the whole table, as for serializable"
    ),
    "delta.checkpoint*": Rule("Delta's", "its library writes checkpoints"),
    "delta.logRetentionDuration": _LOG_CLEANUP,
    "delta.enableExpiredLogCleanup": _LOG_CLEANUP,
    "delta.enableFullRetentionRollback": _LOG_CLEANUP,
    "delta.sampleRetentionDuration": _LOG_CLEANUP,
    "delta.requireCheckpointProtectionBeforeVersion": _LOG_CLEANUP,
    "delta.dropFeatureTruncateHistory.retentionDuration": _LOG_CLEANUP,
    "delta.deletedFileRetentionDuration": Rule("Delta's", "of VACUUM, which maintenance.orphans runs"),
    "delta.columnMapping.maxColumnId": Rule("Delta's", "its library counts columns"),
    "delta.enableInCommitTimestamps": _TIMESTAMPS,
    "delta.inCommitTimestampEnablement*": _TIMESTAMPS,
    "delta.minReaderVersion": _PROTOCOL,
    "delta.minWriterVersion": _PROTOCOL,
    "delta.ignoreProtocolDefaults": _PROTOCOL,
    "delta.feature.*": Rule("Delta's", "it adds a feature to the protocol; those of the table below may be refused"),
    "delta.castIcebergTimeType": _CONVERTED,
    "delta.ignoreIcebergBucketPartition": _CONVERTED,
}
"""Name of a property -> rule, as in `PropertyRules`."""

PROPERTIES = PropertyRules(RULES, ignores_case=True)
"""Delta takes the names of its properties in any case (`DeltaConfigs.validateConfiguration`)."""


@dataclass(frozen=True)
class Feature:
    """How the sink treats a table feature that a protocol names.

    :param treatment: `if unused` means that the sink writes the table unless something of it uses the feature, which a
        rule for properties or for columns refuses.
    :param does: what the sink does, in words.
    """

    treatment: Literal["followed", "Delta's", "if unused", "refused"]
    does: str


def _unless_column(has: str) -> str:
    return f"a table with {has} is refused"


_TYPE = "the writers are in Python and don't know the type"
_VARIANT = Feature("if unused", _unless_column(f"a column of type variant, since {_TYPE}"))
_SHREDDING = Feature("if unused", _unless_column("a column of type variant"))
_PLACES = Feature("if unused", _unless_column(f"a column of type geometry or geography, since {_TYPE}"))
_WIDENING = Feature("followed", "columns get wider types, and the log says from which")
_MANAGED = Feature("refused", "a catalog makes the commits, and the sink makes its own; drop the feature")
_COMPAT = Feature("if unused", "see the properties delta.enableIcebergCompat*")
_POINTER = Feature("refused", _REDIRECTED.does)

FEATURES: Mapping[str, Feature] = {
    "appendOnly": Feature("followed", "see the property delta.appendOnly"),
    "invariants": Feature("followed", "of NOT NULL; an invariant that is an expression is refused"),
    "checkConstraints": Feature("if unused", "see the properties delta.constraints.*"),
    "changeDataFeed": Feature("if unused", "see the property delta.enableChangeDataFeed"),
    "generatedColumns": Feature("if unused", _unless_column("a generated column")),
    "columnMapping": Feature("followed", "files, bounds and partitions have the physical names"),
    "identityColumns": Feature("if unused", _unless_column("an identity column")),
    "deletionVectors": Feature("followed", "this is how rows are deleted"),
    "rowTracking": Feature("if unused", "see the property delta.enableRowTracking; files that stay keep their ids"),
    "timestampNtz": Feature("followed", "columns may have this type"),
    "domainMetadata": Feature("followed", "the sink's position is in a domain; all others stay"),
    "v2Checkpoint": Feature("Delta's", "its library writes checkpoints"),
    "clustering": Feature("followed", "these columns always have bounds; OPTIMIZE clusters the files"),
    "vacuumProtocolCheck": Feature("Delta's", "of VACUUM"),
    "inCommitTimestamp": Feature("Delta's", _TIMESTAMPS.does),
    "typeWidening": _WIDENING,
    "typeWidening-preview": _WIDENING,
    "checkpointProtection": Feature("Delta's", _LOG_CLEANUP.does),
    "allowColumnDefaults": Feature("if unused", _unless_column("a default of a column")),
    "icebergCompatV1": _COMPAT,
    "icebergCompatV2": _COMPAT,
    "icebergCompatV3": _COMPAT,
    "variantType": _VARIANT,
    "variantType-preview": _VARIANT,
    "variantShredding": _SHREDDING,
    "variantShredding-preview": _SHREDDING,
    "geospatial": _PLACES,
    "geospatial-dev": _PLACES,
    "materializePartitionColumns": Feature("refused", "partition columns are not in the sink's data files; drop it"),
    "catalogManaged": _MANAGED,
    "catalogOwned-preview": _MANAGED,
    "coordinatedCommits-preview": _MANAGED,
    "redirectReaderWriter-preview": _POINTER,
    "redirectWriterOnly-preview": _POINTER,
    "adaptiveMetadata-preview": Feature("refused", "the log's content is elsewhere; drop the feature"),
}
"""Name of a table feature, as in `readerFeatures` and `writerFeatures` -> how the sink treats it."""

COLUMN_METADATA: Mapping[str, str] = {
    "delta.generationExpression": "is generated; drop the column, or create the table without the expression",
    "delta.identity.start": "is an identity column, whose values only Delta may make; create the table without it",
    "delta.invariants": "has an invariant, which rows are not checked against; use NOT NULL, or drop the column",
    "__CHAR_VARCHAR_TYPE_STRING": "is of type char or varchar, whose length only Spark heeds; create it with string",
    "CURRENT_DEFAULT": "has a default, which a field that messages lack would not get; ALTER COLUMN … DROP DEFAULT",
}
"""Key in the metadata of a column that the sink can't write -> why, and the way out (PROTOCOL.md: "Generated Columns",
"Identity Columns", "Column Invariants", "Default Columns"; Spark's `CharVarcharUtils`).
"""
_UNKNOWN_TYPES = ("variant", "geometry", "geography", "void")
_VECTORS = "delta.enableDeletionVectors"
_NEWEST = {"minReaderVersion": 3, "minWriterVersion": 7}
"""The highest versions that there are ("Protocol Evolution"); from these on, features say what a writer must know."""


def feature_refusal(properties: Mapping[str, str]) -> tuple[str, str] | None:
    """The first property of a new table that would ask for a feature that the sink refuses, and why: a property
    `delta.feature.NAME`.
    """
    features = {f"delta.feature.{feature}".lower(): found for feature, found in FEATURES.items()}
    for name in properties:
        if not name.lower().startswith("delta.feature."):
            continue
        found = features.get(name.lower())
        if found is None:
            return name, "rowdelta does not know this table feature; leave it out"
        if found.treatment == "refused":
            return name, found.does
    return None


_PURPOSES = {
    "delta.feature.domainMetadata": "metadata domains, for its position",
    _VECTORS: "deletion vectors, for deleting rows",
}


def required(*, appends: bool, copies: bool = False) -> dict[str, str]:
    """Properties that a table needs, and a new one gets: for the sink's position, and for deleting rows.

    :param appends: whether the sink only appends to the table.
    :param copies: whether it deletes rows copy-on-write.
    """
    return {"delta.feature.domainMetadata": "supported"} | ({} if appends or copies else {_VECTORS: "true"})


def check_required(
    table: str,
    protocol: Mapping[str, Any],
    properties: Mapping[str, str],
    *,
    appends: bool = False,
    copies: bool = False,
) -> None:
    """Check that a table that exists has the features that the sink needs. The sink doesn't add them by itself, because
    then older readers and writers can't use the table any more.

    :param protocol: the content of the log's `protocol` action.
    :param properties: `configuration` of the log's `metaData` action.
    :param appends: whether the sink only appends to the table.
    :param copies: whether it deletes rows copy-on-write.
    :raises TableError: a feature is missing. The message has the statement that adds it.
    """
    features = protocol.get("writerFeatures") or ()
    given = {name.lower(): value.lower() for name, value in properties.items()}
    has = {
        "delta.feature.domainMetadata": "domainMetadata" in features,
        _VECTORS: "deletionVectors" in features and given.get(_VECTORS.lower()) == "true",
    }
    needed = required(appends=appends, copies=copies)
    missing = {name: value for name, value in needed.items() if not has[name]}
    if missing:
        set_ = ", ".join(f"'{name}' = '{value}'" for name, value in missing.items())
        lacking = " and ".join(_PURPOSES[name] for name in missing)
        raise TableError(
            f"{table} lacks what rowdelta needs: {lacking}. Run ALTER TABLE … SET TBLPROPERTIES ({set_}). This raises "
            "the table's protocol, so look first whether all its readers and writers can follow; or write to another "
            "table."
        )


def check_protocol(table: str, protocol: Mapping[str, Any]) -> None:
    """Check a table's protocol, which says what every writer must know.

    :param protocol: the content of the log's `protocol` action.
    :raises TableError: it is newer than what the sink knows, or has a feature that the sink doesn't know or refuses.
    """
    for name, newest in _NEWEST.items():
        if int(protocol.get(name, 1)) > newest:
            raise TableError(
                f"{table}: its protocol has {name} {protocol[name]}, and rowdelta knows versions up to {newest}. Write "
                "to another table, or use a newer rowdelta."
            )
    for feature in dict.fromkeys([*(protocol.get("writerFeatures") or ()), *(protocol.get("readerFeatures") or ())]):
        found = FEATURES.get(feature)
        if found is None:
            raise TableError(
                f"{table}: its protocol has the table feature {feature}, which rowdelta does not know, so it might "
                f"break what the feature promises. Drop it (ALTER TABLE … DROP FEATURE `{feature}`), use a newer "
                "rowdelta, or write to another table."
            )
        if found.treatment == "refused":
            raise TableError(
                f"{table}: its protocol has the table feature {feature}, with which rowdelta does not write: "
                f"{found.does} (ALTER TABLE … DROP FEATURE `{feature}`), or write to another table."
            )


def check_columns(table: str, schema: str) -> None:
    """Check the columns of a table that exists.

    :param schema: the log's `metaData.schemaString`.
    :raises TableError: the sink can't write one of them.
    """
    for path, field in _columns(json.loads(schema)["fields"]):
        for key, why in COLUMN_METADATA.items():
            if key in field.get("metadata", {}):
                raise TableError(f"{table}: the column {path} {why}; or write to another table.")
        dtype = field["type"]
        if isinstance(dtype, str) and dtype.startswith(_UNKNOWN_TYPES):
            raise TableError(
                f"{table} has the column {path} of type {dtype}, which rowdelta's writers don't know. Drop the column, "
                "or write to another table."
            )


def _columns(fields: Sequence[Mapping[str, Any]], outer: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each column with its path, inner ones too (PROTOCOL.md, "Schema Serialization Format")."""
    for field in fields:
        path = f"{outer}{field['name']}"
        yield path, field
        yield from _inner(field["type"], f"{path}.")


def _inner(dtype: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(dtype, str):
        return
    if dtype["type"] == "struct":
        yield from _columns(dtype["fields"], path)
        return
    for part, name in (("elementType", "element"), ("keyType", "key"), ("valueType", "value")):
        if part in dtype:
            if isinstance(dtype[part], str):
                yield f"{path}{name}", {"type": dtype[part]}
            yield from _inner(dtype[part], f"{path}{name}.")
