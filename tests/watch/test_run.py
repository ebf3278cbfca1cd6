"""A real `rowdelta run` that is watched: its answers while it works, its log in JSON, and no secret in either."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.stack.process import free_ports, wait_until

pytestmark = pytest.mark.spark

SECRETS = [f"planted-{number}" for number in range(6)]
PATHS = ("", "metrics", "healthz", "state.json", "table.json?number=0", "table.json?number=1", "table.json?number=2")

CONFIG = """\
sink:
  id: shop
  checkpoint: ./state
  trigger: 500 milliseconds
  http: {address: "127.0.0.1:%(port)d", ready_within: 30 minutes}
  log_format: json
source: {type: files, format: row-kind, options: {path_format: json, maxFilesPerTrigger: 1}}
catalogs:
  lake:
    type: hadoop
    warehouse: ./warehouse
    s3.secret-access-key: planted-0
    header.X-Gate: planted-1
tables:
  - {source: ./orders, target: lake.shop.orders, %(columns)s}
  - {source: ./lines, target: lake.shop.lines, %(columns)s}
  - {source: "./gone;password=planted-2/x", target: lake.shop.gone, %(columns)s}
spark:
  spark.master: local[2]
  spark.ui.enabled: "false"
  spark.driver.memory: 1g
  spark.driver.bindAddress: 127.0.0.1
  spark.driver.host: 127.0.0.1
  spark.hadoop.fs.s3a.secret.key: planted-3
"""


class Watched:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.log = folder / "log"
        self.answers: set[str] = set()
        columns = "key: [id], columns: {id: bigint, n: bigint}, order_by: [seq bigint]"
        (folder / "sink.yaml").write_text(CONFIG % {"port": self.port, "columns": columns})
        for name in ("orders", "lines"):
            (folder / name).mkdir()

    def write(self, table: str, number: int, rows: list[tuple[str, int | None, int]]) -> None:
        lines = [
            json.dumps({"row_kind": kind, "id": key, "n": n, "seq": number * 1_000 + at})
            for at, (kind, key, n) in enumerate(rows)
        ]
        hidden = self.folder / f"{table}.{number}"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self.folder / table / f"{number}.json")

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text; 0 if nobody listens."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=60) as answer:
                status, text = answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        except (URLError, ConnectionError):
            return 0, ""
        self.answers.add(text)
        return status, text

    def state(self) -> dict[str, Any]:
        return {table["name"]: table for table in json.loads(self.ask("state.json")[1])["tables"]}

    def metrics(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.ask("metrics")[1])
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels, reverse=True))): sample.value
            for family in families
            for sample in family.samples
        }

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_CONF"))}
        own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        with self.log.open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "sink", "run", str(self.folder / "sink.yaml")],
                env=inherited | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """Somebody sends rubbish, and keeps more connections open than there may be, all the time."""
        over = threading.Event()

        def disturb() -> None:
            while not over.is_set():
                idle = []
                with suppress(OSError):
                    idle += [socket.create_connection(("127.0.0.1", self.port), timeout=5) for _ in range(10)]
                    for each in idle[:5]:
                        each.sendall(b"\xff" * 50_000)
                over.wait(0.3)
                for each in idle:
                    each.close()

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_a_run_is_watched_from_its_start_to_its_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("orders", 1, [("+I", key, key) for key in range(100)])
    watched.write("lines", 1, [("+I", 1, 1), ("+I", None, 2)])  # of which one has no key
    with watched.running() as child:
        assert wait_until(lambda: watched.ask("healthz/live")[0] == 200 or child.poll() is not None, 60)
        assert watched.ask("healthz/ready")[0] == 503, "Spark doesn't run yet"
        with watched.disturbed():
            assert wait_until(lambda: watched.ask("healthz/ready")[0] == 200 or child.poll() is not None, 180)
            watched.write("orders", 2, [("+U", 3, 4), ("-D", 5, 5), ("+I", 1_000, 0)])
            wait_until(
                lambda: (
                    (
                        (watched.state().get("lake.shop.orders") or {}).get("commits") == 2
                        and watched.state()["lake.shop.lines"]["commits"] == 1
                        and watched.state()["lake.shop.gone"]["status"] == "failed"
                        and watched.state()["lake.shop.orders"]["behind"] is not None
                    )
                    or child.poll() is not None
                ),
                180,
            )
            state = watched.state()
        orders, lines, gone = (state[f"lake.shop.{name}"] for name in ("orders", "lines", "gone"))
        assert (orders["status"], orders["data_files"], orders["delete_files"]) == ("working", 2, 1)
        assert orders["index_keys"] > 0
        assert (lines["dead_letters"], gone["status"]) == (1, "failed")
        assert "there is no directory" in gone["reason"]
        found = watched.metrics()
        assert found["rowdelta_rows_total", "lake.shop.orders", "insert"] == 101
        assert found["rowdelta_rows_total", "lake.shop.orders", "delete"] == 1
        assert found["rowdelta_commits_total", "lake.shop.orders"] == 2
        assert found["rowdelta_dead_letters_total", "lake.shop.lines", "null_key"] == 1
        assert found["rowdelta_lag_files", "lake.shop.orders"] <= 2, "as seen some seconds ago"
        assert found["rowdelta_written_files_total", "lake.shop.orders", "data"] == 2
        assert found["rowdelta_written_bytes_total", "lake.shop.orders", "data"] > 500
        assert found["rowdelta_written_files_total", "lake.shop.orders", "position_deletes"] == 1
        assert found["rowdelta_written_bytes_total", "lake.shop.orders", "position_deletes"] > 30
        assert found["rowdelta_memory_peak_bytes", "jvm"] > 1e6
        assert found["rowdelta_memory_peak_bytes", "worker"] > 1e6
        for stage in ("index", "write", "prepare", "commit"):
            assert found["rowdelta_stage_seconds_total", "lake.shop.orders", stage] > 0
        for path in PATHS:
            assert watched.ask(path)[0] == 200, path
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 2, watched.log.read_text()  # as without anybody who watches: one table is wrong
    assert watched.ask("healthz")[0] == 0

    text = watched.log.read_text()
    printed = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(printed) > 5
    assert all({"time", "level", "message", "logger"} <= line.keys() and line["sink"] == "shop" for line in printed)
    batches = [line for line in printed if line["message"].startswith("lake.shop.orders batch")]
    assert [line["table"] for line in batches] == ["lake.shop.orders"] * 2
    assert batches[0]["batch"] == 0
    metadata = max((tmp_path / "warehouse/shop/orders/metadata").glob("v*.json"), key=lambda path: path.stat().st_mtime)
    assert batches[1]["snapshot"] == str(json.loads(metadata.read_text())["current-snapshot-id"])
    assert (printed[-1]["level"], "there is no directory" in printed[-1]["message"]) == ("ERROR", True)

    everything = "".join(watched.answers) + text
    assert [secret for secret in SECRETS if secret in everything] == []
    assert len(watched.answers) > 10


def test_a_port_in_use_ends_the_run_before_spark_starts(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with socket.create_server(("127.0.0.1", watched.port)):
        started = time.monotonic()
        with watched.running() as child:
            assert child.wait(60) == 2
    assert time.monotonic() - started < 30
    (line,) = [json.loads(line) for line in watched.log.read_text().splitlines()]
    assert line["message"].startswith(f"sink.http: can't listen at 127.0.0.1:{watched.port}")
