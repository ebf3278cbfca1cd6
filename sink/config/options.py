"""Checks some options that the configuration passes on to Spark, Iceberg and Delta Lake.

They check most of them themselves. This module checks the few whose mistakes they would report late, badly, or never.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from sink.targets.capabilities import DELTA, ICEBERG, Capabilities

_FILE_OPTIONS = (
    "allowDuplicatedFileNames",
    "cleanSource",
    "datetimeRebaseMode",
    "encoding",
    "fileNameOnly",
    "ignoreCorruptFiles",
    "ignoreMissingFiles",
    "int96RebaseMode",
    "latestFirst",
    "lineSep",
    "maxBytesPerTrigger",
    "maxCachedFiles",
    "maxFileAge",
    "maxFilesPerTrigger",
    "mergeSchema",
    "path_format",
    "pathGlobFilter",
    "recursiveFileLookup",
    "sourceArchiveDir",
    "wholetext",
)
"""Options of Spark's file source, which ignores names that it doesn't know."""

_NUMBER_OPTIONS = (
    "maxbytespertrigger",
    "maxfilespertrigger",
    "maxoffsetspertrigger",
    "maxrecordsperpartition",
    "minoffsetspertrigger",
    "minpartitions",
)

_NUMBER_PROPERTIES = (
    "commit.retry.max-wait-ms",
    "commit.retry.min-wait-ms",
    "commit.retry.num-retries",
    "commit.retry.total-timeout-ms",
    "write.metadata.metrics.max-inferred-column-defaults",
    "write.parquet.compression-level",
    "write.parquet.row-group-size-bytes",
    "write.target-file-size-bytes",
)
_FORMAT_PROPERTIES = ("write.format.default", "write.delete.format.default")
_CODEC = "write.parquet.compression-codec"
_CODECS = ("zstd", "gzip", "snappy", "lz4", "brotli", "uncompressed")

_DELTA = "delta"
_CATALOG_TYPES = ("hadoop", "hive", "rest", "jdbc", "glue", "nessie", "bigquery", _DELTA)
_DELTA_KEYS = ("type", "warehouse", "spark_catalog")

_MASTER = re.compile(r"local(\[(\d+|\*)(, *\d+)?\])?|local-cluster\[[\d, ]+\]|yarn|\w[\w+.-]*://.+")
_JVM_MEMORY = re.compile(r"[1-9]\d*[kmgt]", re.IGNORECASE)


class MisplacedError(ValueError):
    """A mistake inside the checked value. `path` says where."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


@contextmanager
def at(*path: str | int) -> Iterator[None]:
    """Put `path` before the path of a `MisplacedError` that is raised inside this context."""
    try:
        yield
    except MisplacedError as error:
        raise MisplacedError(str(error), *path, *error.path) from None


def check_source(options: Mapping[str, str], *, files: bool) -> None:
    """Check `source.options`.

    :param files: whether the source is Spark's file source.
    :raises MisplacedError: a value isn't a number where it must be, or a name looks like a misspelled option.
    """
    for name, value in options.items():
        if name.lower() in _NUMBER_OPTIONS and not re.fullmatch(r"0*[1-9]\d*", value):
            raise MisplacedError(f"got {value!r}, expected a whole number above 0, such as 100", name)
        known = [option.lower() for option in _FILE_OPTIONS]
        if files and name.lower() not in known:
            close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.85)
            if close:
                meant = _FILE_OPTIONS[known.index(close[0])]
                raise MisplacedError(f"Spark has no such option (did you mean {meant!r}?), and would ignore it", name)


def cleaning_warning(options: Mapping[str, str]) -> str | None:
    """What files sources lose if Spark takes applied files away, as `source.options` may say."""
    how = next((value.lower() for name, value in options.items() if name.lower() == "cleansource"), "off")
    if how == "off":
        return None
    way_out = (
        "Before that, move the files back, with their modification times"
        if how == "archive"
        else "Leave the option out, and delete files when no snapshot is left that lacks them"
    )
    return (
        f"source.options.cleanSource: {how} takes applied files away. A table that goes back, by a rollback, a reset "
        f"or a DROP, needs them again, and nothing tells that they are gone. {way_out}"
    )


def check_table(properties: Mapping[str, str], format_: Capabilities, *, appends: bool, copies: bool) -> None:
    """Check `tables[].properties`.

    :param format_: of the table.
    :param appends: whether the sink only appends to the table.
    :param copies: whether it deletes rows copy-on-write.
    :raises MisplacedError: with this value the sink couldn't write, or would write something else than the value says.
    """
    refused = format_.properties.refusal(properties, appends=appends, copies=copies)
    refused = refused or format_.feature_refusal(properties)
    if refused is not None:
        name, why = refused
        raise MisplacedError(f"rowdelta does not follow this property: {why}", name)
    if format_ is DELTA:
        _check_delta_properties(properties)
    else:
        _check_iceberg_properties(properties)


