"""Java libraries of the test services, resolved by Maven once and kept in the project's cache folder."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DEPENDENCY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


def cache_folder() -> Path:
    """Where downloads are kept: `ROWDELTA_TEST_CACHE`, or `.services` in the repository."""
    return Path(os.environ.get("ROWDELTA_TEST_CACHE") or HERE.parents[1] / ".services")


def jars(pom: Path) -> list[Path]:
    """The runtime jars of `pom`, sorted by name. The first call for this content of the pom downloads them.

    Raises RuntimeError with Maven's output when they cannot be resolved.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{pom.stem}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    # Maven's repository is not made for several processes at a time.
    with (cache / "maven.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            # Renamed when complete: an interrupted download leaves no folder that looks finished.
            partial = Path(tempfile.mkdtemp(prefix=f"{pom.stem}-partial-", dir=cache))
            try:
                _copy_dependencies(pom, partial, cache / "maven-repository")
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return sorted(folder.glob("*.jar"))


def sqlite_jdbc_jar() -> Path:
    """The SQLite JDBC driver, for Iceberg's JDBC catalog. It belongs on the class path of Spark's driver."""
    (jar,) = jars(HERE / "sqlite-jdbc-pom.xml")
    return jar


def _copy_dependencies(pom: Path, target: Path, repository: Path) -> None:
    # A repository of its own: Ivy, under `spark.jars.packages`, trips over the poms without jars that Maven would leave
    # in ~/.m2.
    command = [
        "mvn",
        "--batch-mode",
        "--quiet",
        f"--file={pom}",
        f"{DEPENDENCY_PLUGIN}:copy-dependencies",
        "-DincludeScope=runtime",
        f"-DoutputDirectory={target}",
        f"-Dmaven.repo.local={repository}",
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Maven could not resolve {pom.name}:\n{result.stdout[-4000:]}")
