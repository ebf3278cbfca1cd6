"""The sink of the soak: a process that is started, killed and asked, and its tables as other readers see them."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pyarrow as pa
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pyiceberg.table import StaticTable

from benchmarks.processes import command_of, memory_bytes, open_files, own_environment, sizes, tree
from benchmarks.soak.changes import COLUMNS, write

FORMATS = ("v2", "v3", "delta")
_SECONDS = 900
"""How long something may take that takes seconds: the machine may be busy."""
_PROPERTIES = {
    # a metadata file lists all snapshots, and Iceberg keeps all metadata files otherwise
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_MAINTENANCE = {"expire": {"older_than": "2 minutes", "retain_last": 20}}
"""The default is five days: a soak of hours would show no snapshot that goes."""
_FIRST_TIME = 1_700_000_000


class SoakError(RuntimeError):
    """The sink has ended, or does not go on."""


class Job:
    """A sink with a table of each format, which reads change files from a folder for each.

    :param memory: of the driver's JVM.
    :param most_files: of a micro-batch.
    """

    def __init__(
        self,
        folder: Path,
        formats: tuple[str, ...] = FORMATS,
        memory: str = "2g",
        trigger: str = "10 milliseconds",
        most_files: int = 1,
    ) -> None:
        self.formats = formats
        self.folder = folder
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._memory, self._trigger, self._most_files = memory, trigger, most_files
        self._environment = own_environment()
        for name in formats:
            self.source(name).mkdir(parents=True)

    def source(self, name: str) -> Path:
        return self.folder / "changes" / name

    def location(self, name: str) -> Path:
        return self.folder / "warehouse" / ("delta" if name == "delta" else "iceberg") / "soak" / name

    def target(self, name: str) -> str:
        return f"{'delta' if name == 'delta' else 'ice'}.soak.{name}"

    def publish(self, number: int, changes: pa.Table) -> None:
        """Give the file of this number, from 1 on, to all tables."""
        hidden = self.folder / "unfinished"
        write(changes, hidden)
        os.utime(hidden, (_FIRST_TIME + number, _FIRST_TIME + number))
        for name in self.formats:
            os.link(hidden, self.source(name) / file_name(number))
        hidden.unlink()

    def forget(self, below: int) -> None:
        """Remove files that all tables have applied, as a directory's retention does."""
        for name in self.formats:
            for path in self.source(name).glob("*.parquet"):
                if int(path.stem) < below:
                    path.unlink()

    def start(self) -> None:
        """Start the sink. It goes on where its tables stand."""
        assert self._process is None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.starts += 1
        config = self.folder / "sink.yaml"
        config.write_text(yaml.safe_dump(self._settings()))
        with (self.folder / "sink.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sink", "run", str(config)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=self._environment,
            )

    def kill(self) -> None:
        """End the sink and all its processes at once."""
        if self._process is None:
            return
        for pid in tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def wait_for(self, number: int, names: tuple[str, ...] | None = None) -> None:
        """Wait until the file of this number is applied to these tables, by default to all.

        :raises SoakError: the sink has ended, or nothing goes on.
        """
        last, deadline = -1, monotonic() + _SECONDS
        while True:
            began = monotonic()
            applied = {name: self.position(name) for name in self.formats}
            if all(applied[name] >= number for name in names or self.formats):
                return
            if sum(applied.values()) > last:
                last, deadline = sum(applied.values()), monotonic() + _SECONDS
            assert self._process is not None
            if self._process.poll() is not None or monotonic() > deadline:
                tail = (self.folder / "sink.log").read_text(errors="replace")[-4000:]
                raise SoakError(f"applied {applied} of {number}, exit code {self._process.poll()}:\n{tail}")
            sleep(max(0.1, 5 * (monotonic() - began)))  # a look must not cost the sink much

    def position(self, name: str) -> int:
        """The number of the last file, by the table itself."""
        marker = '"files":'
        found = 0
        for text in self._positions(name):
            _, _, rest = text.replace("\\", "").replace(" ", "").partition(marker)
            if rest:
                files = json.loads(rest[: rest.index("]") + 1])
                found = max([found, *(int(Path(file).stem) for file in files)])
        return found

    def _positions(self, name: str) -> list[str]:
        if name == "delta":
            commits = sorted((self.location(name) / "_delta_log").glob("*.json"))[-10:]
            lines = [line for commit in commits for line in commit.read_text().splitlines()]
            return [line for line in lines if "domainMetadata" in line]
        metadata = newest_metadata(self.location(name))
        if metadata is None:
            return []
        properties = json.loads(metadata.read_text())["properties"]
        return [value for key, value in properties.items() if key.endswith(".position")]

    def rows(self, name: str) -> pa.Table:
        """The whole table, by PyIceberg or delta-rs."""
        if name == "delta":
            from deltalake import DeltaTable, QueryBuilder  # only where the tests of other Sparks don't run

            table = DeltaTable(str(self.location(name)))
            return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())
        metadata = newest_metadata(self.location(name))
        assert metadata is not None
        return StaticTable.from_metadata(str(metadata)).scan().to_arrow()

    def processes(self) -> dict[str, float]:
        """Memory and open files of the driver's Python, of the JVM and of the Python workers."""
        assert self._process is not None
        driver = self._process.pid
        groups: dict[str, list[int]] = {"driver": [driver], "jvm": [], "workers": []}
        for pid in tree(driver):
            if pid != driver:
                groups["jvm" if "java" in command_of(pid).split(" ")[0] else "workers"].append(pid)
        figures: dict[str, float] = {}
        for group, pids in groups.items():
            figures[f"{group}_memory_bytes"] = memory_bytes(pids)
            figures[f"{group}_open_files"] = open_files(pids)
        return figures

    def files(self, name: str) -> dict[str, float]:
        """Numbers and bytes of the table's and the index's files."""
        location = self.location(name)
        metadata = location / ("_delta_log" if name == "delta" else "metadata")
        index = self.folder / "index" / "soak" / self.target(name)
        found, logged, indexed = sizes(location), sizes(metadata), sizes(index)
        newest = 0 if name == "delta" else (newest_metadata(location) or Path()).stat().st_size
        return {
            "all_files": len(found),
            "metadata_bytes": sum(logged.values()),
            "metadata_files": len(logged),
            "newest_metadata_bytes": newest,
            "index_bytes": sum(indexed.values()),
            "index_files": len(indexed),
        }

    def told(self, name: str) -> dict[str, float]:
        """What the sink tells of a table: live files, commits, seconds of its stages."""
        target = self.target(name)
        figures: dict[str, float] = {}
        for family in self._families():
            for sample in family.samples:
                if sample.labels.get("table") != target:
                    continue
                if sample.name == "rowdelta_live_files":
                    figures[f"live_{sample.labels['content'].replace(' ', '_')}_files"] = sample.value
                elif sample.name == "rowdelta_stage_seconds_total":
                    figures[f"{sample.labels['stage']}_seconds"] = sample.value
                elif sample.name == "rowdelta_commits_total":
                    figures["commits"] = sample.value
        return figures

    def _families(self) -> list[Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
                return list(text_string_to_metric_families(answer.read().decode()))
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise SoakError(f"the sink tells nothing: {error}") from error

    def _settings(self) -> dict[str, Any]:
        return {
            "sink": {
                "id": "soak",
                "checkpoint": "./state",
                "trigger": self._trigger,
                "on_bad_record": "fail",
                "on_table_error": "stop",
                "http": f"127.0.0.1:{self._port}",
            },
            "source": {"type": "files", "format": "row-kind", "options": {"maxFilesPerTrigger": str(self._most_files)}},
            "index": {"location": "./index"},
            "maintenance": _MAINTENANCE,
            "catalogs": {
                "ice": {"type": "hadoop", "warehouse": "./warehouse/iceberg"},
                "delta": {"type": "delta", "warehouse": "./warehouse/delta"},
            },
            "tables": [
                {
                    "source": f"./changes/{name}",
                    "target": self.target(name),
                    "key": ["id"],
                    "columns": COLUMNS,
                    "order_by": ["seq"],
                    "partition_by": ["region"],
                    **({} if name == "delta" else {"properties": {"format-version": name[1:], **_PROPERTIES}}),
                }
                for name in self.formats
            ],
            "spark": {
                "spark.master": "local[2]",
                "spark.driver.memory": self._memory,
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.databricks.delta.snapshotPartitions": "2",
            },
        }


def file_name(number: int) -> str:
    return f"{number:06d}.parquet"


def newest_metadata(location: Path) -> Path | None:
    """The metadata file of an Iceberg table of a hadoop catalog."""
    versions = (location / "metadata").glob("v*.metadata.json")
    return max(versions, key=lambda path: int(path.name.split(".")[0][1:]), default=None)
