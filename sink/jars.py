"""The jars of Spark's packages: resolved once by Spark's Ivy, afterwards taken from a record.

Ivy takes a second or two to find out, at each start, that nothing has changed. The record is a small file in the
user's cache folder, named by all that decides what Ivy finds. Jars that were deleted or changed since make it void;
then Ivy resolves them again.

The recorded jars come at the end of the JVM's own class path, so Spark's classes win over theirs, as they do when Spark
loads packages. And the JVM can take their classes from an archive (`sink.archive`), which it can't for jars that Spark
loads itself. On a cluster the executors need the jars too: there Spark distributes its packages as ever.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zipfile import BadZipFile, ZipFile

from sink import cache, spark_versions

_LOCAL_MASTER = re.compile(r"local(\[[^\]]*\])?")
_MOVING = re.compile(r"[\[\](),+]|SNAPSHOT|latest\.", re.IGNORECASE)
"""Of versions: what means another jar tomorrow."""


@dataclass(frozen=True)
class Jar:
    """A jar as it was when it was resolved. `modified` is in seconds: the layers of a container image have no more."""

    path: str
    size: int
    modified: int


def stamp(path: str | Path) -> Jar:
    """A file as it is now.

    :raises OSError: it isn't there.
    """
    found = os.stat(path)
    return Jar(str(path), found.st_size, int(found.st_mtime))


def are_ours(options: Mapping[str, str]) -> bool:
    """Whether no one but us says which jars the JVM gets, so that we may put them on its class path.

    :param options: all Spark settings of the job.
    """
    own = [name for name in options if name.startswith("spark.jars") and name not in DECIDING]
    if own or not _LOCAL_MASTER.fullmatch(options.get("spark.master", "")) or "PYSPARK_SUBMIT_ARGS" in os.environ:
        return False
    if any(_MOVING.search(version) for version in _versions(options)):
        return False
    folder = Path(os.environ.get("SPARK_CONF_DIR") or spark_versions.home() / "conf")
    if (folder / "spark-env.sh").exists():  # it may choose another JVM
        return False
    try:
        return "spark.jars" not in (folder / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        return True


def recorded(options: Mapping[str, str]) -> Sequence[Jar] | None:
    """The jars of these packages, if they were resolved before and are as they were then."""
    path = _record(options)
    try:
        jars = [Jar(**jar) for jar in json.loads(path.read_text())] if path is not None else []
        return jars if jars and all(stamp(jar.path) == jar for jar in jars) else None
    except (OSError, ValueError, TypeError):
        return None


def record(options: Mapping[str, str], resolved: str) -> None:
    """Remember what Spark has just resolved.

    :param resolved: `spark.jars` of the session: URIs of files, with commas between them.
    """
    path = _record(options)
    try:
        found = [stamp(unquote(urlsplit(jar).path)) for jar in resolved.split(",")]
        # Spark has Python find packages that are for Python too; the class path doesn't
        has_python = any(name.endswith(".py") for jar in found for name in ZipFile(jar.path).namelist())
    except (OSError, BadZipFile):
        return
    if path is not None and not has_python:
        cache.write(path, json.dumps([vars(jar) for jar in found]))


DECIDING = ("spark.jars.packages", "spark.jars.excludes", "spark.jars.ivy", "spark.jars.repositories")


def _versions(options: Mapping[str, str]) -> Iterator[str]:
    for coordinate in options.get("spark.jars.packages", "").split(","):
        yield coordinate.rpartition(":")[2]


def _record(options: Mapping[str, str]) -> Path | None:
    folder = cache.folder("jars")
    if folder is None:
        return None
    decides = [spark_versions.installed().full, str(spark_versions.home()), str(Path.home())]
    decides += [os.environ.get("DEFAULT_ARTIFACT_REPOSITORY", "")]
    decides += [f"{name}={options.get(name)}" for name in DECIDING]
    return folder / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]}.json"
