"""Java libraries and database servers of the tests, resolved once and kept in the project's cache folder.

By the Ivy that PySpark brings along, so that a machine with Python and a JDK needs nothing else. It has a cache of its
own: Spark's Ivy trips over what other tools leave in the user's.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import SkipTest

import pyspark

from tests.stack.process import ServiceError, java_command

HERE = Path(__file__).parent
_MACHINE = f"{platform.system()}-{platform.machine()}"
"""The configuration of an `ivy-*.xml` that has programs of this system and processor."""


class NotInstalledError(ServiceError, SkipTest):
    """A database server is neither in a package for this machine nor installed; a test that wants it is skipped."""


def cache_folder() -> Path:
    """Where downloads are kept: `ROWDELTA_TEST_CACHE`, or `.services` in the repository."""
    return Path(os.environ.get("ROWDELTA_TEST_CACHE") or HERE.parents[1] / ".services")


def program(name: str, module: Path, folders: Iterable[Path], debian: str, homebrew: str) -> Path:
    """A program of a database server: of the package for this system and processor, else of an installed one.

    :param module: the `ivy-*.xml` of the packages.
    :param folders: where it may be installed beside the PATH.
    :param debian: the package that installs it; `homebrew` likewise.
    :raises NotInstalledError: there is neither.
    """
    if _is_packaged(module):
        return next(unpacked(module).rglob(f"*/{name}"))
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))
    if found is None:
        raise NotInstalledError(
            f"There is no {name}, and no package of it for {_MACHINE}. "
            f"Debian, Ubuntu: apt install {debian}; macOS: brew install {homebrew}; or start Docker"
        )
    return Path(found).resolve()


def jars(module: Path) -> list[Path]:
    """The jars of an `ivy-*.xml`, sorted by name; `unpacked` says more."""
    return sorted(unpacked(module).glob("*.jar"))


def unpacked(module: Path) -> Path:
    """The folder with what an `ivy-*.xml` names: jars, and the contents of its archives, or of the jars with this
    machine's programs. The first call for this content of the file downloads them.

    Raises RuntimeError with Ivy's output when they cannot be resolved.
    """
    cache = cache_folder()
    configuration, archives = "default", ["*.zip", "*.tar.gz"]
    if _is_packaged(module):
        configuration, archives = _MACHINE, ["*.jar", "*.txz"]
    content = module.read_bytes() + configuration.removeprefix("default").encode()
    folder = cache / f"{module.stem}-{hashlib.sha256(content).hexdigest()[:12]}"
    with ivy_to_itself():
        if not folder.exists():
            # Renamed when complete: an interrupted download leaves no folder that looks finished.
            partial = Path(tempfile.mkdtemp(prefix=f"{module.stem}-partial-", dir=cache))
            try:
                _retrieve(module, configuration, partial, cache / "ivy")
                for archive in (found for pattern in archives for found in partial.glob(pattern)):
                    shutil.unpack_archive(archive, partial, "zip" if archive.suffix == ".jar" else None)
                    archive.unlink()
                for file in [*partial.rglob("bin/*"), *partial.rglob("scripts/*")]:
                    file.chmod(0o755)  # a jar doesn't tell
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


def _is_packaged(module: Path) -> bool:
    return f'"{_MACHINE}"' in module.read_text(encoding="utf-8")


def _retrieve(module: Path, configuration: str, target: Path, cache: Path) -> None:
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    pattern = f"{target}/[artifact]-[revision](-[classifier]).[ext]"
    command = [java_command(), "-jar", str(ivy), "-cache", str(cache), "-ivy", str(module), "-confs", configuration]
    command += ["-types", "jar", "bundle", "test-jar", "zip", "tar.gz", "-retrieve", pattern]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Ivy could not resolve {module.name}:\n{result.stdout[-4000:]}")
