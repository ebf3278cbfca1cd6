"""What a job does with a table in a bucket: `python -m tests.delta.s3_story FOLDER ENDPOINT`.

A process of its own, since a session can't get another file system.
"""

import io
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from py4j.java_gateway import JavaObject
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame

from sink.config import Config
from sink.spark import session
from sink.spark.java_errors import JAVA_ERRORS, java_exception
from tests.delta.catalog_story import SETTINGS, command, row
from tests.delta.conftest import INTERPRETED
from tests.delta.harness import DeltaJob
from tests.delta.readers import Rows, plain
from tests.sink.harness import Row
from tests.stack.jars import HERE, ivy_to_itself, jars
from tests.stack.s3 import S3

KEY, SECRET = "AKIDROWDELTATEST", "NobodyMaySeeThisSecret"
REGIONS = ("eu", "a b", "ä:/%?#=")
"""Values of the partition column, so folders whose names need quoting."""


@dataclass
class S3Job(DeltaJob):
    endpoint: str = ""

    @property
    def catalog_options(self) -> dict[str, str]:
        return {"type": "delta", "warehouse": f"s3a://{S3.BUCKET}/warehouse"}

    def location(self, table: str = "orders", scheme: str = "s3a") -> str:
        return f"{scheme}://{S3.BUCKET}/warehouse/{self.namespace}/{table}"

    def sql_name(self) -> str:
        return f"delta.`{self.location()}`"

    def frame(self, version: int | None = None) -> DataFrame:
        reader = self.spark.read.format("delta")
        return (reader if version is None else reader.option("versionAsOf", version)).load(self.location())

    def by_delta_rs(self) -> Rows:
        options = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        table = DeltaTable(self.location(scheme="s3"), storage_options=options)
        return plain(pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all()))

    def in_bucket(self, *folders: str) -> list[str]:
        """Names of the files below a folder of the bucket."""
        jvm = self.spark.sparkContext._jvm
        assert jvm is not None
        path = jvm.org.apache.hadoop.fs.Path(f"s3a://{S3.BUCKET}/{'/'.join(folders)}")
        found = path.getFileSystem(self.spark._jsparkSession.sessionState().newHadoopConf()).listFiles(path, True)
        names = []
        while found.hasNext():
            names.append(str(found.next().getPath().getName()))
        return names

    def log_text(self) -> str:
        texts = self.spark.read.text(f"{self.location()}/_delta_log/*.json").collect()
        return "\n".join(text.value for text in texts)


def follow(job: S3Job) -> None:
    """Micro-batches, restarts, what others do, a checkpoint that is lost, and the places of index and checkpoint."""
    expected = {key: row(key, REGIONS[key % 3]) for key in range(12)}
    job.index_location = f"s3a://{S3.BUCKET}/index"
    job.write([("+I", each) for each in expected.values()])
    job.write([("-D", expected.pop(0)), ("+U", row(1, "eu")), ("+I", row(12, "eu"))])
    job.write_text("no JSON\n")
    expected |= {1: row(1, "eu"), 12: row(12, "eu")}
    job.run()
    _check(job, expected)
    assert any(name.startswith("deletion_vector_") for name in job.in_bucket("warehouse", job.namespace, "orders"))
    assert job.in_bucket("index")
    assert [letter.value for letter in job.spark.read.format("delta").load(job.location("dead_letters")).collect()] == [
        b"no JSON"
    ]

    job.sql(
        "MERGE INTO {t} t USING (SELECT 2L AS id, 'merged' AS region) s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET region = s.region"
    )
    job.sql("DELETE FROM {t} WHERE id = 3")
    job.sql("OPTIMIZE {t}")
    job.lose_checkpoint()
    job.write([("+U", row(2, "a b")), ("-D", expected.pop(4))])
    expected |= {2: row(2, "a b")}
    del expected[3]
    job.run()
    _check(job, expected)

    job.index_location = str(job.folder / "index")
    job.checkpoint = f"s3a://{S3.BUCKET}/state"  # type: ignore[assignment]
    expected[5] = row(5, "moved")
    job.write([("+U", expected[5])])
    job.run()
    _check(job, expected)
    assert job.in_bucket("state")
    assert any(path.is_file() for path in (job.folder / "index").rglob("*"))
    assert any("by sink shop" in line for line in command(job, "history", "orders", "--limit", "1"))
    assert ["5", "moved"] in [line.split() for line in command(job, "show", "orders", "--key", "5")]


