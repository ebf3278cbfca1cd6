"""Checks early whether the sink can write to the folders in the configuration."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sink.config import Config
from sink.config.local_paths import local_path
from sink.errors import ConfigError


def check_folders(spark: SparkSession | None, config: Config) -> None:
    """Check the folders on local disks that a run writes into. Other file systems report a problem when the run writes.

    :param spark: the session. If it is None, Hadoop's defaults are used.
    :raises ConfigError: one of them isn't a folder that can be written to, and can't be created.
    """
    for key, place in _folders(config):
        path = _local(spark, place) if spark is not None else local_path(place)
        reason = None if path is None else _obstacle(path)
        if reason is not None:
            raise ConfigError(f"{key}: got {place!r}, expected a folder to write into, but {reason}. Name another.")


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    yield "sink.checkpoint", config.sink.checkpoint
    if config.source.buffer is not None:
        yield "source.buffer", config.source.buffer
    if config.index is not None and config.index.location is not None:
        yield "index.location", config.index.location
    for name in config.catalogs:
        warehouse = config.warehouse(name)
        if warehouse is not None:
            yield f"catalogs.{name}.warehouse", warehouse


def _local(spark: SparkSession, place: str) -> Path | None:
    """The path, if it is on a local disk; else None. A path without a scheme may be in a cluster's file system."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        path = jvm.org.apache.hadoop.fs.Path(place)
        scheme = path.getFileSystem(spark._jsc.hadoopConfiguration()).getScheme()
    except (Py4JError, PySparkException):
        return None
    return Path(str(path.toUri().getPath())) if scheme == "file" else None


def _obstacle(path: Path) -> str | None:
    """Why a folder can't be created and written to, or None. This check leaves nothing behind, and doesn't create the
    folder.
    """
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            return f"{existing} is a file"
        # permissions aren't enough: there are read-only disks, and /proc
        with tempfile.TemporaryDirectory(prefix=".rowdelta-", dir=existing):
            return None
    except OSError as error:
        return f"nothing can be written there ({error.strerror})"
