"""Which Spark is installed, and what follows from that, found without a JVM."""

import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from sink import cli
from sink.errors import ConfigError
from sink.spark import versions as spark_versions

pytestmark = pytest.mark.versions

CONFIG = """\
sink: {id: shop, checkpoint: state}
source: {type: kafka, format: debezium-json, options: {kafka.bootstrap.servers: "nowhere:9092"}}
catalogs: {lake: {type: hadoop, warehouse: warehouse}}
tables: [{source: orders, target: lake.shop.orders, key: [id], columns: {id: bigint}}]
"""


@pytest.fixture
def spark_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `jars` of an installation that SPARK_HOME names."""
    home = tmp_path / "spark"
    (home / "jars").mkdir(parents=True)
    monkeypatch.setenv("SPARK_HOME", str(home))
    return home / "jars"


@pytest.mark.parametrize(
    ("jar", "iceberg", "connector"),
    [
        ("spark-core_2.12-3.5.7.jar", "3.5_2.12:1.11.0", "_2.12:3.5.7"),
        ("spark-core_2.13-3.5.1.jar", "3.5_2.13:1.11.0", "_2.13:3.5.1"),  # some vendors' 3.5 is for Scala 2.13
        ("spark-core_2.12-3.5.5-amzn-1.jar", "3.5_2.12:1.11.0", "_2.12:3.5.5"),
        ("spark-core_2.13-4.0.2.jar", "4.0_2.13:1.11.0", "_2.13:4.0.0"),
        ("spark-core_2.13-4.1.1.jar", "4.1_2.13:1.12.0", "_2.13:4.1.1"),
    ],
)
def test_packages_are_those_of_the_installed_spark(
    jar: str, iceberg: str, connector: str, spark_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (spark_home / jar).touch()
    assert cli.main(["packages", str(written(tmp_path, ""))]) == 0
    assert capsys.readouterr().out.strip().split(",") == [
        f"org.apache.iceberg:iceberg-spark-runtime-{iceberg}",
        f"org.apache.spark:spark-sql-kafka-0-10{connector}",
    ]


@pytest.mark.parametrize(
    ("jar", "delta"),
    [
        ("spark-core_2.12-3.5.7.jar", ["delta-spark_2.12:3.3.3", "delta-storage:3.3.3"]),
        ("spark-core_2.13-3.5.1.jar", ["delta-spark_2.13:3.3.3", "delta-storage:3.3.3"]),
        ("spark-core_2.13-4.0.2.jar", ["delta-spark_4.0_2.13:4.4.0", "delta-storage:4.4.0"]),
        ("spark-core_2.13-4.1.1.jar", ["delta-spark_4.1_2.13:4.4.0", "delta-storage:4.4.0"]),
        ("spark-core_2.13-4.2.0.jar", ["delta-spark_4.2_2.13:4.4.0", "delta-storage:4.4.0"]),
    ],
)
def test_packages_of_delta_lake(
    jar: str, delta: list[str], spark_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where a catalog is of that type, and Iceberg's only where one is of another."""
    (spark_home / jar).touch()
    path = written(tmp_path, "")
    for catalogs, has_iceberg in (("", False), (", old: {type: rest, uri: x}", True)):
        if has_iceberg and "-4.2." in jar:  # which Iceberg has no runtime for
            continue
        text = CONFIG.replace("{type: hadoop, warehouse: warehouse}", "{type: delta, warehouse: warehouse}" + catalogs)
        path.write_text(text)
        assert cli.main(["packages", str(path)]) == 0
        found = capsys.readouterr().out.strip().split(",")
        assert [name for name in found if "delta" in name] == [f"io.delta:{name}" for name in delta]
        assert any("iceberg" in name for name in found) == has_iceberg
        assert len(found) == 3 + has_iceberg


def test_without_spark_home_it_is_the_spark_that_pyspark_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert spark_versions.installed().full == pyspark.__version__


@pytest.mark.parametrize("version", ["3.4.4", "4.3.0"])
def test_on_another_version_the_message_says_which_are_known(version: str, spark_home: Path) -> None:
    (spark_home / f"spark-core_2.13-{version}.jar").touch()
    with pytest.raises(ConfigError, match=rf"Spark {version}: .* known to work on Spark 3\.5, 4\.0, 4\.1 and 4\.2\."):
        _ = spark_versions.installed().known


def test_a_spark_home_without_spark_is_named(spark_home: Path) -> None:
    with pytest.raises(ConfigError, match=f"SPARK_HOME: .*no spark-core jar in {spark_home}"):
        spark_versions.installed()


def test_a_driver_in_a_cluster_may_have_its_jars_elsewhere(spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert spark_versions.installed().full == pyspark.__version__


@pytest.mark.parametrize("command", ["run", "check", "status"])
@pytest.mark.parametrize(
    ("version", "why"),
    [("4.3.0", "known to work on Spark 3.5, 4.0, 4.1 and 4.2."), ("4.2.0", "only catalogs of type delta")],
)
def test_commands_refuse_a_version_that_does_not_fit(
    command: str,
    version: str,
    why: str,
    spark_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (spark_home / f"spark-core_2.13-{version}.jar").touch()
    monkeypatch.setattr(pyspark, "__version__", version)
    assert cli.main([command, str(written(tmp_path, ""))]) == ConfigError.exit_code
    assert why in capsys.readouterr().err


def test_spark_home_and_pyspark_must_be_one_version(
    spark_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "3.5.7" if pyspark.__version__.startswith("4") else "4.0.2"
    (spark_home / f"spark-core_2.13-{other}.jar").touch()
    assert cli.main(["run", str(written(tmp_path, ""))]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert f"SPARK_HOME: {spark_home.parent} is Spark {other}, but PySpark is {pyspark.__version__}" in error


@pytest.mark.parametrize(
    ("settings", "variables", "named"),
    [
        ("'spark.remote': 'sc://nowhere'", {}, "spark: spark.remote"),
        ("spark.api.mode: connect", {}, "spark: spark.api.mode"),
        ("", {"SPARK_REMOTE": "sc://nowhere"}, "SPARK_REMOTE"),
        ("", {"SPARK_API_MODE": "connect"}, "SPARK_API_MODE"),
        ("", {"SPARK_CONNECT_MODE_ENABLED": "1"}, "SPARK_CONNECT_MODE_ENABLED"),  # in a notebook with such a session
    ],
)
def test_spark_connect_is_refused(
    settings: str,
    variables: dict[str, str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", str(written(tmp_path, settings))]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert f"rowdelta: {named}" in error
    assert "makes a session of Spark Connect" in error


def test_versions_are_shown_without_importing_spark() -> None:
    code = "import sys; from sink import cli\ntry: cli.main(['--version'])\nfinally: print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def written(folder: Path, settings: str) -> Path:
    """The configuration as a file, with a setting of Spark's."""
    path = folder / "sink.yaml"
    path.write_text(f"{CONFIG}spark: {{{settings}}}\n")
    return path
