"""An archive of the JVM's classes (class-data sharing). With it Spark starts in little more than half the time.

Spark loads and verifies about 15,000 classes when it starts. The JVM can write these classes to a file in the form that
they have in memory, and map this file at the next start. The file belongs to one JVM and one list of jars: its name is
a hash of both, so another version never uses it. It is in the user's cache folder, and has about 150 MB.

Nothing depends on the archive. A JVM that can't use it starts without it, and prints nothing (`-Xshare:auto`, and the
log of class-data sharing is off). The file gets its name only when it is complete and a JVM has accepted it.

`sink.commands.training` makes the archive, with a separate JVM that does the work of a run with a few rows.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sink.errors import RowdeltaError, TemporaryError
from sink.spark import cache, jars
from sink.spark import versions as spark_versions
from sink.spark.jars import Jar

_KEPT = 3
"""This many archives are kept: of several configurations, with Kafka and without, or of several versions."""
_SPACE = 1 << 30
"""Bytes that must be free: an archive isn't worth a full disk."""
_DAYS = 30
"""An archive that no start has used for so long is removed."""
QUIET = ("-Xshare:auto", "-Xlog:cds*=off,class+path*=off")
_CHECKED = "-XX:+VerifySharedSpaces"
"""The JVM looks at the archive's checksums, which takes it less than a tenth of a second. Without it, it crashes on a
damaged archive, or runs what it finds there."""
_LATE = tuple(
    f"-XX:Tier4{name}={value}"
    for name, value in {
        "InvocationThreshold": 50_000,
        "MinInvocationThreshold": 6_000,
        "CompileThreshold": 150_000,
        "BackEdgeThreshold": 400_000,
    }.items()
)
"""The second compiler has what ran ten times as often as it has by default. During a start it would take a quarter of
all processor time for methods that hardly run again; what runs in a loop over rows comes to it all the same."""
_SHORT = "-XX:TieredStopAtLevel=1"
_SMALL = "-XX:+UseSerialGC"
OPTION_VARIABLES = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""Environment variables with options of the JVM, which may set Spark's settings too."""
_OPTION_SETTINGS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")


@dataclass(frozen=True)
class Archive:
    """Where the archive of a JVM and its jars is, or would be."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the file is complete. The JVM doesn't check its length, and crashes on a part of an archive."""
        try:
            return self.path.stat().st_size == int(self._size.read_text())
        except (OSError, ValueError):
            return False

    @property
    def _size(self) -> Path:
        return self.path.with_suffix(".size")

    def accept(self, path: Path) -> None:
        """Give a complete archive its name.

        :raises TemporaryError: its size can't be noted, and without it no start would use the archive.
        """
        with path.open("rb") as file:
            os.fsync(file.fileno())
        size = path.stat().st_size
        os.replace(path, self.path)
        cache.write(self._size, str(size))
        if not self.exists:
            self.path.unlink(missing_ok=True)
            raise TemporaryError(f"{self._size} can't be written. Make room there, and run again.")


def find(options: Mapping[str, str], packages: Sequence[Jar]) -> Archive | None:
    """The archive for the JVM that would be started.

    :param options: all Spark settings of the job.
    :param packages: the jars at the end of the JVM's class path.
    :return: None if there can't be an archive: there is no JVM or no cache folder, or the user has own options for
        archives.
    """
    folder, jvm = cache.folder("classes"), _jvm()
    if folder is None or jvm is None or "Archive" in _own_options(options):
        return None
    home = spark_versions.home()
    try:
        files = [*sorted((home / "jars").iterdir()), *(jvm / name for name in ("lib/server/libjvm.so", "lib/modules"))]
        stamps = [vars(jars.stamp(file)) for file in files if file.exists()]
    except OSError:
        return None
    places = [os.environ.get(name) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", *_OTHER_JARS)]
    decides = [stamps, [vars(jar) for jar in packages], places, options.get("spark.driver.extraClassPath")]
    return Archive(folder / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]}.jsa")


_OTHER_JARS = ("SPARK_DIST_CLASSPATH", "CLASSPATH")


def using(path: Path) -> Sequence[str]:
    """Options for a JVM that is to start fast from an archive. If it can't use that, it starts without, and says
    nothing.
    """
    return [f"-XX:SharedArchiveFile={path}", _CHECKED, *QUIET, *_LATE]


