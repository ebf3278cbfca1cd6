"""Java libraries of the test services, resolved once and kept in the project's cache folder.

By the Ivy that PySpark brings along, so that a machine with Python and a JDK needs nothing else. It has a cache of its
own: Spark's Ivy trips over what other tools leave in the user's.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.stack.process import java_command

HERE = Path(__file__).parent


def cache_folder() -> Path:
    """Where downloads are kept: `ROWDELTA_TEST_CACHE`, or `.services` in the repository."""
    return Path(os.environ.get("ROWDELTA_TEST_CACHE") or HERE.parents[1] / ".services")


def jars(module: Path) -> list[Path]:
    """The jars of an `ivy-*.xml`, sorted by name; `unpacked` says more."""
    return sorted(unpacked(module).glob("*.jar"))


def unpacked(module: Path) -> Path:
    """The folder with what an `ivy-*.xml` names: jars, and the contents of its archives. The first call for this
    content of the file downloads them.

    Raises RuntimeError with Ivy's output when they cannot be resolved.
    """
    cache = cache_folder()
    folder = cache / f"{module.stem}-{hashlib.sha256(module.read_bytes()).hexdigest()[:12]}"
    with ivy_to_itself():
        if not folder.exists():
            # Renamed when complete: an interrupted download leaves no folder that looks finished.
            partial = Path(tempfile.mkdtemp(prefix=f"{module.stem}-partial-", dir=cache))
            try:
                _retrieve(module, partial, cache / "ivy")
                for archive in [*partial.glob("*.zip"), *partial.glob("*.tar.gz")]:
                    shutil.unpack_archive(archive, partial)
                    archive.unlink()
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def ivy_to_itself() -> Iterator[None]:
    """One process at a time: Ivy's caches, Spark's too, are not made for several."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "ivy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sqlite_jdbc_jar() -> Path:
    """The SQLite JDBC driver, for Iceberg's JDBC catalog. It belongs on the class path of Spark's driver."""
    (jar,) = jars(HERE / "ivy-sqlite-jdbc.xml")
    return jar


def delta_jars() -> list[Path]:
    """Delta Lake's own engine for the installed Spark, by which tests write tables and read them back.

    They belong on the class path of Spark's driver. Among `spark.jars.packages` Delta's Python modules would keep
    `sink.jars` from recording the session's jars.
    """
    spark = ".".join(pyspark.__version__.split(".")[:2])
    return jars(HERE / f"ivy-delta-{spark}.xml")


def _retrieve(module: Path, target: Path, cache: Path) -> None:
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    pattern = f"{target}/[artifact]-[revision](-[classifier]).[ext]"
    command = [java_command(), "-jar", str(ivy), "-cache", str(cache), "-ivy", str(module), "-confs", "default"]
    command += ["-types", "jar", "bundle", "test-jar", "zip", "tar.gz", "-retrieve", pattern]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Ivy could not resolve {module.name}:\n{result.stdout[-4000:]}")
