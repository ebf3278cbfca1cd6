"""The session that the sink starts."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

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
