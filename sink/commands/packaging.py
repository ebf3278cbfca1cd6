"""`rowdelta package`: an archive with all that tasks import, for workers on which rowdelta isn't installed.

The archive has the installed packages of this environment, file by file: the workers run the versions that the driver
runs. A virtual environment in an archive would need the interpreter's absolute path, which differs between machines.
So the archive has packages alone, and `bin/python`, which starts the worker's own Python with them. Spark unpacks the
archive in each executor's working folder (`spark.archives`), and `spark.pyspark.python` names that program.
"""

import gzip
import io
import os
import re
import shlex
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from changelog.amounts import amount, sized
from changelog.formats import GROUP
from sink.config import Config
from sink.errors import ConfigError
from sink.spark import session

ALIAS = "rowdelta"
"""The folder in an executor's working folder into which Spark unpacks the archive."""
_PYTHON = f"python{sysconfig.get_python_version()}"
OF_SPARK = {"pyspark", "py4j"}
"""Each Spark installation brings its own, of its own version."""
_OF_TASKS = {"postgres": "adbc_driver_postgresql"}
"""Extras of rowdelta that tasks use -> a module by which they are known."""
_UNUSED = (
    "*/tests/*", "*/include/*", "*/__pycache__/*", "*.pyc", "*.pyx", "*.pxd", "*.pxi", "*.h", "*/RECORD", "*/INSTALLER",
    "*/direct_url.json", "*/REQUESTED",
    "*/pyarrow/*flight*", "*/pyarrow/src/*",
)  # fmt: skip
"""Files that no task opens: a third of the size."""
_LEVEL = 3
"""Packing takes half as long as with 6, gzip's default, and the archive is a twelfth larger."""
_TIME = 315532800
"""Modification time of all files in the archive: 1980-01-01, which each tool can show. So the same packages give the
same bytes."""
_LAUNCHER = f"""\
#!/bin/sh
# The Python of this machine, with the packages of this archive before its own.
python="${{ROWDELTA_PYTHON:-{_PYTHON}}}"
if ! command -v "$python" >/dev/null; then
  echo "rowdelta: no $python is on this machine's PATH, and the archive's packages are for {_PYTHON}. Install it, or" \\
    "name one: --conf spark.executorEnv.ROWDELTA_PYTHON=/path/to/{_PYTHON}" >&2
  exit 127
fi
PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)/lib${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
exec "$python" "$@"
"""


@dataclass(frozen=True)
class _File:
    """A file of the archive. `name` is its path there, and `content` where it is, or its bytes."""

    name: str
    content: Path | bytes
    mode: int = 0o644


def default_name() -> str:
    """Of version, Python and platform, such as `rowdelta-0.1.0-cp311-linux_x86_64.tar.gz`."""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    tag = f"cp{sysconfig.get_python_version().replace('.', '')}"
    return f"rowdelta-{_installed('rowdelta').version}-{tag}-{platform}.tar.gz"


def package(path: Path, config: Config, output: Path, *, force: bool) -> Iterator[str]:
    """Write the archive. Yields lines that say how to use it.

    :param path: the configuration file.
    :param config: its content.
    :param output: path of the archive.
    :param force: replace an existing file.
    :raises ConfigError: there is a file already, or packages of this environment can't be shipped.
    """
    if output.exists() and not force:
        raise ConfigError(f"{output} exists, and is left as it is. Replace it with --force, or name another: --output.")
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {output.parent}. Create it, or correct --output.")
    distributions = list(needed())
    _write(output, sorted(_files(distributions), key=lambda file: file.name))
    size = output.stat().st_size
    yield f"# wrote {output}: {sized(size)}, {amount(len(distributions), 'package')}, for workers with {_PYTHON}"
    yield from submit_line(path, config, output)


def submit_line(path: Path, config: Config, archive: Path) -> list[str]:
    """The lines of a shell's command that runs a configuration on a cluster, with an archive.

    :param path: the configuration file.
    :param archive: path of the archive.
    """
    import sink

    options = [
        '--master "$MASTER"',
        f"--packages {','.join(session.packages(config))}",
        f"--archives {shlex.quote(str(archive))}#{ALIAS}",
        *(f"--conf {name}={shlex.quote(value)}" for name, value in settings().items()),
    ]
    if excluded := session.excludes(config):
        options.insert(2, f"--exclude-packages {','.join(excluded)}")
    program = Path(sink.__path__[0]) / "__main__.py"
    return [
        "# MASTER is spark://HOST:7077, yarn or k8s://…; memory and cores are options of Spark's own",
        "spark-submit \\",
        *(f"  {option} \\" for option in options),
        f"  {shlex.quote(str(program))} run {shlex.quote(str(path))}",
    ]


