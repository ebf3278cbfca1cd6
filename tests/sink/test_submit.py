"""The job as users start it: `rowdelta run` and `spark-submit`, in processes of their own, stopped by signals."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pyspark
import pytest
import yaml
from pyspark.sql import SparkSession

import sink
from sink import cli
from sink.spark import session
from tests.stack.process import free_ports, wait_until

pytestmark = pytest.mark.spark

SPARK_HOME = Path(pyspark.__file__).parent
LOCAL = {
    "spark.master": "local[2]",
    "spark.driver.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}

CACHE = "a cache"
"""Name of the folder for jars and classes, which all tests share whose sinks start fast. It has a space."""
ICEBERG: dict[str, object] = {"lake": {"type": "hadoop", "warehouse": "./warehouse"}}
CATALOGS = ICEBERG | {"delta": {"type": "delta", "warehouse": "./delta"}}
"""As in tests/faults, so that the suite makes one archive of classes: that depends on the packages."""


def write_config(folder: Path, trigger: str = "available-now", **sections: object) -> Path:
    """A configuration for `changes/` with one file a micro-batch; relative paths, which mean the file's folder."""
    values: dict[str, object] = {
        "sink": {"id": "shop", "checkpoint": "./state", "trigger": trigger, "on_bad_record": "fail"},
        "source": {
            "type": "files",
            "format": "row-kind",
            "options": {"path_format": "json", "maxFilesPerTrigger": 1},
        },
        "maintenance": {"budget": 0},  # its commits would be counted too
        "catalogs": CATALOGS,
        "tables": [
            {
                "source": "./changes",
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "bigint"},
                "partition_by": ["bucket(2, id)"],
                "order_by": ["seq bigint"],
            }
        ],
        "spark": LOCAL,
    }
    path = folder / "sink.yaml"
    path.write_text(yaml.safe_dump(values | sections))
    return path


def write_changes(folder: Path, files: int, rows: int = 30) -> dict[int, int]:
    """Change files, each of which updates keys of those before it, and the table's content after all of them."""
    (folder / "changes").mkdir(exist_ok=True)
    content: dict[int, int] = {}
    for number in range(files):
        records = []
        for n in range(rows):
            seq = number * rows + n
            key = seq * 7 % (rows * 2)
            kind = "-D" if seq % 11 == 0 else "+U"
            records.append({"row_kind": kind, "id": key, "v": seq, "seq": seq})
            content.pop(key, None)
            if kind == "+U":
                content[key] = seq
        path = folder / "changes" / f"{number:03d}.json"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return content


def table_content(spark: SparkSession, folder: Path) -> dict[int, int]:
    rows = spark.read.format("iceberg").load(str(folder / "warehouse/shop/orders")).collect()
    assert len({row.id for row in rows}) == len(rows)
    return {row.id: row.v for row in rows}


def commits(spark: SparkSession, folder: Path) -> int:
    """Micro-batches that were committed."""
    snapshots = spark.read.format("iceberg").load(f"{folder / 'warehouse/shop/orders'}#snapshots")
    return snapshots.where("operation != 'replace'").count()


def environment() -> dict[str, str]:
    # what the session of this process set must not leak into the next
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK"))}
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if "SPARK_SUBMIT_OPTS" in os.environ:  # of the tests' `conftest.py`
        own["SPARK_SUBMIT_OPTS"] = os.environ["SPARK_SUBMIT_OPTS"]
    return inherited | own


def command(*arguments: object) -> list[str]:
    return [str(Path(sys.executable).with_name("rowdelta")), *map(str, arguments)]


def finish(arguments: Sequence[str], seconds: int = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, timeout=seconds, check=False, cwd="/"
    )


def warm(folder: Path, config: Path, *, wait: bool) -> list[str]:
    """Run `rowdelta warm` with the cache in `folder`, once for all processes of a run of the tests.

    :param config: of any job that reads files and knows both formats: all have the same packages.
    :param wait: for another process that is doing it.
    :return: what it printed; nothing if another process is doing it.
    """
    folder.mkdir(exist_ok=True)
    printed = folder / "printed"
    with (folder / "lock").open("w") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not printed.exists():
            done = finish(command("warm", config), seconds=580)
            assert done.returncode == 0, done.stdout + done.stderr
            printed.write_text(done.stdout)
    return printed.read_text().splitlines() if printed.exists() else []


