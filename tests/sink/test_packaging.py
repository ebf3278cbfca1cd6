"""The archive of `rowdelta package`, and the command that it prints."""

import io
import re
import shlex
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pyspark
import pytest

from sink import cli
from sink.commands import packaging

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
        "import changelog.debezium_avro, changelog.avro, confluent_kafka.schema_registry, pyarrow.fs, pandas",
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
    assert "lib/sink/spark/task.py" in names
    assert sum(entry.size for entry in entries) < 400_000_000
    assert archive.name == packaging.default_name()
    assert re.fullmatch(rf"rowdelta-[\d.]+-cp{sys.version_info[0]}{sys.version_info[1]}-\w+\.tar\.gz", archive.name)


def test_the_command(packed: tuple[Path, list[str]]) -> None:
    """A shell reads it as it is printed, also with a space in a path."""
    archive, printed = packed
    words = shlex.split("\n".join(printed).replace("$MASTER", "spark://host:7077"), comments=True)
    assert words[:3] == ["spark-submit", "--master", "spark://host:7077"]
    options = dict(zip(words[1:-3:2], words[2:-3:2], strict=True))
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