def _check_delta_properties(properties: Mapping[str, str]) -> None:
    for name in properties:
        if name.lower().startswith("delta."):
            if DELTA.properties.rule(name) is None:
                known = [known for known in DELTA.properties.by_name if not known.endswith("*")]
                raise MisplacedError(f"Delta has no such property{did_you_mean(name, known)}", name)
        elif ICEBERG.properties.rule(name) is not None:
            raise MisplacedError(
                "this is a property of Iceberg, and the table is a Delta table, whose properties begin with delta.; "
                "leave it out",
                name,
            )


def _check_iceberg_properties(properties: Mapping[str, str]) -> None:
    for name, value in properties.items():
        if DELTA.properties.rule(name) is not None:
            raise MisplacedError(
                "this is a property of Delta Lake, and the table is an Iceberg table; leave it out", name
            )
        if name == "format-version" and value not in ("2", "3"):
            raise MisplacedError(f"got {value!r}, expected 2 or 3, the versions that have row-level deletes", name)
        if name in _NUMBER_PROPERTIES and not re.fullmatch(r"-?\d+", value):
            raise MisplacedError(f"got {value!r}, expected a whole number", name)
        if name in _FORMAT_PROPERTIES and value.lower() != "parquet":
            raise MisplacedError(f"got {value!r}, but rowdelta writes Parquet only; leave it out", name)
        # the writer knows "uncompressed" in lower case only
        if name == _CODEC and value not in _CODECS and value.lower() not in _CODECS[:-1]:
            raise MisplacedError(f"got {value!r}, expected one of {', '.join(_CODECS)}", name)


def is_delta(properties: Mapping[str, str]) -> bool:
    """Whether an entry of `catalogs` is a catalog of Delta tables."""
    return properties.get("type", "").lower() == _DELTA


def check_catalog(properties: Mapping[str, str]) -> None:
    """Check one entry of `catalogs`. If the entry is empty, Spark's own configuration decides everything.

    :raises MisplacedError: the type is unknown, or missing. If it is missing, Iceberg would use a Hive catalog. Or a
        Delta catalog doesn't say where its tables are.
    """
    kind = properties.get("type")
    if kind is None:
        if properties and "catalog-impl" not in properties:
            raise MisplacedError(f"a catalog needs a type ({', '.join(_CATALOG_TYPES)}), or the class catalog-impl")
    elif kind.lower() not in _CATALOG_TYPES:
        raise MisplacedError(
            f"got {kind!r}{did_you_mean(kind, _CATALOG_TYPES)}, expected one of {', '.join(_CATALOG_TYPES)}", "type"
        )
    elif is_delta(properties):
        _check_delta_catalog(properties)


def _check_delta_catalog(properties: Mapping[str, str]) -> None:
    for name in properties:
        if name not in _DELTA_KEYS:
            raise MisplacedError(
                f"unknown key{did_you_mean(name, _DELTA_KEYS)}. A catalog of type delta has: {', '.join(_DELTA_KEYS)}; "
                "settings of file systems belong into the section spark, such as spark.hadoop.fs.s3a.endpoint",
                name,
            )
    if ("warehouse" in properties) == ("spark_catalog" in properties):
        given = "both" if "warehouse" in properties else "neither"
        raise MisplacedError(
            f"got {given}, expected either warehouse (a folder, whose tables are <warehouse>/<namespace>/<table>) or "
            "spark_catalog: true (tables of Spark's session catalog)"
        )
    if properties.get("warehouse") == "":
        raise MisplacedError("got '', expected a folder, such as ./warehouse or s3a://lake/warehouse", "warehouse")
    if properties.get("spark_catalog", "true") != "true":
        raise MisplacedError(
            f"got {properties['spark_catalog']!r}, expected true; or name a warehouse instead", "spark_catalog"
        )


def check_spark(settings: Mapping[str, str]) -> None:
    """Check `spark`: the settings that the JVM needs before Spark runs and could report a mistake.

    :raises MisplacedError: a setting can't have this value.
    """
    master, memory = settings.get("spark.master"), settings.get("spark.driver.memory")
    if master is not None and not _MASTER.fullmatch(master):
        raise MisplacedError(
            f"got {master!r}, expected local[*], local[4], yarn, spark://host:7077 or k8s://…", "spark.master"
        )
    if memory is not None and not _JVM_MEMORY.fullmatch(memory):
        raise MisplacedError(f"got {memory!r}, expected a number and a unit, such as 512m or 4g", "spark.driver.memory")


def did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