@dataclass
class Meanwhile:
    """A commit's lines, as Java iterates them. Just before it is sent, somebody does something."""

    line: str
    act: Callable[[], object]
    done: bool = False

    def hasNext(self) -> bool:  # noqa: N802 - Java's name
        return not self.done

    def next(self) -> str:
        self.done = True
        self.act()
        return self.line

    class Java:
        implements: ClassVar = ["java.util.Iterator"]


def race(job: S3Job) -> None:
    """Two drivers commit the same version at the same moment: the second one is refused, and what the first one wrote
    stays. If a request is sent again whose answer was lost, the store refuses it, but the commit is there.
    """
    context = job.spark.sparkContext
    jvm, gateway = context._jvm, context._gateway
    assert jvm is not None
    assert gateway is not None
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    conf = job.spark._jsparkSession.sessionState().newHadoopConf()
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    (constructor,) = jvm.java.lang.Class.forName("S3LogStore", True, loader).getConstructors()
    stores = list[JavaObject]()
    for _ in range(2):
        arguments = gateway.new_array(jvm.java.lang.Object, 1)
        arguments[0] = conf
        stores.append(constructor.newInstance(arguments))
    one, other = stores
    for number, (line, is_refused) in enumerate([("mine", True), ("theirs", False)]):
        path = jvm.org.apache.hadoop.fs.Path(f"s3a://{S3.BUCKET}/race/_delta_log/{number:020}.json")

        def theirs(path: JavaObject = path) -> None:
            other.write(path, jvm.java.util.Collections.singletonList("theirs").iterator(), False, conf)

        caught: Exception | None = None
        try:
            one.write(path, Meanwhile(line, theirs), False, conf)
        except JAVA_ERRORS as error:
            caught = error
        name = None if caught is None else java_exception(caught).getClass().getName()
        assert name == ("java.nio.file.FileAlreadyExistsException" if is_refused else None), caught
        assert [row.value for row in job.spark.read.text(str(path.toString())).collect()] == ["theirs"]


def _check(job: S3Job, expected: Mapping[int, Row]) -> None:
    assert job.rows() == [expected[key] for key in sorted(expected)]
    assert job.by_delta_rs() == plain(pa.Table.from_pylist(job.rows(), schema=job.arrow_schema()))


def main(folder: Path, endpoint: str) -> None:
    told = io.StringIO()
    logging.basicConfig(stream=told, level=logging.WARNING)
    logging.getLogger("rowdelta").setLevel(logging.DEBUG)
    job = S3Job(None, folder, file_format="json", partition_by=("region",), endpoint=endpoint)  # type: ignore[arg-type]
    values = job.config_values()
    values["spark"] = {
        **SETTINGS,
        **INTERPRETED,
        "spark.driver.extraClassPath": ":".join(map(str, jars(HERE / "ivy-s3.xml"))),
        # others reach nothing: only the bucket's own settings lead there
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:1",
        f"spark.hadoop.fs.s3a.bucket.{S3.BUCKET}.endpoint": endpoint,
        f"spark.hadoop.fs.s3a.bucket.{S3.BUCKET}.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET,
        "spark.hadoop.delta.enableFastS3AListFrom": "true",
    }
    config = Config.model_validate(values)
    with ivy_to_itself():
        job.spark = session.start(config, short=True)
    conditional = job.spark.sparkContext._jvm.org.apache.spark.SparkEnv.get().conf()  # type: ignore[union-attr]
    assert conditional.get("spark.delta.logStore.s3a.impl") == "S3LogStore"
    follow(job)
    job.sql("VACUUM {t} DRY RUN")  # whose tasks make a log store too
    race(job)
    shown = [told.getvalue(), job.log_text(), "\n".join(command(job, "check"))]
    assert [text for text in shown if KEY in text or SECRET in text] == []
    assert "region" not in told.getvalue().lower().replace("regions", ""), told.getvalue()
    session.stop(job.spark)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