@pytest.fixture(autouse=True)
def fast_start(
    shared_folder: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of these tests take jars from a record, and classes from an archive if there is one: two thirds of
    the work.
    """
    folder = shared_folder / CACHE
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    # making it takes as long as three starts
    if sum(item.path == request.path for item in request.session.items) > 6:
        warm(folder, write_config(tmp_path_factory.mktemp("warm")), wait=False)


class Running:
    """A job in a process group of its own, as a terminal or a service manager would have it."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                arguments, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_batches(self, count: int) -> None:
        wait_until(lambda: self.batches() >= count or self._child.poll() is not None, 120)
        assert self.batches() >= count, self.log

    def batches(self) -> int:
        return self.log.count("lake.shop.orders batch ")

    def signal(self, number: signal.Signals, *, group: bool) -> None:
        if group:
            os.killpg(self._child.pid, number)
        else:
            self._child.send_signal(number)

    def kill_jvm(self) -> None:
        (jvm,) = [pid for pid in self.descendants() if Path(f"/proc/{pid}/comm").read_text().strip() == "java"]
        os.kill(jvm, signal.SIGKILL)

    def descendants(self) -> list[int]:
        """All other processes of the child's session, also those whose parents have ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._child.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return [pid for pid in found if pid != self._child.pid]

    def wait(self) -> int:
        return self._child.wait(120)

    def end(self) -> None:
        """Whatever happened, leave nothing behind."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(30)


def complaints(log: str) -> list[str]:
    """What a run that ends as it was told must not show. A Python worker of Spark's whose task is cancelled before the
    worker has begun shows a traceback of PySpark's own, at the end of which it finds no JVM.
    """
    its_own = len(re.findall(r'File "\S+/pyspark/daemon\.py", line \d+, in manager$', log, re.MULTILINE))
    lost = len(re.findall(r"^(?:EOFError|ConnectionResetError)\b", log, re.MULTILINE))
    tracebacks = [line for line in log.splitlines() if "Traceback" in line]  # other lines may come in between
    return tracebacks[min(its_own, lost) :] + [line for line in log.splitlines() if "Exception in thread" in line]


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Running]:
    job = Running(arguments, log)
    try:
        yield job
    finally:
        job.end()


FILES = 8
"""Of a run that is told to end after two of them, one a second."""


