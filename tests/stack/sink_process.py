"""The sink as its users run it: `rowdelta run`, in a process of its own, against the stack."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.stack.jars import ivy_to_itself
from tests.stack.kafka import Door
from tests.stack.process import Process, with_descendants
from tests.stack.s3 import S3
from tests.stack.stack import Stack

S3A_PACKAGES = (
    "org.apache.hadoop:hadoop-aws:3.4.2",
    "software.amazon.awssdk:s3-transfer-manager:2.29.52",
    "software.amazon.awssdk:sts:2.29.52",
    # Iceberg's client names its classes
    "software.amazon.awssdk:kms:2.29.52",
    # for Iceberg 1.12 the other one is of a newer SDK
    "software.amazon.awssdk:url-connection-client:2.29.52",
)


def configuration(
    stack: Stack, folder: Path, sink_id: str, source_format: str, tables: Sequence[Mapping[str, Any]], **source: Any
) -> dict[str, Any]:
    """A configuration with the catalogs `ice` (Iceberg's REST catalog) and `lake` (Delta), both in the bucket.

    :param folder: of checkpoint and index.
    :param source: more of the section `source`.
    """
    door = stack.kafka.door
    assert isinstance(door, Door)
    options = {"kafka.bootstrap.servers": door.bootstrap_servers, "startingOffsets": "earliest"}
    options |= {f"kafka.{key}": value for key, value in door.java_options.items()}
    return {
        "sink": {"id": sink_id, "checkpoint": str(folder / "state"), "trigger": "1 second"},
        "source": {
            "type": "kafka",
            "format": source_format,
            "discovery_interval": "2 seconds",
            "options": options,
            **source,
        },
        "catalogs": {
            "ice": {
                "type": "rest",
                "uri": stack.catalog_door.url,
                "credential": f"{stack.catalog_door.client}:{stack.catalog_door.secret}",
                "oauth2-server-uri": stack.catalog_door.token_url,
                "header.X-Iceberg-Access-Delegation": "vended-credentials",
                "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                "http-client.type": "urlconnection",
                "s3.endpoint": stack.s3.endpoint,
                "s3.path-style-access": "true",
                "client.region": stack.s3.REGION,
                "s3.region": stack.s3.REGION,
            },
            "lake": {"type": "delta", "warehouse": f"s3a://{stack.s3.BUCKET}/delta"},
        },
        "tables": [dict(table) for table in tables],
        "spark": spark_section(stack.s3.endpoint),
    }


def spark_section(endpoint: str) -> dict[str, str]:
    """A configuration's section `spark`, for tables in a bucket.

    :param endpoint: of the store, or of a door in front of it.
    """
    return {
        "spark.master": "local[2]",
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.jars.packages": ",".join(S3A_PACKAGES),
        "spark.jars.excludes": "software.amazon.awssdk:bundle",
        "spark.hadoop.fs.s3a.endpoint": endpoint,
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": S3.KEY,
        "spark.hadoop.fs.s3a.secret.key": S3.SECRET,
        "spark.hadoop.delta.enableFastS3AListFrom": "true",
    }


def impatient(*arguments: object) -> list[str]:
    """The command line of `rowdelta` whose failed tables are tried again soon."""
    program = Path(__file__).with_name("impatient.py")
    return [sys.executable, "-P", str(program), *map(str, arguments)]  # -P: other files there are no modules of it


class SinkProcess(Process):
    """`rowdelta run` of a configuration. It is started when Spark is: what it applies, its tables show.

    `log` is what it prints.

    :param config: the configuration's file.
    :param folder: of the log.
    :param environment: what the configuration takes from there.
    :param is_patient: whether failed tables wait as long as its users' do.
    """

    def __init__(
        self,
        config: Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        is_patient: bool = True,
    ) -> None:
        self.config = config
        self.log = folder / "sink.log"
        # what a session of this process has set must not leak
        inherited = {
            k: v for k, v in os.environ.items() if k == "SPARK_SUBMIT_OPTS" or not k.startswith(("PYSPARK", "SPARK"))
        }
        own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        self._variables = {**inherited, **own, **(environment or {})}
        super().__init__(
            [sys.executable, "-m", "sink", "run", "--verbose", str(config)]
            if is_patient
            else impatient("run", "--verbose", config),
            self.log,
            lambda: "Setting default log level" in self.text(),  # Ivy is done
            environment=self._variables,
            start_seconds=300,
            stop_seconds=120,
        )

    def start(self) -> None:
        with ivy_to_itself():
            super().start()

    def finish(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of `rowdelta`, with the same environment."""
        command = [sys.executable, "-m", "sink", *arguments]
        return subprocess.run(command, env=self._variables, capture_output=True, text=True, check=False)

    def measured(self, *arguments: str) -> tuple[int, int]:
        """Another command of `rowdelta`, which prints into the log.

        :return: its exit code, and the most megabytes of memory that one of its processes had.
        """
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "sink", *arguments]
            child = subprocess.Popen(command, env=self._variables, stdout=log, stderr=log)
        most = 0
        while child.poll() is None:
            most = max(most, *map(_peak, with_descendants(child.pid)))
            time.sleep(0.2)
        return child.returncode, most

    def text(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _peak(pid: int) -> int:
    """The most megabytes of memory that a process has had."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) // 1000
    return 0


def written(folder: Path, values: Mapping[str, Any]) -> Path:
    """A configuration as a file in a new folder."""
    folder.mkdir()
    file = folder / "sink.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    return file
