"""An archive of the JVM's classes (class-data sharing). With it Spark starts in little more than half the time.

Spark loads and verifies about 15,000 classes when it starts. The JVM can write these classes to a file in the form that
they have in memory, and map this file at the next start. The file belongs to one JVM and one list of jars: its name is
a hash of both, so another version never uses it. It is in the user's cache folder, and has about 150 MB.

Only the JVM of `rowdelta warm` (`sink.commands.training`) writes it. With `-XX:+AutoCreateSharedArchive` (JDK 19) each
first run would, for seconds to half a minute of its end. Nothing depends on the archive. A JVM that can't use it starts
without it, and prints nothing (`-Xshare:auto`, and the log of class-data sharing is off). The JVM writes the head of
the file last, so a JVM that was killed meanwhile leaves a file that none takes for an archive.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sink.spark import cache, jars
from sink.spark import versions as spark_versions
from sink.spark.jars import Jar

_KEPT = 3
"""This many archives are kept, those that were used last: of configurations with Kafka and without, and of versions."""
_QUIET = ("-Xshare:auto", "-Xlog:cds*=off,class+path*=off")
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
"""The second compiler has what ran ten times as often as it has by default. It would take a quarter of all processor
time during a start, and a third during the first hundred small micro-batches, for methods that hardly run again; what
runs in a loop over rows comes to it all the same."""
_SHORT = "-XX:TieredStopAtLevel=1"
_SMALL = "-XX:+UseSerialGC"
OPTION_VARIABLES = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""Environment variables with options of the JVM, which may set Spark's settings too."""
_OPTION_SETTINGS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")


def find(options: Mapping[str, str], packages: Sequence[Jar]) -> Path | None:
    """Where the archive for the JVM that would be started is, or would be.

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
    return folder / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]}.jsa"


_OTHER_JARS = ("SPARK_DIST_CLASSPATH", "CLASSPATH")


def using(path: Path) -> list[str]:
    """Options for a JVM that is to start fast from an archive. If it can't use that, it starts without, and says
    nothing.
    """
    return [f"-XX:SharedArchiveFile={path}", _CHECKED, *_QUIET]


@contextmanager
def launching(
    options: Mapping[str, str], packages: Sequence[Jar], *, short: bool = False, training: bool = False
) -> Iterator[None]:
    """Let a JVM that PySpark starts inside this context take its classes from the archive, if there is one.

    PySpark and Spark's shell scripts read the environment of this process, which is restored in the end.

    :param options: all Spark settings of the job.
    :param packages: jars that the JVM gets at the end of its class path.
    :param short: the JVM will only live for a short time. It compiles quickly instead of well, and collects garbage
        with one thread. A long run would be a tenth slower this way.
    :param training: the JVM writes its classes into a new archive when it ends.
    """
    found = find(options, packages)
    own = _own_options(options)
    flags = [] if found is None else _flags(found, training)
    compiling = [_SHORT] if short else _LATE
    flags += compiling if "Tier" not in own else []
    flags += [_SMALL] if short and "GC" not in own else []
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
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _flags(path: Path, training: bool) -> list[str]:
    if training:
        path.unlink(missing_ok=True)
        return [f"-XX:ArchiveClassesAtExit={path}", *_QUIET]
    if not path.exists():
        return []
    with suppress(OSError):
        os.utime(path)
        for old in sorted(path.parent.glob("*.jsa"), key=lambda each: -each.stat().st_mtime)[_KEPT:]:
            old.unlink(missing_ok=True)
    return using(path)


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