# rowdelta run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)],
    ids=["SIGTERM", "SIGTERM to the group", "Ctrl-C"],
)
def test_a_signal_finishes_the_micro_batch(
    spark: SparkSession, tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    """Exit code 0 with whole micro-batches applied, and the next run does the rest, once."""
    expected = write_changes(tmp_path, FILES)
    path = write_config(tmp_path, trigger="1 second")
    with running(command("run", path), tmp_path / "log") as job:
        job.wait_for_batches(2)
        job.signal(number, group=group)
        code = job.wait()
        # a signal to the group may hit a helper process of the file system in a commit: then the run says "run again"
        assert code == 0 or (code == 75 and group and number == signal.SIGTERM), job.log
        assert group or not complaints(job.log), job.log
        done = job.batches()
    assert commits(spark, tmp_path) == done < FILES
    result = finish(command("run", write_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    # where Spark had noted a file and not yet the micro-batch, it puts the next file into the same one
    assert commits(spark, tmp_path) in (FILES - 1, FILES)


@pytest.mark.parametrize(
    ("name", "number", "group", "code"),
    [
        ("run", signal.SIGINT, True, 130),
        ("run", signal.SIGTERM, False, 143),
        ("dead-letters counts", signal.SIGTERM, True, 143),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM to the group"],
)
@pytest.mark.parametrize("moment", ["the JVM is launched", "Spark starts"])
def test_a_signal_during_the_start(
    tmp_path: Path, name: str, number: signal.Signals, group: bool, code: int, moment: str
) -> None:
    """The process ends soon, says so, and leaves no JVM; there is nothing that it could finish."""
    write_changes(tmp_path, 1)
    with running(command(*name.split(), write_config(tmp_path)), tmp_path / "log") as job:
        assert wait_until(lambda: bool(job.descendants()), 60), job.log
        if moment == "Spark starts":
            time.sleep(2)  # nothing of it is printed
        job.signal(number, group=group)
        started = time.monotonic()
        assert job.wait() == code, job.log
        assert time.monotonic() - started < 15
        # the last line unless the shell that launches the JVM has something to say of its own end
        assert f"rowdelta: interrupted by {number.name}; every table is as its last commit left it\n" in job.log
        assert not complaints(job.log), job.log
        assert "Exception" not in job.log, job.log
        assert wait_until(lambda: not job.descendants(), 5), job.descendants()


def test_pyspark_says_nothing_of_the_jvm_that_was_ended() -> None:
    """Its server for accumulators would print the stack of the lost connection."""
    code = """
import socket, threading
from pyspark.accumulators import AccumulatorTCPServer, UpdateRequestHandler
from sink.spark.interrupts import jvms
server = AccumulatorTCPServer(("127.0.0.1", 0), UpdateRequestHandler, "token")
jvms.terminate()
with socket.create_connection(server.server_address) as client:
    client.sendall(b"x")
server.handle_request()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_threads_of_the_jvm_that_is_ended_say_nothing() -> None:
    """A stream's thread that meets a context already stopped would print a stack: here a thread with another error."""
    code = """
from pyspark import SparkContext
from sink.spark.interrupts import jvms
from sink.spark.jvm_output import JvmOutput
with jvms.noted(JvmOutput(is_held=False)):
    SparkContext._ensure_initialized()
java = SparkContext._jvm.java
runnable = java.lang.Class.forName("java.lang.Runnable")
failing = java.beans.EventHandler.create(runnable, java.util.ArrayList().iterator(), "next")
java.lang.Runtime.getRuntime().addShutdownHook(java.lang.Thread(failing))
jvms.end()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not complaints(done.stderr), done.stderr


@pytest.mark.parametrize("submitted", [False, True], ids=["run", "spark-submit"])
def test_a_second_ctrl_c_interrupts(spark: SparkSession, tmp_path: Path, submitted: bool) -> None:
    """The micro-batch in progress is given up, no process stays, and the next run does it, once."""
    expected = write_changes(tmp_path, 4)
    path = write_config(tmp_path, catalogs=ICEBERG if submitted else CATALOGS)
    with running(submit(path, "local[2]") if submitted else command("run", path), tmp_path / "log") as job:
        # the first micro-batch takes seconds, with the start of the Python workers
        assert wait_until(lambda: any((tmp_path / "state").rglob("offsets/0")), 120), job.log
        job.signal(signal.SIGINT, group=True)
        assert wait_until(lambda: "finishing the micro-batch" in job.log, 10), job.log
        job.signal(signal.SIGINT, group=True)
        started = time.monotonic()
        assert job.wait() == 128 + signal.SIGINT, job.log
        assert time.monotonic() - started < 15
        assert job.batches() == 0, job.log
        assert wait_until(lambda: not job.descendants(), 15), job.descendants()
    result = finish(command("run", write_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    assert commits(spark, tmp_path) in (3, 4)


@pytest.mark.versions
def test_killed_at_once_and_started_again(spark: SparkSession, tmp_path: Path) -> None:
    """A process can't handle SIGKILL. The table is as its last commit left it, and the next run does the rest once."""
    expected = write_changes(tmp_path, 10)
    path = write_config(tmp_path)
    with running(command("run", path), tmp_path / "log") as job:
        job.wait_for_batches(2)
        job.signal(signal.SIGKILL, group=True)
        assert job.wait() == -signal.SIGKILL
    result = finish(command("run", path))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    assert commits(spark, tmp_path) in (9, 10)


def test_the_jvm_dies(spark: SparkSession, tmp_path: Path) -> None:
    """Out of memory, for example: the run says that running again is right, and it is."""
    expected = write_changes(tmp_path, 10)
    path = write_config(tmp_path)
    with running(command("run", path), tmp_path / "log") as job:
        job.wait_for_batches(2)
        job.kill_jvm()
        assert job.wait() == 75, job.log
        # threads of PySpark's may print their own end after it
        assert any(line.startswith("rowdelta: ") for line in job.log.splitlines()), job.log
    result = finish(command("run", path))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    # as after a signal: Spark may put two files into one micro-batch
    assert commits(spark, tmp_path) in (9, 10)


# rowdelta check, status, help, exit codes
# ------------------------------------------------------------------------------


@pytest.mark.versions
def test_check_run_status(spark: SparkSession, tmp_path: Path) -> None:
    expected = write_changes(tmp_path, 2)
    path = write_config(tmp_path, catalogs=CATALOGS | SECRETS, spark=LOCAL | event_log(tmp_path))
    check = finish(command("check", path))
    assert check.returncode == 0, check.stderr
    assert "uri=jdbc:postgresql://****@db/lake" in check.stdout
    assert "hunter2" not in check.stdout + check.stderr
    assert f"{tmp_path}/changes -> lake.shop.orders: will be created" in check.stdout
    assert f"source: directory {tmp_path}/changes: 2 files" in check.stdout
    assert "columns: id bigint (key), v bigint" in check.stdout
    assert not (tmp_path / "warehouse").exists()
    run = finish(command("run", path))
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("lake.shop.orders batch ") == 2
    assert table_content(spark, tmp_path) == expected
    check_event_log(tmp_path)
    write_changes(tmp_path, 3)
    status = finish(command("status", path))
    assert status.returncode == 0, status.stderr
    assert "lake.shop.orders: snapshot " in status.stdout
    assert "lag: 1 file behind" in status.stdout
    assert "001.json" in status.stdout


SECRETS: dict[str, object] = {
    "lake": {
        "type": "hadoop",
        "warehouse": "./warehouse",
        "credential": "hunter2",
        "uri": "jdbc:postgresql://ada:hunter2@db/lake",
    }
}
"""Catalogs whose properties hold secrets. One of type hadoop ignores these."""


def event_log(folder: Path) -> dict[str, str]:
    """Spark settings that write one in plain text."""
    (folder / "events").mkdir()
    names = {"enabled": "true", "dir": (folder / "events").as_uri(), "compress": "false"}
    return {f"spark.eventLog.{name}": value for name, value in names.items()}


def check_event_log(folder: Path) -> None:
    """It has the catalog's settings, and no secret."""
    text = "".join(file.read_text() for file in (folder / "events").rglob("*") if file.is_file())
    assert "spark.sql.catalog.lake.credential" in text
    assert "spark.sql.catalog.lake.uri" in text
    assert "hunter2" not in text


def refuse(folder: Path, change: Callable[[Path], Path]) -> subprocess.CompletedProcess[str]:
    write_changes(folder, 1)
    result = finish(command("run", change(folder)))
    # whatever Spark logs, the last thing to read is what went wrong
    assert result.stderr.splitlines()[-1].startswith("rowdelta: "), result.stderr
    return result


def test_a_failing_task_is_told_in_a_few_lines(tmp_path: Path) -> None:
    """What Spark prints of it on its way, with the stacks of several exceptions, says no more."""

    def change(folder: Path) -> Path:
        (folder / "changes" / "000.json").unlink()
        (folder / "changes" / "000.parquet").write_bytes(b"PAR1 and no Parquet file")
        return write_config(folder, source={"type": "files", "format": "row-kind"})

    result = refuse(tmp_path, change)
    assert result.returncode in (3, 75), result.stderr
    assert "000.parquet" in result.stderr.splitlines()[-1]
    assert "\tat " not in result.stderr, result.stderr


def test_exit_code_of_settings_that_spark_refuses(tmp_path: Path) -> None:
    result = refuse(tmp_path, lambda folder: write_config(folder, spark=LOCAL | {"spark.driver.maxResultSize": "lots"}))
    assert result.returncode == 2, result.stderr
    assert "Correct the section spark" in result.stderr.splitlines()[-1]


@pytest.fixture
def run_here(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`rowdelta run` with the session of the tests, into a catalog of its own. Returns the exit code and the last line
    of stderr.
    """
    name = f"c{uuid4().hex[:12]}"
    monkeypatch.setattr(session, "start", lambda _: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)

    def run(**catalog: str) -> tuple[int, str]:
        properties = {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")} | catalog
        spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
        for key, value in properties.items():
            spark.conf.set(f"spark.sql.catalog.{name}.{key}", value)
        path = write_config(tmp_path, catalogs={name: properties})
        path.write_text(path.read_text().replace("target: lake.", f"target: {name}."))
        code = cli.main(["run", str(path)])
        return code, capfd.readouterr().err.splitlines()[-1].replace(name, "lake")

    return run


def test_exit_code_of_bad_data(tmp_path: Path, run_here: Callable[..., tuple[int, str]]) -> None:
    write_changes(tmp_path, 1)
    (tmp_path / "changes" / "bad.json").write_text("no JSON\n")
    code, line = run_here()
    assert code == 3, line
    assert line.startswith("rowdelta: lake.shop.orders: 1 bad record")


def test_exit_code_of_a_table_that_does_not_fit(
    spark: SparkSession, tmp_path: Path, run_here: Callable[..., tuple[int, str]]
) -> None:
    write_changes(tmp_path, 1)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    iceberg = jvm.org.apache.iceberg
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    schema = iceberg.SchemaParser.fromJson(json.dumps({"type": "struct", "schema-id": 0, "fields": fields}))
    iceberg.hadoop.HadoopTables(spark._jsc.hadoopConfiguration()).create(
        schema, str(tmp_path / "warehouse/shop/orders")
    )
    code, line = run_here()
    assert code == 4, line
    assert "lake.shop.orders has no column 'v'" in line


def test_exit_code_of_a_service_that_is_away(tmp_path: Path, run_here: Callable[..., tuple[int, str]]) -> None:
    (port,) = free_ports(1)
    write_changes(tmp_path, 1)
    code, line = run_here(type="rest", uri=f"http://127.0.0.1:{port}")
    assert code == 75, line
    assert line.startswith("rowdelta: ")


def test_exit_code_of_a_wrong_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "check", "status", "packages"):
        assert cli.main([name, str(tmp_path / "absent.yaml")]) == 2
        assert "absent.yaml: can't be read" in capsys.readouterr().err
    path = write_config(tmp_path, snik={})
    assert cli.main(["run", str(path)]) == 2
    assert "unknown key (did you mean 'sink'?)" in capsys.readouterr().err


def test_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["go"], ["run"], ["run", "a.yaml", "b.yaml"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "usage: rowdelta" in capsys.readouterr().err
    for options, words in (
        (["--at-position", "x"], "got 'x', expected JSON such as"),
        (["--at-position", "[1]"], "got '[1]', expected JSON such as"),
        (["--as-of", "x"], "got 'x', expected a time such as 2026-01-31T12:00:00"),
        (["--version", "1", "--as-of", "2026-01-31"], "not allowed with argument --version"),
        *((["--limit", text], f"argument --limit: got '{text}', expected a whole number of at least 1")
          for text in ("0", "-1", "many", "1.5")),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main(["show", "a.yaml", "orders", *options])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "--files", "d", "--topics", "a.*", "--option", "a=b"],
         "--topics and --option: only with --bootstrap-servers, and here is --files."),
        (["init", "--files", "d", "--registry", "http://r"], "--registry: only with --bootstrap-servers"),
        (["init", "--bootstrap-servers", "b:9092", "--order-by", "seq"],
         "--order-by: only with --files, and here is --bootstrap-servers."),
        (["maintain", "a.yaml", "--convert-equality-deletes", "--where", "id > 1"], "rewrites none. Leave out one"),
    ],
)  # fmt: skip
def test_options_that_have_no_effect_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_reader_of_the_output_that_has_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            command("packages", write_config(tmp_path)), stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_that_was_closed_before(tmp_path: Path) -> None:
    line = " ".join(command("packages", write_config(tmp_path)))
    done = subprocess.run(["sh", "-c", f"{line} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unexpected_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = [KeyError("x"), BrokenPipeError("of a service")]

    def fails(_: object) -> str:
        raise errors[0]

    monkeypatch.setattr("sink.spark.session.packages", fails)
    assert cli.main(["packages", str(write_config(tmp_path))]) == 1
    *_, error, advice = capsys.readouterr().err.splitlines()
    assert error == "  KeyError: 'x'"
    assert advice.startswith("rowdelta: this is a mistake in rowdelta. Each table is as its last commit left it")
    del errors[0]
    assert cli.main(["packages", str(write_config(tmp_path))]) == 1  # nor is it the output that has gone
    assert capsys.readouterr().err.splitlines()[-1] == "  BrokenPipeError: of a service"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    spark = re.escape(pyspark.__version__)
    minor = re.escape(".".join(pyspark.__version__.split(".")[:2]))
    assert re.fullmatch(
        r"rowdelta (\d+\.\d+\.\d+|of unknown version)\n"
        rf"Spark {spark}, for Scala 2\.\d\d\n"
        rf"Iceberg (\d+\.\d+\.\d+)  org\.apache\.iceberg:iceberg-spark-runtime-{minor}_2\.\d\d:\2\n"
        r"Delta Lake \d\.\d\.\d  io\.delta:delta-spark\S*_2\.\d\d:\S+,io\.delta:delta-storage:\S+\n"
        rf"Kafka connector  org\.apache\.spark:spark-sql-kafka-0-10_2\.\d\d:{minor}\.\d\n",
        capsys.readouterr().out,
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], ["run", "check", "status", "demo", "exit codes:", "75", "rowdelta init --bootstrap-servers"]),
        (["run", "--help"], ["sink.yaml", "Ctrl-C and SIGTERM"]),
        (["status", "--help"], ["Changes nothing."]),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        output = capsys.readouterr().out
        assert [word for word in words if word not in output] == []


# spark-submit ---------------------------------------------------------------------------------------------------------


def submit(path: Path, master: str, *more: str) -> list[str]:
    """:param path: of a configuration with Iceberg alone: Delta Lake needs more settings."""
    packages = finish(command("packages", path)).stdout.strip()
    assert packages.startswith("org.apache.iceberg:iceberg-spark-runtime-")
    settings = [f"--conf={name}={value}" for name, value in LOCAL.items() if name.startswith("spark.driver.")]
    program = str(Path(sink.__file__).with_name("__main__.py"))
    return [
        str(SPARK_HOME / "bin" / "spark-submit"),
        f"--master={master}",
        f"--packages={packages}",
        *settings,
        "--conf=spark.ui.enabled=false",
        *more,
        program,
        "run",
        str(path),
    ]


@pytest.mark.versions
def test_spark_submit_local(spark: SparkSession, tmp_path: Path) -> None:
    expected = write_changes(tmp_path, 4)
    given = event_log(tmp_path) | {"spark.redaction.regex": "custom", "spark.my.custom": "hunter2"}
    settings = [f"--conf={name}={value}" for name, value in given.items()]
    result = finish(submit(write_config(tmp_path, catalogs=SECRETS), "local[2]", *settings))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    check_event_log(tmp_path)
    assert commits(spark, tmp_path) == 4


def test_spark_submit_passes_exit_codes_on(tmp_path: Path) -> None:
    write_changes(tmp_path, 1)
    (tmp_path / "changes" / "bad.json").write_text("no JSON\n")
    result = finish(submit(write_config(tmp_path, catalogs=ICEBERG), "local[2]"))
    assert result.returncode == 3, result.stderr


def test_spark_submit_stops_on_sigterm(spark: SparkSession, tmp_path: Path) -> None:
    """Here the JVM is the parent and gets the signal. The micro-batch in progress is committed."""
    expected = write_changes(tmp_path, FILES)
    path = write_config(tmp_path, trigger="1 second", catalogs=ICEBERG)
    with running(submit(path, "local[2]"), tmp_path / "log") as job:
        job.wait_for_batches(2)
        job.signal(signal.SIGTERM, group=False)
        assert job.wait() == 0, job.log
        assert not complaints(job.log), job.log
        done = job.batches()
    assert commits(spark, tmp_path) == done < FILES
    result = finish(command("run", write_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert table_content(spark, tmp_path) == expected
    # as above: Spark may have noted a file and not yet the micro-batch
    assert commits(spark, tmp_path) in (FILES - 1, FILES)
