"""How the sink treats each table property of Iceberg, and some features of tables. docs/table-properties.md has the
same table.
"""

from collections.abc import Mapping

from sink.targets.table_properties import PropertyRules, Rule

_PARQUET_PAGES = Rule("warning", "the writer's own page and dictionary sizes are used")
_DELETE_FILES = Rule("warning", "delete files are written with the settings of data files")
_MERGE_ON_READ = Rule("warning", "the sink always adds delete files", unless=("merge-on-read",))

RULES: Mapping[str, Rule] = {
    "format-version": Rule("followed", "2 or 3; version 1 is refused"),
    "write.target-file-size-bytes": Rule("followed", "a larger data file is closed, and another one begun"),
    "write.parquet.row-group-size-bytes": Rule("followed", "of data files"),
    "write.parquet.compression-codec": Rule("followed", "of data files and delete files"),
    "write.parquet.compression-level": Rule("followed", "of data files and delete files"),
    "write.metadata.metrics.*": Rule("followed", "which column bounds and counts are kept"),
    "write.data.path": Rule("followed", "where data and delete files go"),
    "write.object-storage.enabled": Rule("followed", "paths get a hash of the file's name"),
    "write.object-storage.partitioned-paths": Rule("followed", "whether such paths name the partition"),
    "write.py-location-provider.impl": Rule("followed", "PyIceberg's; the class must be installed on the workers"),
    "commit.retry.*": Rule("followed", "how often and how fast a refused commit is tried again"),
    "commit.*": Rule("Iceberg's", "its library makes the commits"),
    "write.metadata.*": Rule("Iceberg's", "where metadata files go, and how many are kept"),
    "write.manifest.*": Rule("Iceberg's", "its library writes manifests"),
    "write.manifest-lists.enabled": Rule("Iceberg's", "its library writes manifest lists"),
    "write.summary.partition-limit": Rule("Iceberg's", "its library writes summaries"),
    "write.avro.*": Rule("Iceberg's", "of its manifests; the sink writes no Avro files"),
    "history.expire.*": Rule("followed", "maintenance.expire keeps as much"),
    "gc.enabled": Rule("followed", "false: maintenance deletes nothing"),
    "compatibility.*": Rule("Iceberg's", "its library writes manifests"),
    "engine.*": Rule("Iceberg's", "of its Hive catalog"),
    "schema.name-mapping.default": Rule("Iceberg's", "for files without field ids, which the sink does not write"),
    "identifier-fields.rely": Rule("other engines'", "whether they may rely on the key being unique"),
    "read.*": Rule("other engines'", "how they read"),
    "write.orc.*": Rule("other engines'", "the sink writes Parquet only"),
    "write.delete.orc.*": Rule("other engines'", "the sink writes Parquet only"),
    "write.delete.avro.*": Rule("other engines'", "the sink writes Parquet only"),
    "write.spark.*": Rule("other engines'", "of statements in Spark"),
    "write.upsert.enabled": Rule("other engines'", "of Flink's sink"),
    "write.delete.isolation-level": Rule("other engines'", "of statements in Spark"),
    "write.update.isolation-level": Rule("other engines'", "of statements in Spark"),
    "write.merge.isolation-level": Rule("other engines'", "of statements in Spark"),
    "write.delete.distribution-mode": Rule("other engines'", "of statements in Spark"),
    "write.update.distribution-mode": Rule("other engines'", "of statements in Spark"),
    "write.merge.distribution-mode": Rule("other engines'", "of statements in Spark"),
    "write.format.default": Rule("warning", "the sink writes Parquet", unless=("parquet",)),
    "write.delete.format.default": Rule(
        "warning", "the sink writes Parquet, and Puffin in format version 3", unless=("parquet", "puffin")
    ),
    "write.delete.mode": _MERGE_ON_READ,
    "write.update.mode": _MERGE_ON_READ,
    "write.merge.mode": _MERGE_ON_READ,
    "write.delete.granularity": Rule(
        "warning", "a position delete file may be for several data files", unless=("partition",)
    ),
    "write.delete.target-file-size-bytes": Rule("warning", "delete files are as large as the micro-batch makes them"),
    "write.delete.parquet.*": _DELETE_FILES,
    "write.distribution-mode": Rule("warning", "rows go to tasks by their key", unless=("none", "hash")),
    "write.wap.enabled": Rule("warning", "commits are published at once", unless=("false",)),
    "write.parquet.page-size-bytes": _PARQUET_PAGES,
    "write.parquet.page-row-limit": _PARQUET_PAGES,
    "write.parquet.page-version": _PARQUET_PAGES,
    "write.parquet.dict-size-bytes": _PARQUET_PAGES,
    "write.parquet.row-group-check-min-record-count": _PARQUET_PAGES,
    "write.parquet.row-group-check-max-record-count": _PARQUET_PAGES,
    "write.parquet.row-group-size-track-uncompressed": _PARQUET_PAGES,
    "write.parquet.dict-encoding-enabled.column.*": _PARQUET_PAGES,
    "write.parquet.bloom-filter-enabled.column.*": Rule("warning", "no bloom filters are written", unless=("false",)),
    "write.parquet.bloom-filter-fpp.column.*": Rule("warning", "no bloom filters are written"),
    "write.parquet.bloom-filter-ndv.column.*": Rule("warning", "no bloom filters are written"),
    "write.parquet.bloom-filter-max-bytes": Rule("warning", "no bloom filters are written"),
    "write.parquet.bloom-filter-adaptive-enabled": Rule("warning", "no bloom filters are written", unless=("false",)),
    "write.parquet.stats-enabled.column.*": Rule("warning", "Parquet's statistics are written", unless=("true",)),
    "write.parquet.shred-variants": Rule("warning", "variants are not shredded", unless=("false",)),
    "write.parquet.variant-inference-buffer-size": Rule("warning", "variants are not shredded"),
    "write.location-provider.impl": Rule(
        "refused", "the writers are in Python and can't use a Java class; use write.py-location-provider.impl"
    ),
    "write.object-storage.path": Rule("refused", "old and not followed; use write.data.path"),
    "write.folder-storage.path": Rule("refused", "old and not followed; use write.data.path"),
    "encryption.*": Rule("refused", "the sink would write unencrypted files"),
}
PROPERTIES = PropertyRules(RULES)

FEATURES: Mapping[str, Rule] = {
    "sort order": Rule("followed", "rows are sorted by it, unless maintenance.rewrite.sort names other columns"),
    "sort order with a transform, or a field of a struct": Rule(
        "warning", "rows are not sorted by it; maintenance.rewrite.sort sorts them by columns"
    ),
    "write default of a column": Rule("warning", "a field that messages lack becomes null"),
    "column of type variant": Rule("refused", "the writers are in Python, and PyIceberg has no such type"),
    "uuid or fixed in a list, map or struct": Rule("refused", "the length of values is only checked in columns"),
    "s3.sse.type, s3.acl or gcs.encryption-key of the catalog": Rule(
        "refused", "PyArrow writes the data files, and doesn't know them (fine with `s3` and `none`)"
    ),
    "branch or tag as target": Rule("refused", "commits go to main"),
}
