"""Lets several drivers commit to a Delta table on S3: `S3LogStore.java` in the place of Delta's own log store (4.4),
which excludes only writers of the same driver.

Janino compiles it, which Spark brings along: Java compiles no source without a JDK, and a compiled copy would have to
be compared with its source.
"""

import logging
from pathlib import Path
from zipfile import ZipFile

from pyspark.sql import SparkSession

from sink.spark.java_errors import SPARK_ERRORS, message_of

log = logging.getLogger("rowdelta")

_SOURCE = Path(__file__).with_name("S3LogStore.java")
_SCHEMES = ("s3a", "s3")
S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"


def use_conditional_writes(spark: SparkSession) -> bool:
    """Have Delta commit to tables on S3 by conditional writes, unless the session has another log store on purpose, or
    can't.

    :return: whether it does, if Hadoop's S3A can (3.4.2, HADOOP-19256). The log store asks it.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    conf = jvm.org.apache.spark.SparkEnv.get().conf()  # the one that Delta asks, not a copy
    chosen = any(conf.contains(name) for name in ("spark.delta.logStore.class", *map(_setting, _SCHEMES)))
    if chosen:
        return False
    jar = Path(spark.sparkContext._temp_dir, "rowdelta-s3-log-store.jar")
    try:
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(_SOURCE.read_text(encoding="utf-8"))
        with ZipFile(jar, "w") as packed:
            for name, code in compiler.getBytecodes().items():
                packed.writestr(f"{name}.class", code)
        loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
        spark.sparkContext._jsc.addJar(str(jar))  # VACUUM lists folders in tasks, which make a log store too
    except (*SPARK_ERRORS, OSError, TypeError) as error:  # TypeError: there is no Janino
        why = message_of(error)
        log.warning("no conditional writes, so only one driver at a time may write Delta tables on S3: %s", why)
        return False
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    for scheme in _SCHEMES:
        if hadoop.get(f"fs.{scheme}.impl") == S3A:  # EMR has a file system of its own for s3
            conf.set(_setting(scheme), _SOURCE.stem)
    return True


def _setting(scheme: str) -> str:
    return f"spark.delta.logStore.{scheme}.impl"
