"""What makes a start faster, and must never make it fail: the record of resolved jars, the archive of classes."""

import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest

from sink import cli, config
from sink.commands import training
from sink.spark import archive, cache, jars, session
from sink.spark import versions as spark_versions
from sink.spark.jars import Jar
from sink.spark.versions import SparkVersion
from tests.stack.process import java_command, wait_until

OPTIONS = {"spark.master": "local[2]", "spark.jars.packages": "org.example:first:1.0,org.example:second:2.1"}
PROGRAM = ("org.apache.spark.launcher.Main", "org.example.Program")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS", "SPARK_DIST_CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "rowdelta"


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    path = tmp_path / "first jar.jar"
    with ZipFile(path, "w") as file:
        file.writestr("org/example/First.class", b"")
    return path


def uri(path: Path) -> str:
    return path.as_uri()


# The cache folder


def test_only_the_user_can_read_and_write_the_cache(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    path = cache.folder("jars")
    assert path == own_cache / "jars"
    assert {folder.stat().st_mode & 0o777 for folder in (own_cache, path)} == {0o700}


def test_no_cache_where_there_can_be_none(own_cache: Path, tmp_path: Path) -> None:
    own_cache.parent.write_text("a file")
    assert cache.folder("jars") is None


def test_no_cache_in_a_folder_of_others(own_cache: Path, tmp_path: Path) -> None:
    own_cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    own_cache.symlink_to(tmp_path / "elsewhere")
    assert cache.folder("jars") is None
    if os.getuid() == 0:
        own_cache.unlink()
        own_cache.mkdir()
        os.chown(own_cache, 12345, 12345)
        assert cache.folder("jars") is None


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    cache.write(tmp_path / "missing" / "file", "text")
    (tmp_path / "folder").mkdir()
    cache.write(tmp_path / "folder", "text")  # can't be replaced by a file
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# Jars


def test_jars_are_taken_from_the_record(jar: Path) -> None:
    assert jars.recorded(OPTIONS) is None
    jars.record(OPTIONS, uri(jar))
    assert jars.recorded(OPTIONS) == [Jar(str(jar), jar.stat().st_size, int(jar.stat().st_mtime))]


@pytest.mark.parametrize(
    "other",
    [
        {"spark.jars.packages": "org.example:first:1.1"},
        {"spark.jars.repositories": "https://repository.example"},
        {"spark.jars.excludes": "org.example:second"},
        {"spark.jars.ivy": "/elsewhere"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_packages_have_another_record(jar: Path, other: Mapping[str, str]) -> None:
    jars.record(OPTIONS, uri(jar))
    assert jars.recorded({**OPTIONS, **other}) is None


def test_the_record_of_another_spark_does_not_count(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jars.record(OPTIONS, uri(jar))
    monkeypatch.setattr(spark_versions, "installed", lambda: SparkVersion("4.0.9", "2.13"))
    assert jars.recorded(OPTIONS) is None


def test_a_jar_that_was_deleted_or_changed_is_resolved_again(jar: Path) -> None:
    jars.record(OPTIONS, uri(jar))
    os.utime(jar, (1, 1))
    assert jars.recorded(OPTIONS) is None
    jars.record(OPTIONS, uri(jar))
    assert jars.recorded(OPTIONS) is not None
    jar.unlink()
    assert jars.recorded(OPTIONS) is None


def test_a_damaged_record_does_not_count(jar: Path, own_cache: Path) -> None:
    for damaged in ("", "[", "[]", "{}", '[{"path": 1}]', '["a"]'):
        jars.record(OPTIONS, uri(jar))
        (record,) = (own_cache / "jars").iterdir()
        record.write_text(damaged)
        assert jars.recorded(OPTIONS) is None


def test_a_first_start_waits_for_another_one_and_takes_its_jars(jar: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ivy would have both download them, and its cache is not made for that."""
    caplog.set_level("INFO", logger="rowdelta")
    with ThreadPoolExecutor(1) as pool:
        with jars.resolving(OPTIONS) as found:
            assert found == ()
            other = pool.submit(resolved)
            assert wait_until(lambda: "another process" in caplog.text or other.done(), 30)
            jars.record(OPTIONS, uri(jar))
        assert [each.path for each in other.result(30)] == [str(jar)]
    with jars.resolving(OPTIONS) as found, jars.resolving(OPTIONS) as again:
        assert found == again != ()


def resolved() -> Sequence[Jar]:
    with jars.resolving(OPTIONS) as found:
        return found


def test_a_first_start_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "_OTHER_SECONDS", 0.2)
    with jars.resolving(OPTIONS):
        assert resolved() == ()


def test_a_first_start_without_a_cache(own_cache: Path) -> None:
    own_cache.parent.write_text("a file")
    assert resolved() == ()


def test_packages_with_python_modules_are_left_to_spark(jar: Path) -> None:
    """Spark puts them on Python's path; on the JVM's class path nobody would find their modules."""
    with ZipFile(jar, "a") as file:
        file.writestr("example/__init__.py", "")
    jars.record(OPTIONS, uri(jar))
    assert jars.recorded(OPTIONS) is None


def test_the_python_modules_in_deltas_jar_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "io.delta_delta-spark_4.0_2.13-4.4.0.jar"
    with ZipFile(path, "w") as file:
        file.writestr("delta/__init__.py", "")
    jars.record(OPTIONS, uri(path))
    assert jars.recorded(OPTIONS) == [jars.stamp(str(path))]


@pytest.mark.parametrize(
    "others",
    [
        {"spark.jars": "/own.jar"},
        {"spark.jars.ivySettings": "/ivysettings.xml"},
        {"spark.master": "spark://host:7077"},
        {"spark.master": "local-cluster[2,1,1024]"},
        {"spark.jars.packages": "org.example:first:1.0-SNAPSHOT"},
        {"spark.jars.packages": "org.example:first:latest.release,org.example:second:1.0"},
        {"spark.jars.packages": "org.example:first:[1.0,2.0)"},
    ],
    ids=lambda others: "=".join(next(iter(others.items()))),
)
def test_jars_that_others_decide_on_are_left_to_spark(others: Mapping[str, str]) -> None:
    assert jars.are_ours(OPTIONS)
    assert not jars.are_ours({**OPTIONS, **others})


def test_jars_in_sparks_own_files_are_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert jars.are_ours(OPTIONS)
    (tmp_path / "spark-defaults.conf").write_text("spark.jars /own.jar\n")
    assert not jars.are_ours(OPTIONS)
    (tmp_path / "spark-defaults.conf").unlink()
    (tmp_path / "spark-env.sh").touch()
    assert not jars.are_ours(OPTIONS)


# Python workers


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        ({"spark.master": "local[2]"}, "sink.spark.daemon"),
        ({"spark.master": "local[2]", "spark.python.daemon.module": "own.daemon"}, "own.daemon"),
        ({"spark.master": "spark://host:7077"}, None),
    ],
    ids=["local", "the user's own", "cluster"],
)
def test_the_module_that_forks_python_workers(tmp_path: Path, settings: Mapping[str, str], module: str | None) -> None:
    from tests.sink.test_submit import write_config

    loaded = config.load(write_config(tmp_path, spark=settings))
    assert session.settings(loaded).get("spark.python.daemon.module") == module


# The archive of classes


def archive_of(jar: Path, options: Mapping[str, str] = OPTIONS) -> Path:
    found = archive.find(options, [jars.stamp(jar)])
    assert found is not None
    return found


def flags(jar: Path, *, training: bool = False) -> list[str]:
    """What the JVM of a start is told."""
    with archive.launching(OPTIONS, [jars.stamp(jar)], training=training):
        return shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", ""))


def test_other_jars_have_another_archive(jar: Path) -> None:
    before = archive_of(jar)
    assert archive_of(jar) == before
    os.utime(jar, (1, 1))
    assert archive_of(jar) != before
    assert archive_of(jar, OPTIONS | {"spark.driver.extraClassPath": "/own"}) != archive_of(jar)


def test_another_jvm_has_another_archive(jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = archive_of(jar)
    for name in ("bin/java", "lib/server/libjvm.so", "lib/modules"):
        (tmp_path / "jvm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jvm" / name).touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jvm"))
    other = archive_of(jar)
    assert other != before
    os.utime(tmp_path / "jvm/lib/modules", (1, 1))
    assert archive_of(jar) != other


def test_the_users_own_archive_is_left_alone(jar: Path) -> None:
    own = {"spark.driver.extraJavaOptions": "-XX:SharedArchiveFile=/own.jsa"}
    assert archive.find(OPTIONS | own, [jars.stamp(jar)]) is None


@pytest.mark.parametrize("cache", ["a cache", "cache"])  # the cache that tests of real starts share has a space too
def test_the_jvm_is_told_of_jars_and_archive_and_the_environment_is_as_before(
    jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    found = archive_of(jar)
    before = dict(os.environ)
    with archive.launching(OPTIONS, [jars.stamp(jar)]):
        assert os.environ["SPARK_DIST_CLASSPATH"] == str(jar)
        assert "Archive" not in os.environ["SPARK_SUBMIT_OPTS"]
    assert f"-XX:ArchiveClassesAtExit={found}" in flags(jar, training=True)
    found.touch()
    assert f"-XX:SharedArchiveFile={found}" in flags(jar)
    assert dict(os.environ) == before


@pytest.mark.parametrize("has_archive", [True, False])
def test_a_long_run_compiles_late_and_collects_as_ever(jar: Path, *, has_archive: bool) -> None:
    if has_archive:
        archive_of(jar).touch()
    found = " ".join(flags(jar))
    assert "Tier4InvocationThreshold" in found
    assert "TieredStopAtLevel" not in found
    assert "GC" not in found


@pytest.mark.parametrize("short", [True, False])
def test_the_users_own_options_of_the_compiler_are_left_alone(*, short: bool) -> None:
    own = {"spark.driver.extraJavaOptions": "-XX:-TieredCompilation"}
    with archive.launching(OPTIONS | own, (), short=short):
        assert "Tier" not in os.environ.get("SPARK_SUBMIT_OPTS", "")


def test_the_users_own_collector_is_no_conflict() -> None:
    with archive.launching(OPTIONS, (), short=True):
        assert "+UseSerialGC" in os.environ["SPARK_SUBMIT_OPTS"]
    with archive.launching(OPTIONS | {"spark.driver.extraJavaOptions": "-XX:+UseG1GC"}, (), short=True):
        assert "SerialGC" not in os.environ["SPARK_SUBMIT_OPTS"]


@pytest.fixture(scope="module")
def small_archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real archive, of a jar with one program: the archive's path, the jar's."""
    folder = tmp_path_factory.mktemp("small")
    (launcher,) = Path(pyspark.__file__).parent.glob("jars/spark-launcher*.jar")
    jar = folder / "program.jar"
    jar.write_bytes(launcher.read_bytes())
    java(f"-XX:ArchiveClassesAtExit={folder / 'classes.jsa'} -Xshare:auto -Xlog:cds*=off", jar)
    return folder / "classes.jsa", jar


def java(options: str, jar: Path) -> subprocess.CompletedProcess[str]:
    report = f"-XX:ErrorFile={jar.with_suffix('.crash')}"
    command = [java_command(), report, *options.split(), "-cp", str(jar), *PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def with_archive(path: Path, jar: Path) -> subprocess.CompletedProcess[str]:
    return java(" ".join(archive.using(path)), jar)


@pytest.mark.parametrize("fault", ["missing", "empty", "garbage", "killed", "damaged", "other jar", "changed jar"])
def test_a_jvm_that_cannot_use_the_archive_starts_without_it_and_says_nothing(
    small_archive: tuple[Path, Path], tmp_path: Path, fault: str
) -> None:
    path, jar = small_archive
    plain = java("", jar)
    bad, content = tmp_path / "bad.jsa", path.read_bytes()
    # on a damaged one of the right length a JVM crashes, unless it is told to look
    middle = len(content) // 2
    damaged = content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 20_000])
    damaged += content[len(damaged) :]
    killed = bytes(10_000) + content[10_000:100_000]  # of a JVM that was killed while it wrote: the head comes last
    bad.write_bytes({"empty": b"", "killed": killed, "garbage": b"x" * 100_000, "damaged": damaged}.get(fault, content))
    if fault == "missing":
        bad.unlink()
    if fault == "other jar":
        (tmp_path / "other.jar").write_bytes(jar.read_bytes())
        jar = tmp_path / "other.jar"
    before = jar.stat()
    if fault == "changed jar":
        os.utime(jar, (1, 1))
    try:
        started = with_archive(bad, jar)
    finally:
        os.utime(jar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (started.returncode, started.stdout, started.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_those_used_last_are_kept(jar: Path) -> None:
    found = archive_of(jar)
    for number, name in enumerate(["0.jsa", "1.jsa", found.name, "3.jsa"]):
        found.with_name(name).touch()
        os.utime(found.with_name(name), (number, number))
    flags(jar)
    assert {file.name for file in found.parent.glob("*.jsa")} == {found.name, "1.jsa", "3.jsa"}


def test_warm_refuses_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.sink.test_submit import write_config

    assert cli.main(["warm", str(write_config(tmp_path, spark={"spark.master": "spark://host:7077"}))]) == 2
    assert "only for a local master" in capsys.readouterr().err


def test_the_job_of_warm_is_told_to_nobody(tmp_path: Path) -> None:
    """It isn't the user's job, and it has none of the user's catalogs."""
    from tests.sink.test_submit import ICEBERG, write_config

    reports = {
        "spark.app.name": "orders",
        "spark.extraListeners": "org.example.Lineage",
        "spark.sql.queryExecutionListeners": "org.example.Lineage",
        "spark.sql.streaming.streamingQueryListeners": "org.example.Lineage",
        "spark.plugins": "org.example.Plugin",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": "hdfs://history",
        "spark.sql.defaultCatalog": "lake",
    }
    kept = {"spark.driver.memory": "2g", "spark.sql.extensions": "org.example.Extensions"}
    path = write_config(tmp_path, catalogs=ICEBERG, spark=reports | kept)
    trained = training._config(config.load(path), tmp_path)
    options = session.settings(trained)
    assert kept.items() <= options.items()
    assert options["spark.app.name"] == "rowdelta warm"
    assert not reports.keys() - {"spark.app.name"} & options.keys()


def test_warm_ends_as_its_second_process_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        training._go_on(tmp_path / "missing.yaml")
    assert ended.value.code == 2
    assert "missing.yaml" in capfd.readouterr().err


@pytest.mark.spark
def test_a_start_takes_its_classes_from_the_archive(
    tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.sink.test_submit import CACHE, LOCAL, command, finish, warm, write_changes, write_config

    write_changes(tmp_path, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_folder / CACHE))
    # once in a run of the tests: those of `test_submit` and tests/faults start their processes with it too
    assert warm(shared_folder / CACHE, write_config(tmp_path), wait=True)[-1:] == ["ok"]
    (found,) = (shared_folder / CACHE / "rowdelta/classes").glob("*.jsa")
    before = time.time_ns()
    log = f"-Xlog:class+load:file={tmp_path / 'classes.log'}"
    path = write_config(tmp_path, spark={**LOCAL, "spark.driver.extraJavaOptions": log})
    run = finish(command("run", path))
    assert run.returncode == 0, run.stderr
    assert "batch 0" in run.stderr
    assert found.stat().st_mtime_ns > before
    loaded = (tmp_path / "classes.log").read_text().splitlines()
    for name in ("org.apache.spark.SparkContext ", "org.apache.iceberg.BaseRowDelta "):
        (line,) = [line for line in loaded if name in line]
        assert line.endswith("source: shared objects file (top)")
