"""What the configuration passes on to Spark and Iceberg, as far as a mistake in it would come out late, badly, or
never.

Both take maps of text, of which most is theirs to judge. Here are the few names whose mistakes neither of them reports
well.
"""

import difflib
import re
from collections.abc import Collection, Mapping

from sink.table_properties import refusal

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
"""Of Spark's file source. It ignores names that it doesn't know."""

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

_CATALOG_TYPES = ("hadoop", "hive", "rest", "jdbc", "glue", "nessie", "bigquery")

_MASTER = re.compile(r"local(\[(\d+|\*)(, *\d+)?\])?|local-cluster\[[\d, ]+\]|yarn|\w[\w+.-]*://.+")
_JVM_MEMORY = re.compile(r"[1-9]\d*[kmgt]", re.IGNORECASE)


class MisplacedError(ValueError):
    """A mistake further inside of what was being looked at: `path` leads there."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def check_source(options: Mapping[str, str], *, files: bool) -> None:
    """`source.options`.

    :raises MisplacedError: a number is none, or a name is nearly that of an option.
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


def check_table(properties: Mapping[str, str]) -> None:
    """`tables[].properties`.

    :raises MisplacedError: with such a value nothing could be written, or not as it says.
    """
    refused = refusal(properties)
    if refused is not None:
        name, why = refused
        raise MisplacedError(f"rowdelta does not follow this property: {why}", name)
    for name, value in properties.items():
        if name == "format-version" and value not in ("2", "3"):
            raise MisplacedError(f"got {value!r}, expected 2 or 3, the versions that have row-level deletes", name)
        if name in _NUMBER_PROPERTIES and not re.fullmatch(r"-?\d+", value):
            raise MisplacedError(f"got {value!r}, expected a whole number", name)
        if name in _FORMAT_PROPERTIES and value.lower() != "parquet":
            raise MisplacedError(f"got {value!r}, but rowdelta writes Parquet only; leave it out", name)
        # the one that Parquet itself calls none is known to the writer in lower case
        if name == _CODEC and value not in _CODECS and value.lower() not in _CODECS[:-1]:
            raise MisplacedError(f"got {value!r}, expected one of {', '.join(_CODECS)}", name)


def check_catalog(properties: Mapping[str, str]) -> None:
    """One entry of `catalogs`; an empty one leaves all to Spark's own configuration.

    :raises MisplacedError: the kind of catalog isn't said, where Iceberg would take Hive's, or is none.
    """
    kind = properties.get("type")
    if kind is None:
        if properties and "catalog-impl" not in properties:
            raise MisplacedError(f"a catalog needs a type ({', '.join(_CATALOG_TYPES)}), or the class catalog-impl")
    elif kind.lower() not in _CATALOG_TYPES:
        raise MisplacedError(
            f"got {kind!r}{did_you_mean(kind, _CATALOG_TYPES)}, expected one of {', '.join(_CATALOG_TYPES)}", "type"
        )


def check_spark(settings: Mapping[str, str]) -> None:
    """`spark`: what the JVM needs before there is a Spark that could say what is wrong.

    :raises MisplacedError: a value is none for its setting.
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
