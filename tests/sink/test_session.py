"""The session that the sink starts."""

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import pyarrow as pa
import pytest
from py4j.clientserver import ClientServerConnection
from pyspark import SparkConf
from pyspark.sql import SparkSession

from deltawriters import kept_columns
from sink.spark import java_answers, java_names, session
from sink.spark.daemon import serve

pytestmark = pytest.mark.spark


@pytest.mark.versions
def test_no_process_is_forked_for_the_permissions_of_a_local_file(spark: SparkSession, tmp_path: Path) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    hadoop = jvm.org.apache.hadoop.fs
    files = hadoop.FileSystem.get(jvm.java.net.URI("file:///"), spark.sparkContext._jsc.hadoopConfiguration())
    raw = files.getRawFileSystem()
    method = raw.getClass().getMethod(
        "setPermission",
        _classes(spark, "org.apache.hadoop.fs.Path", "org.apache.hadoop.fs.permission.FsPermission"),
    )
    assert method.getDeclaringClass().getSimpleName() != "RawLocalFileSystem"  # which forks a chmod
    (tmp_path / "by Python").touch()
    files.create(hadoop.Path(str(tmp_path / "by Hadoop"))).close()
    by_hadoop, by_python = ((tmp_path / f"by {who}").stat().st_mode for who in ("Hadoop", "Python"))
    assert by_hadoop == by_python
    assert not list(tmp_path.glob(".*.crc"))


def _classes(spark: SparkSession, *names: str) -> object:
    gateway, jvm = spark.sparkContext._gateway, spark.sparkContext._jvm
    assert gateway is not None
    assert jvm is not None
    classes = gateway.new_array(jvm.java.lang.Class, len(names))
    for number, name in enumerate(names):
        classes[number] = jvm.java.lang.Class.forName(name)
    return classes


def test_the_jvm_is_asked_once_for_each_name(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = java_names._ask

    def counted(client: object, command: str, *options: object) -> object:
        asked.append(command)
        return ask(client, command, *options)

    monkeypatch.setattr(java_names, "_ask", counted)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    for _ in range(2):
        assert jvm.java.util.concurrent.TimeUnit.SECONDS.toMillis(2) == 2000
        assert jvm.java.util.concurrent.ThreadLocalRandom.current() is not None
    assert sum("ThreadLocalRandom" in command and "current" not in command for command in asked) <= 1
    # the call itself, and the value of a static field, are not remembered
    assert sum("toMillis" in command for command in asked) == 2
    assert sum("SECONDS" in command for command in asked) == 2


class Connection(ClientServerConnection):  # type: ignore[misc]
    """Without a gateway."""

    def __init__(self, client: socket.socket) -> None:
        self.socket, self.stream = client, "what is read"

    def __del__(self) -> None:
        """There is nothing that it would close."""


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="of Linux")
def test_large_answers_come_at_once() -> None:
    """An answer is acknowledged without the 40 ms in which Linux waits for something to send along."""
    java_answers.hurry()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection = Connection(client)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0
        assert connection.stream == "what is read"
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="of Linux")
def test_a_task_s_input_comes_at_once() -> None:
    """A worker acknowledges what it has read. The next small part waits for that in the JVM's kernel."""

    def run(infile: IO[bytes], outfile: IO[bytes]) -> None:
        for _ in range(20):  # first, Linux acknowledges at once anyway
            outfile.write(b"answer")
            outfile.flush()
            assert jvm.recv(100) == b"answer"
            jvm.sendall(b"input")
            assert infile.read(5) == b"input"
            info = jvm.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            assert struct.unpack_from("I", info, 24) == (0,), "`tcpi_unacked`"

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as jvm:
        worker, _ = server.accept()
        with worker, os.fdopen(os.dup(worker.fileno()), "rb") as infile, worker.makefile("wb") as outfile:
            serve(run, infile, outfile)


def test_workers_also_serve_by_a_socket_of_the_file_system() -> None:
    def run(infile: IO[bytes], outfile: IO[bytes]) -> None:
        outfile.write(infile.read(5))
        outfile.flush()

    jvm, worker = socket.socketpair()
    with jvm, worker, os.fdopen(os.dup(worker.fileno()), "rb") as infile, worker.makefile("wb") as outfile:
        jvm.sendall(b"input")
        serve(run, infile, outfile)
        assert jvm.recv(100) == b"input"


def _worker(_: object) -> tuple[int, str, bool]:
    """Of the daemon that this worker was forked from: its number, what it runs, whether it has loaded Arrow."""
    daemon = Path(f"/proc/{os.getppid()}")
    return os.getppid(), daemon.joinpath("cmdline").read_text(), "libarrow" in daemon.joinpath("maps").read_text()


def _workers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pylist([dict(zip("abc", _worker(None), strict=True))])


def test_all_workers_are_forked_from_one_process_that_has_imported_what_tasks_need(spark: SparkSession) -> None:
    of_files = spark.sparkContext.parallelize(range(2), 2).map(_worker).collect()
    of_rows = spark.range(2).mapInArrow(_workers, "a bigint, b string, c boolean").collect()
    ((_, runs, has_arrow),) = {*of_files, *map(tuple, of_rows)}
    assert "sink.spark.daemon" in runs
    assert has_arrow


@pytest.mark.versions
def test_workers_keep_columns_where_spark_spills(spark: SparkSession) -> None:
    def told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.record_batch({"folder": [str(kept_columns._folder())]})

    ((folder,),) = spark.range(1).coalesce(1).mapInArrow(told, "folder string").collect()
    assert Path(folder).is_dir()
    assert Path(folder).parent.name.startswith("blockmgr-"), "Spark removes it"


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({}, "true"),
        ({"spark.io.encryption.enabled": "False"}, "true"),
        ({"spark.io.encryption.enabled": " True"}, None),
        ({"spark.kubernetes.local.dirs.tmpfs": "true"}, None),
    ],
)
def test_workers_keep_nothing_where_spark_encrypts(setting: Mapping[str, str], kept: str | None) -> None:
    context: Any = SimpleNamespace(getConf=lambda: SparkConf().setAll([*setting.items()]), environment={})
    session.let_workers_keep_columns(cast(Any, SimpleNamespace(sparkContext=context)))
    assert context.environment.get(kept_columns.ALLOWED) == kept


def test_the_user_may_keep_workers_from_it() -> None:
    context: Any = SimpleNamespace(getConf=SparkConf, environment={kept_columns.ALLOWED: ""})
    session.let_workers_keep_columns(cast(Any, SimpleNamespace(sparkContext=context)))
    assert context.environment == {kept_columns.ALLOWED: ""}


def test_the_jvms_threads_share_memory(spark: SparkSession) -> None:
    jvm = spark._jvm
    assert jvm is not None
    assert jvm.System.getenv("MALLOC_ARENA_MAX") == os.environ["MALLOC_ARENA_MAX"]


def test_workers_are_started_ahead(spark: SparkSession) -> None:
    jobs = spark.sparkContext.statusTracker()
    before = set(jobs.getJobIdsForGroup(None))
    session.start_workers(spark).join()
    # another test may have started some too
    new = [jobs.getJobInfo(job) for job in set(jobs.getJobIdsForGroup(None)) - before]
    assert "SUCCEEDED" in [job.status for job in new if job is not None]