def settings() -> dict[str, str]:
    """Spark's settings with which executors use the archive, and the driver the Python of this process."""
    return {
        "spark.pyspark.python": f"./{ALIAS}/bin/python",
        "spark.pyspark.driver.python": sys.executable,
        # it can be imported, since the archive is there: workers are forked with their imports done
        "spark.python.daemon.module": "sink.spark.daemon",
        **session.WORKERS_KEEP_MEMORY,
        **session.KEEPS_CLOSURES,
        **session.scheduling(),
    }


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise ConfigError(
            f"{name} isn't installed in this environment ({sys.prefix}), so it can't be packed. Install rowdelta with "
            "pip, which brings what it needs, and run its `rowdelta package`."
        ) from None


def needed() -> Iterator[Distribution]:
    """rowdelta, the packages with formats of the user's own, and all that they require, without Spark's own. Of
    rowdelta's extras those that tasks use, where they are installed.
    """
    roots = {"rowdelta", *(entry.dist.name for entry in entry_points(group=GROUP) if entry.dist is not None)}
    pending = [(name, "") for name in sorted(roots)]
    pending += [("rowdelta", extra) for extra, module in _OF_TASKS.items() if find_spec(module) is not None]
    seen = set[tuple[str, str]]()
    found = set[str]()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen or name in OF_SPARK:
            continue
        seen.add((name, extra))
        installed = _installed(name)
        if name not in found:
            found.add(name)
            yield installed
        for text in installed.requires or ():
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                dependency = canonicalize_name(required.name)
                pending += [(dependency, ""), *((dependency, wanted) for wanted in required.extras)]


def _files(distributions: Iterable[Distribution]) -> Iterator[_File]:
    yield _File("bin/python", _LAUNCHER.encode(), 0o755)
    names = set[str]()
    for installed in distributions:
        for name, path in _modules(installed):
            if name not in names and not any(fnmatch(f"/{name}", pattern) for pattern in _UNUSED):
                names.add(name)
                yield _File(f"lib/{name}", path)


def _modules(installed: Distribution) -> Iterator[tuple[str, Path]]:
    """Path below `site-packages`, and where the file is."""
    is_editable = '"editable": true' in (installed.read_text("direct_url.json") or "")
    for file in installed.files or ():
        path = Path(str(installed.locate_file(file)))
        # programs and manuals are elsewhere, and an editable installation has a finder in place of its modules
        if ".." not in file.parts and path.is_file() and (not is_editable or ".dist-info" in file.parts[0]):
            yield PurePosixPath(file).as_posix(), path
    if is_editable:
        for module in (installed.read_text("top_level.txt") or "").split():
            spec = find_spec(module)
            if spec is None or spec.origin is None:
                raise ConfigError(
                    f"{installed.name}: its module {module} can't be found. Install it without --editable."
                )
            root = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            for path in (each for each in sorted(root.rglob("*")) if each.is_file()) if root.is_dir() else [root]:
                yield path.relative_to(root.parent).as_posix(), path


def _write(output: Path, files: list[_File]) -> None:
    """Write the archive under another name, and then rename it: nobody sees a part of it."""
    total = sum(len(file.content) if isinstance(file.content, bytes) else file.content.stat().st_size for file in files)
    progress = _Progress(total)
    descriptor, partial = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}-")
    try:
        with (
            os.fdopen(descriptor, "wb") as target,
            gzip.GzipFile("", "wb", _LEVEL, target, mtime=_TIME) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for file in files:
                content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
                entry = tarfile.TarInfo(file.name)
                entry.size, entry.mode, entry.mtime = len(content), file.mode, _TIME
                archive.addfile(entry, io.BytesIO(content))
                progress.add(len(content))
        os.chmod(partial, 0o644)
        os.replace(partial, output)
    except BaseException:
        os.unlink(partial)
        raise
    finally:
        progress.end()


class _Progress:
    """Shows on stderr how much is packed: with a bar on a terminal, else with a line every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._told = total, 0, time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def add(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._told < (0.2 if self._on_terminal else 3.0):
            return
        self._told = time.monotonic()
        text = f"packing: {sized(self._done)} of {sized(self._total)}"
        if self._on_terminal:
            print(f"\r{text} [{'#' * (30 * self._done // self._total):30}]", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
