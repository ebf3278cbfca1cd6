"""Remembers the jars of Spark's packages: Spark's Ivy resolves them once, and later starts take them from a record.

At each start, Ivy needs a second or two to find out that nothing has changed. The record is a small file in the user's
cache folder. Its name depends on everything that decides what Ivy finds. If a jar was deleted or changed, the record is
void, and Ivy resolves the packages again.

The recorded jars are at the end of the JVM's own class path. So Spark's classes come first, as they do when Spark loads
packages itself. The JVM can also take the jars' classes from an archive (`sink.spark.archive`), which isn't possible
for jars that Spark loads itself. On a cluster the executors need the jars too, so there Spark distributes its packages
as usual.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit
from zipfile import BadZipFile, ZipFile

from sink.spark import cache
from sink.spark import versions as spark_versions

_LOCAL_MASTER = re.compile(r"local(\[[^\]]*\])?")
_MOVING = re.compile(r"[\[\](),+]|SNAPSHOT|latest\.", re.IGNORECASE)
"""Fits versions that may mean another jar tomorrow."""
_OTHER_SECONDS = 120.0
"""Time for another process to download the packages and start its JVM."""

log = logging.getLogger("rowdelta")


@dataclass(frozen=True)
class Jar:
    """A jar as it was when it was resolved. `modified` is in seconds, since the layers of a container image store no
    fractions.
    """

    path: str
    size: int
    modified: int


def stamp(path: str | Path) -> Jar:
    """The current state of a file.

    :raises OSError: there is no such file.
    """
    found = os.stat(path)
    return Jar(str(path), found.st_size, int(found.st_mtime))


def are_ours(options: Mapping[str, str]) -> bool:
    """Whether only rowdelta decides which jars the JVM gets. Then it may put them on the JVM's class path.

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
    """The jars of these packages, if they were resolved before and have not changed since."""
    path = _record(options)
    try:
        jars = [Jar(**jar) for jar in json.loads(path.read_text())] if path is not None else []
        return jars if jars and all(stamp(jar.path) == jar for jar in jars) else None
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def resolving(options: Mapping[str, str]) -> Iterator[Sequence[Jar]]:
    """Yields the recorded jars of these packages, or none: then the caller lets Ivy resolve them, and records them.

    Meanwhile other processes that would do the same wait, because Ivy's cache isn't made for several downloads of the
    same file at once. They don't wait for ever, since Ivy may hang.
    """
    found = recorded(options)
    folder = cache.folder("jars")
    if found is not None or folder is None:
        yield found or ()
        return
    with ExitStack() as stack:
        with suppress(OSError):  # without the lock Spark starts as well
            lock = stack.enter_context((folder / ".lock").open("w"))
            _wait_for(lock)
        yield recorded(options) or ()


def _wait_for(lock: IO[str]) -> None:
    began, is_told = time.monotonic(), False
    while time.monotonic() - began < _OTHER_SECONDS:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_told:
                log.info("another process is resolving Spark's packages; waiting for it")
                is_told = True
            time.sleep(0.1)


_UNUSED_PYTHON = "io.delta_delta-spark"
"""Beginning of the name of a jar whose Python modules nobody needs: the sink calls Delta's Java classes."""


def record(options: Mapping[str, str], resolved: str) -> None:
    """Store which jars Spark has just resolved.

    :param resolved: `spark.jars` of the session: URIs of files, with commas between them.
    """
    path = _record(options)
    try:
        found = [stamp(unquote(urlsplit(jar).path)) for jar in resolved.split(",")]
        # Spark also puts packages with Python modules on Python's path, which the class path doesn't do
        has_python = any(
            name.endswith(".py")
            for jar in found
            if not Path(jar.path).name.startswith(_UNUSED_PYTHON)
            for name in ZipFile(jar.path).namelist()
        )
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
