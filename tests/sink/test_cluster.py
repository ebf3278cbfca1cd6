"""Workers that share nothing with the driver: the archive of `rowdelta package`, and a job on a cluster with it."""

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import pyarrow as pa
import pyspark
import pytest
import yaml
from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Operation

from deltawriters.storage import file_io
from sink import cli, config
from sink.commands import packaging
from tests.stack.counting import CountingProxy, Request, counting
from tests.stack.jars import HERE, jars, sqlite_jdbc_jar
from tests.stack.process import Process, free_ports, listens, wait_until
from tests.stack.s3 import S3, running_s3

CONFIG = """
sink: {id: shop, checkpoint: /tmp/none}
source: {type: files, format: row-kind}
catalogs: {lake: {type: hadoop, warehouse: "s3a://lake/tables"}, delta: {type: delta, warehouse: "s3a://lake/delta"}}
tables:
  - {source: ./a b, target: lake.shop.orders, key: [id], columns: {id: bigint}, order_by: [seq bigint]}
  - {source: ./c, target: delta.shop.orders, key: [id], columns: {id: bigint}, order_by: [seq bigint]}
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The archive, and what was printed."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "a sink.yaml").write_text(CONFIG)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        patch.setattr(packaging, "_LEVEL", 1)
        patch.chdir(folder)
        assert cli.main(["package", "a sink.yaml"]) == 0
    (archive,) = folder.glob("*.tar.gz")
    return archive, printed.getvalue().splitlines()


def test_a_bare_python_runs_the_tasks_modules(packed: tuple[Path, list[str]], tmp_path: Path) -> None:
    """With Spark's own zip files, as a worker of Spark has them. The folder may be anywhere."""
    archive, _ = packed
    folder = tmp_path / "an executor's folder" / "rowdelta"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    venv.create(tmp_path / "bare", symlinks=True)
    spark = ":".join(map(str, (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")))
    seen = [
        "import sink.spark.daemon, sink.targets.iceberg.writers, sink.targets.delta.writers, pyarrow.dataset",
        "import changelog.formats.debezium_avro, changelog.formats.avro",
        "import confluent_kafka.schema_registry, pyarrow.fs, pandas",
        "from importlib.metadata import version",
        "print(pyarrow.__file__, sink.__file__, version('rowdelta'), sep='\\n')",
    ]
    done = subprocess.run(
        [folder / "bin" / "python", "-c", "\n".join(seen)],
        env={"PATH": f"{tmp_path / 'bare' / 'bin'}:/usr/bin:/bin", "PYTHONPATH": spark},
        cwd="/", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arrow, ours, version = done.stdout.splitlines()
    assert arrow.startswith(str(folder / "lib"))
    assert ours.startswith(str(folder / "lib"))
    assert version in archive.name

    lost = subprocess.run(
        [folder / "bin" / "python"], env={"PATH": "/usr/bin:/bin", "ROWDELTA_PYTHON": "/no/python"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert lost.returncode == 127
    assert "no /no/python is on this machine's PATH" in lost.stderr


def test_what_is_left_out(packed: tuple[Path, list[str]]) -> None:
    archive, _ = packed
    with tarfile.open(archive) as opened:
        entries = opened.getmembers()
    names = [entry.name for entry in entries]
    assert names == sorted(names)
    assert {entry.mtime for entry in entries} == {packaging._TIME}
    assert not [name for name in names if re.search(r"/(pyspark|py4j|pytest|moto|tests|__pycache__)(/|$)", name)]
    assert "lib/sink/spark/tasks/write.py" in names
    assert sum(entry.size for entry in entries) < 400_000_000
    assert archive.name == packaging.default_name()
    assert re.fullmatch(rf"rowdelta-[\d.]+-cp{sys.version_info[0]}{sys.version_info[1]}-\w+\.tar\.gz", archive.name)


def test_the_command(packed: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A shell runs it as it is printed, also with a space in a path."""
    archive, printed = packed
    (tmp_path / "spark-submit").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "spark-submit").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", "\n".join(printed)], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER": "spark://host:7077"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    words = done.stdout.splitlines()
    options = dict(zip(words[:-3:2], words[1:-3:2], strict=True))
    assert options["--master"] == "spark://host:7077"
    assert options["--archives"] == f"{archive.name}#rowdelta"
    assert {part.split(":")[0] for part in options["--packages"].split(",")} == {"org.apache.iceberg", "io.delta"}
    assert "--exclude-packages" in options
    assert "spark.pyspark.python=./rowdelta/bin/python" in words
    assert f"spark.pyspark.driver.python={sys.executable}" in words
    assert words[-2:] == ["run", "a sink.yaml"]


def test_the_same_packages_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b = 1\n")
    files = [packaging._File("a", b"1", 0o755), packaging._File("b.py", tmp_path / "b.py")]
    for name in ("one", "two"):
        (tmp_path / "b.py").touch()
        packaging._write(tmp_path / name, files)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_existing_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sink.yaml").write_text(CONFIG)
    (tmp_path / "x.tar.gz").write_text("mine")
    assert cli.main(["package", str(tmp_path / "sink.yaml"), "--output", str(tmp_path / "x.tar.gz")]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "x.tar.gz").read_text() == "mine"
    assert cli.main(["package", str(tmp_path / "sink.yaml"), "--output", str(tmp_path / "no" / "x.tar.gz")]) == 2
    assert "no folder" in capsys.readouterr().err


# a cluster ------------------------------------------------------------------------------------------------------------

SPARK_HOME = Path(pyspark.__file__).parent
FILES, ROWS = 3, 12_000
"""Enough rows in a file for a shuffle, so that both executors write."""


@dataclass
class Cluster:
    """A Spark master with two workers of one core each. These have folders, temporary files and a Python of their own,
    and nothing else: neither rowdelta nor any of its packages.
    """

    folder: Path
    address: str = ""
    workers: list[Process] = field(default_factory=list)

    def kill(self, number: int) -> int:
        """Kill a worker, its executors and their Python processes at once, as if its machine lost power.

        :return: number of processes.
        """
        home = self.home(number)
        killed = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_worker = f"{home}/work\0".encode() in (process / "cmdline").read_bytes()
                if is_worker or Path(os.readlink(process / "cwd")).is_relative_to(home):
                    os.kill(int(process.name), signal.SIGKILL)
                    killed += 1
        return killed

    def machine_of(self, port: int) -> int | None:
        """The worker on whose machine a process has this port; None if it is the driver's."""
        of_port = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{fields[9]}]" for fields in of_port if int(fields[1].split(":")[1], 16) == port}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if sockets & {os.readlink(file) for file in (process / "fd").iterdir()}:
                    cwd = Path(os.readlink(process / "cwd"))
                    return next((number for number in range(2) if cwd.is_relative_to(self.home(number))), None)
        return None

    def home(self, number: int) -> Path:
        return self.folder / f"machine{number}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    port, ui, *worker_uis = free_ports(4)
    found = Cluster(tmp_path, f"spark://127.0.0.1:{port}")
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    program = [str(SPARK_HOME / "bin" / "spark-class"), "org.apache.spark.deploy"]

    def command(home: Path, *arguments: object) -> list[str]:
        (home / "tmp").mkdir(parents=True)
        changed = {
            "PATH": f"{bare / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": home / "tmp",
            "SPARK_LOCAL_DIRS": home / "tmp",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
        }
        unset = [f"--unset={name}" for name in os.environ if name.startswith(("PYSPARK", "PYTHON", "SPARK_HOME"))]
        pairs = [f"{name}={value}" for name, value in changed.items()]
        return ["env", *unset, *pairs, program[0], f"{program[1]}.{arguments[0]}", *map(str, arguments[1:])]

    at = ("--host", "127.0.0.1")
    with ExitStack() as stack:
        master = command(tmp_path / "master", "master.Master", *at, "--port", port, "--webui-port", ui)
        processes = [Process(master, tmp_path / "master.log", lambda: listens(port))]
        for number, worker_ui in enumerate(worker_uis):
            home = found.home(number)
            worker = command(
                home, "worker.Worker", *at, "--cores", 1, "--memory", "1g", "--webui-port", worker_ui,
                "--work-dir", home / "work", found.address,
            )  # fmt: skip
            processes.append(Process(worker, tmp_path / f"worker{number}.log", lambda: True))
        for process in processes:
            stack.callback(process.stop)
            process.start()
        assert wait_until(lambda: alive_workers(ui) == 2)
        yield found


def alive_workers(ui: int) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{ui}/json/", timeout=5) as response:
            return int(json.load(response)["aliveworkers"])
    except OSError:
        return 0


@pytest.fixture
def store() -> Iterator[CountingProxy]:
    with running_s3() as s3, counting(s3.endpoint) as proxy:
        yield proxy


class AMachineFails:
    """Kills a worker in the middle of the second micro-batch of a table: while one of its tasks stores a data file.
    What it has sent still arrives.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.killed = 0
        self._cluster = cluster
        self._lock = threading.Lock()
        self._is_second = False

    def __call__(self, request: Request) -> None:
        if request.method != "PUT" or "/warehouse/shop/orders/" not in request.path:
            return
        if "/metadata/snap-" in request.path:
            self._is_second = True
        elif self._is_second and not self.killed and "/data/" in request.path:
            with self._lock:
                machine = self._cluster.machine_of(request.client)
                if machine is not None and not self.killed:
                    self.killed = self._cluster.kill(machine)


def write_changes(store: CountingProxy) -> dict[int, int]:
    """Change files for two tables, each of which updates keys of those before it. Returns the tables' content."""
    content: dict[int, int] = {}
    bucket = file_io(tuple(of_s3(store).items()))
    for number in range(FILES):
        lines = []
        for seq in range(number * ROWS, (number + 1) * ROWS):
            key = seq * 7 % (ROWS * 2)
            kind = "-D" if seq % 11 == 0 else "+U"
            lines.append(json.dumps({"row_kind": kind, "id": key, "v": seq, "seq": seq}))
            content.pop(key, None)
            if kind == "+U":
                content[key] = seq
        for folder in ("changes", "changes2"):
            with bucket.new_output(f"s3://{S3.BUCKET}/{folder}/{number:03d}.json").create(overwrite=True) as stream:
                stream.write("\n".join(lines).encode())
    return content


def of_s3(store: CountingProxy) -> dict[str, str]:
    return {
        "s3.endpoint": store.uri,
        "s3.access-key-id": S3.KEY,
        "s3.secret-access-key": S3.SECRET,
        "s3.region": "us-east-1",
    }


def configured(folder: Path, store: CountingProxy) -> Path:
    """Everything is in the bucket, but for the catalog's own database, which only the driver reads."""
    bucket = f"s3a://{S3.BUCKET}"
    shared = {"key": ["id"], "columns": {"id": "bigint", "v": "bigint"}, "order_by": ["seq bigint"]}
    values = {
        "sink": {"id": "shop", "checkpoint": f"{bucket}/state", "trigger": "available-now", "on_bad_record": "fail"},
        "source": {
            "type": "files",
            "format": "row-kind",
            "options": {"path_format": "json", "maxFilesPerTrigger": 1},
        },
        "catalogs": {
            "lake": {
                "type": "jdbc",
                "uri": f"jdbc:sqlite:{folder / 'catalog.db'}",
                "warehouse": f"{bucket}/warehouse",
                **of_s3(store),
            },
            "delta": {"type": "delta", "warehouse": f"{bucket}/delta"},
        },
        "tables": [
            {"source": f"{bucket}/changes", "target": "lake.shop.orders", **shared},
            {"source": f"{bucket}/changes2", "target": "delta.shop.orders", **shared},
        ],
    }
    path = folder / "sink.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def submitted(path: Path, archive: Path, cluster: Cluster, store: CountingProxy) -> tuple[int, str]:
    """Run the command that `rowdelta package` prints, with more of Spark's own options."""
    lines = packaging.submit_line(path, config.load(path), archive)
    classes = ":".join(map(str, [*jars(HERE / "ivy-s3.xml"), sqlite_jdbc_jar()]))
    settings = {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.extraClassPath": classes,
        "spark.executor.extraClassPath": classes,
        "spark.hadoop.fs.s3a.endpoint": store.uri,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": S3.KEY,
        "spark.hadoop.fs.s3a.secret.key": S3.SECRET,
    }
    assert lines[1] == "spark-submit \\"
    lines[2:2] = [f"  --conf '{name}={value}' \\" for name, value in settings.items()]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_HOME", "SPARK_LOCAL"))}
    own = {
        "MASTER": cluster.address,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{SPARK_HOME / 'bin'}:{os.environ['PATH']}",
    }
    with (path.parent / "job.log").open("wb") as log:
        done = subprocess.run(
            ["sh", "-c", "\n".join(lines)],
            env=inherited | own,
            cwd="/",
            stdout=log,
            stderr=log,
            timeout=540,
            check=False,
        )
    return done.returncode, (path.parent / "job.log").read_text()


def iceberg_content(folder: Path, store: CountingProxy) -> tuple[list[Mapping[str, int]], int]:
    """Rows, and number of micro-batches that were committed."""
    with closing(sqlite3.connect(folder / "catalog.db")) as database:
        ((location,),) = database.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
    table = StaticTable.from_metadata(location, of_s3(store))
    summaries = [each.summary for each in table.snapshots() if each.summary is not None]
    # maintenance rewrites files meanwhile
    commits = sum(summary.operation != Operation.REPLACE for summary in summaries)
    return table.scan().to_arrow().to_pylist(), commits


def delta_content(store: CountingProxy) -> list[Mapping[str, int]]:
    from deltalake import DeltaTable, QueryBuilder  # not there where only the tests of other Sparks run

    options = {
        # not by the proxy, which is a thread of this process: delta-rs waits with Python's lock held
        "AWS_ENDPOINT_URL": store.server,
        "AWS_ACCESS_KEY_ID": S3.KEY,
        "AWS_SECRET_ACCESS_KEY": S3.SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    table = DeltaTable(f"s3://{S3.BUCKET}/delta/shop/orders", storage_options=options)
    found = QueryBuilder().register("t", table).execute("SELECT id, v FROM t").read_all()
    rows: list[Mapping[str, int]] = pa.table(found).to_pylist()
    return rows


@pytest.mark.spark
def test_a_cluster_that_shares_no_folder_loses_a_machine(
    packed: tuple[Path, list[str]], cluster: Cluster, store: CountingProxy, tmp_path: Path
) -> None:
    """Warehouse, checkpoint and index are in a bucket, and tasks have what `rowdelta package` ships. No row is lost or
    there twice.
    """
    expected = write_changes(store)
    path = configured(tmp_path, store)
    store.before = failure = AMachineFails(cluster)
    code, log = submitted(path, packed[0], cluster, store)
    store.before = None
    assert code == 0, log
    assert failure.killed >= 3, "a worker, an executor and a Python process"
    rows, commits = iceberg_content(tmp_path, store)
    assert sorted((row["id"], row["v"]) for row in rows) == sorted(expected.items())
    assert commits == FILES
    assert sorted((row["id"], row["v"]) for row in delta_content(store)) == sorted(expected.items())
    for number in range(2):  # both took part, and each had the index's runs for itself
        assert list(cluster.home(number).glob("work/app-*/*/rowdelta/bin/python"))
        assert list(cluster.home(number).glob("tmp/rowdelta-index-*/*"))