@contextmanager
def launching(
    options: Mapping[str, str], packages: Sequence[Jar], *, short: bool = False, training: Path | None = None
) -> Iterator[Archive | None]:
    """Let a JVM that PySpark starts inside this context take its classes from the archive, if there is one.

    Yields where the archive is or would be. PySpark and Spark's shell scripts read the environment of this process,
    which is restored in the end.

    For tests whose JVMs live for seconds to minutes: `session.start(config, short=True)` does all of this. A process
    that starts Spark in its own way wraps `SparkSession.builder.….getOrCreate()` in
    `with launching(options, jars.recorded(options) or (), short=True):`. It gets the archive only if one was made
    before, by `rowdelta warm sink.yaml` (20 s, once a machine and list of jars).

    :param options: all Spark settings of the job.
    :param packages: jars that the JVM gets at the end of its class path.
    :param short: the JVM will only live for a short time. It compiles quickly instead of well, and collects garbage
        with one thread. A long run would be a tenth slower this way.
    :param training: where the JVM writes its classes when it ends.
    """
    found = find(options, packages)
    own = _own_options(options)
    flags = []
    if training is not None:
        flags = [f"-XX:ArchiveClassesAtExit={training}", *QUIET]
    elif found is not None and found.exists:
        flags = [*using(found.path)]
        with suppress(OSError):
            os.utime(found.path)  # archives that were used last are kept
    if short:
        flags += [flag for flag, word in ((_SHORT, "Tiered"), (_SMALL, "GC")) if word not in own]
    path = [os.environ.get("SPARK_DIST_CLASSPATH", ""), *(jar.path for jar in packages)]
    changed = {
        # Spark's launcher splits it as a shell does
        "SPARK_SUBMIT_OPTS": " ".join([*map(shlex.quote, flags), os.environ.get("SPARK_SUBMIT_OPTS", "")]).strip(),
        "SPARK_DIST_CLASSPATH": os.pathsep.join(filter(None, path)),
        # for the launcher's JVM, which only finds out how to start the real one
        "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", f"{_SHORT} {_SMALL}"),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update({name: value for name, value in changed.items() if value})
    try:
        yield found
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _own_options(options: Mapping[str, str]) -> str:
    """The user's own options for the JVM. Some options can't be combined with others."""
    said = [os.environ.get(name, "") for name in OPTION_VARIABLES]
    return " ".join([*said, *(options.get(name, "") for name in _OPTION_SETTINGS)])


def _jvm() -> Path | None:
    """The home of the JVM that Spark's scripts would start."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else shutil.which("java")
    try:
        return Path(java).resolve(strict=True).parent.parent if java else None
    except OSError:
        return None


@contextmanager
def making(archive: Archive) -> Iterator[Path | None]:
    """Yields the path to write the archive to, or None if another process has made it meanwhile. In the end a written
    archive gets its name.

    :raises TemporaryError: there isn't enough space, or the archive can't be stored.
    :raises RowdeltaError: the JVM refuses to make an archive, or to use the one that it made.
    """
    folder = archive.path.parent
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists:
            yield None
            return
        _clear(folder)
        free = shutil.disk_usage(folder).free
        if free < _SPACE:
            raise TemporaryError(f"{folder} has {free:,} bytes free; the archive needs {_SPACE:,}. Make room there.")
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as partial:
            path = Path(partial, "classes.jsa")
            yield path
            if not path.exists():
                raise RowdeltaError("this JVM made no archive of its classes. Spark starts without it, as before.")
            archive.accept(path)
        _make_room(folder)


def accepted(path: Path, class_path: str) -> bool:
    """Whether a JVM maps the archive, and takes the options that go with it."""
    jvm = _jvm()
    # A JVM that crashes on the archive writes a report. It goes beside the archive, and is removed with its folder.
    report = f"-XX:ErrorFile={path.with_suffix('.crash')}"
    command = [f"{jvm}/bin/java", report, *using(path), "-Xshare:on", "-cp", class_path, "-version"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _clear(folder: Path) -> None:
    """Remove files of killed processes. This process holds the lock, so no other one is writing here."""
    for partial in folder.glob(".making-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _make_room(folder: Path) -> None:
    """Keep only the archives that were used last. An archive whose JVM or jars have changed is never used again."""
    long_ago = time.time() - _DAYS * 24 * 3600
    archives = sorted(folder.glob("*.jsa"), key=_used, reverse=True)
    for number, path in enumerate(archives):
        if number >= _KEPT or _used(path) < long_ago:
            path.unlink(missing_ok=True)
            path.with_suffix(".size").unlink(missing_ok=True)


def _used(path: Path) -> float:
    return path.stat().st_mtime
