"""Executors and Python workers of a cluster die or hang in the middle of their work. The driver goes on.

The cluster has two machines, which are two addresses of this one: Spark tries a slow task again on another machine
only. One run of the sink serves all tests of this module.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.faults.plugin import Seen
from tests.faults.shop import ORDERS, SECONDS, Shop, Supervised, send
from tests.sink.test_cluster import SPARK_HOME, alive_workers
from tests.sink.test_submit import environment
from tests.stack.process import Process, free_ports, listens, wait_until, with_descendants

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("fast_start")]

Work = Literal["writes", "merges"]
LARGE = 100_000
"""Rows of a file that takes long enough to write that somebody who looks each millisecond sees it."""
AFTERWARDS = 2.0
"""Seconds after a commit in which a compaction begins, if it does; if the commit took longer, so long."""
SETTINGS = {
    "spark.executor.memory": "600m",
    "spark.executor.cores": "1",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "4s",
    "spark.speculation.task.duration.threshold": "4s",
    # otherwise Spark would kill a worker whose task is done elsewhere before it has written all
    "spark.python.task.killTimeout": "300s",
}


@dataclass(frozen=True)
class Use:
    """A process of an executor has a file open."""

    executor: int
    process: int
    file: str


class Cluster:
    """A Spark master, two workers with an executor each, and a sink whose tasks these run."""

    def __init__(self, folder: Path, sink: Supervised) -> None:
        self.sink = sink
        self.shop = sink.shop
        self._folder = folder

    def executors(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_below = Path(os.readlink(process / "cwd")).is_relative_to(self._folder)
                if is_below and b"CoarseGrainedExecutorBackend" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def kill(self, executor: int) -> None:
        for pid in with_descendants(executor):
            send(pid, signal.SIGKILL)

    def catch(self, work: Work, rows: int) -> Use:
        """Have changes applied until a process of an executor is seen at some work on the orders in Iceberg.

        A Python worker that writes a data file after the commit merges small files.

        :param rows: of each file of changes.
        """
        run = self.sink.running()
        for _ in range(50):
            executors, before = self.executors(), self._data_files()
            self.shop.write(rows)
            began = looked = time.monotonic()
            deadline, applied = began + SECONDS, False
            while time.monotonic() < deadline:
                for executor in executors:
                    for pid in with_descendants(executor):
                        for file in _open_files(pid):
                            is_new = pid != executor and file not in before
                            if is_new and self._is_data(file) and work == self._work():
                                return Use(executor, pid, file)
                if time.monotonic() - looked > 0.2:
                    looked = time.monotonic()
                    assert run.code is None, run.log
                    if not applied and self.shop.is_applied():
                        applied, deadline = True, looked + max(AFTERWARDS, looked - began)
                time.sleep(0.001)
            assert applied, run.log
        raise AssertionError(f"nobody has opened such a file\n{run.log}")

    def _work(self) -> Work:
        """What a worker does that writes a data file."""
        return "merges" if self.shop.is_applied(ORDERS) else "writes"

    def _is_data(self, file: str) -> bool:
        """Whether it is a data file of the orders in Iceberg."""
        return file.startswith(f"{self.shop.location(ORDERS)}/data/") and file.endswith(".parquet")

    def _data_files(self) -> set[str]:
        """Those that are there, of the orders in Iceberg."""
        return {str(path) for path in self.shop.location(ORDERS).rglob("data/**/*.parquet")}

    def goes_on(self) -> None:
        """The run has done all its work, and tables are equal to the source."""
        run = self.sink.run
        assert run is not None
        self.sink.wait_until_applied()
        self.shop.check()
        assert run.code is None


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield os.readlink(descriptor)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, fast_start: None) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    port, ui, *others = free_ports(4)
    address = f"spark://127.0.0.1:{port}"

    def started(name: str, host: str, *arguments: object) -> Process:
        variables = environment() | {"SPARK_LOCAL_IP": host, "SPARK_DAEMON_MEMORY": "200m"}
        words = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", host, *arguments]
        log = folder / f"{name} {host}.log"
        process = Process(
            [str(word) for word in words], log, lambda: name != "master.Master" or listens(port), environment=variables
        )
        process.start()
        return process

    with ExitStack() as stack:
        stack.callback(started("master.Master", "127.0.0.1", "--port", port, "--webui-port", ui).kill)
        for host, worker_ui in zip(("127.0.0.1", "127.0.0.2"), others, strict=True):
            worker = started(
                "worker.Worker", host, "--cores", 1, "--memory", "1g", "--webui-port", worker_ui,
                "--work-dir", folder / "work" / host, address,
            )  # fmt: skip
            stack.callback(worker.kill)
        assert wait_until(lambda: alive_workers(ui) == 2)
        shop = Shop(folder, keys=100_000, has_notes=True)
        config = shop.configured("200 milliseconds", **{"spark.master": address}, **SETTINGS)
        sink = stack.enter_context(Supervised(shop, config))
        shop.write(LARGE)
        yield Cluster(folder / "work", sink)


@pytest.mark.fault(
    "Processes",
    "`kill -9` of a Python worker while it writes a data file",
    "Spark does the task again. The run goes on",
)
def test_a_python_worker_is_killed(cluster: Cluster, seen: Seen) -> None:
    use = cluster.catch("writes", LARGE)
    send(use.process, signal.SIGKILL)
    cluster.goes_on()
    seen("The same run went on. Table = source")


@pytest.mark.fault(
    "Processes",
    "`kill -9` of an executor while it writes a data file",
    "Another executor does the task. The run goes on",
)
def test_an_executor_is_killed_while_it_writes(cluster: Cluster, seen: Seen) -> None:
    use = cluster.catch("writes", LARGE)
    cluster.kill(use.executor)
    cluster.goes_on()
    seen("The same run went on. Table = source")


@pytest.mark.fault(
    "Processes",
    "`kill -9` of all executors while they build the key index, whose files were deleted under the run",
    "New executors build it. The run goes on",
)
def test_executors_are_killed_while_the_index_is_built(cluster: Cluster, seen: Seen) -> None:
    run, runs = cluster.sink.running(), cluster.shop.index(ORDERS) / "runs"
    while True:
        built, lost = run.log.count(f"{ORDERS}: key index built"), run.log.count("building the key index again")
        for executor in cluster.executors():  # whose workers have the index mapped
            for pid in with_descendants(executor)[1:]:
                send(pid, signal.SIGKILL)
        for path in runs.iterdir():
            path.unlink()
        cluster.shop.write(100)
        run.wait_for(lambda: run.log.count("building the key index again") > lost)  # noqa: B023
        executors = cluster.executors()
        while not any(runs.iterdir()):
            time.sleep(0.001)
        for executor in executors:
            cluster.kill(executor)
        was_in_time = run.log.count(f"{ORDERS}: key index built") == built
        cluster.goes_on()
        if was_in_time:
            break
    assert run.log.count(f"{ORDERS}: key index built") > built
    seen("The index was built, and the same run went on. Table = source")


@pytest.mark.fault(
    "Processes",
    "`kill -9` of an executor while it merges small files (minor compaction)",
    "Another executor merges them, or the next compaction does. The run goes on",
)
def test_an_executor_is_killed_during_a_minor_compaction(cluster: Cluster, seen: Seen) -> None:
    """The small files are so large together that the driver leaves them to tasks."""
    run = cluster.sink.running()

    def merged() -> int:
        return run.log.count(f"{ORDERS}: merged ")

    while True:
        use = cluster.catch("merges", LARGE)
        before = merged()
        cluster.kill(use.executor)
        was_in_time = merged() == before
        cluster.goes_on()
        if was_in_time:
            break
    while merged() == before:  # what was killed may have merged another table's files
        cluster.shop.write(LARGE)
        cluster.goes_on()
    cluster.goes_on()
    seen("The files were merged, and the same run went on. Table = source")


@pytest.mark.fault(
    "Processes",
    "A Python worker hangs while it writes a data file, Spark does its task a second time (`spark.speculation`), and "
    "the first one wakes up after the commit",
    "The files of one of both are committed. Those of the other are garbage",
)
def test_two_attempts_write(cluster: Cluster, seen: Seen) -> None:
    while True:
        use = cluster.catch("writes", LARGE)
        send(use.process, signal.SIGSTOP)
        try:
            was_in_time = use.file in _open_files(use.process)
            if was_in_time:
                cluster.goes_on()
                assert use.file in _open_files(use.process)
        finally:
            send(use.process, signal.SIGCONT)
        if was_in_time:
            break
        cluster.goes_on()
    assert wait_until(lambda: use.file not in _open_files(use.process), SECONDS)
    cluster.shop.write()
    cluster.goes_on()
    seen("Both attempts wrote, the second one was committed. Table = source")
