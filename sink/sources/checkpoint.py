"""Reads from Spark's streaming checkpoint which offsets a micro-batch covers.

Only the position in the table counts. Spark's own checkpoint can be thrown away: with Kafka, each run gets a new folder
with a random name, a generation. With files, a new generation begins only if the old one doesn't fit the table's
position. Older generations are removed.
"""

import json
from typing import Any
from uuid import uuid4

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession


class CheckpointFolder:
    """A folder of checkpoint generations on any Hadoop file system."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._path = path
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._hadoop_path = jvm.org.apache.hadoop.fs.Path
        self._io_utils = jvm.org.apache.commons.io.IOUtils
        root = self._hadoop_path(path)
        self._fs: JavaObject = root.getFileSystem(spark._jsc.hadoopConfiguration())

    def generations(self) -> list[str]:
        """Names of the generations that exist."""
        root = self._hadoop_path(self._path)
        if not self._fs.exists(root):
            return []
        return [status.getPath().getName() for status in self._fs.listStatus(root) if status.isDirectory()]

    def new_generation(self) -> str:
        """Start a new generation and remove all older ones. Returns its name."""
        for name in self.generations():
            self._fs.delete(self._hadoop_path(self.location(name)), True)
        return uuid4().hex[:12]

    def location(self, generation: str) -> str:
        return f"{self._path.rstrip('/')}/{generation}"

    def last_batch(self, generation: str) -> int:
        """The highest batch id in the generation's offset log, or -1 if the log is empty."""
        return self._last(generation, "offsets")

    def last_committed_batch(self, generation: str) -> int:
        """The highest batch id in the generation's commit log, or -1 if the log is empty. Spark won't run this batch
        again.
        """
        return self._last(generation, "commits")

    def is_whole(self, generation: str) -> bool:
        """Whether Spark can go on from a generation of a files source that has planned a batch. It can't if a part was
        deleted, for example by another run that had this checkpoint. Or it could, but would not read some files: it
        keeps the files that it has seen in a log of numbered batches, and the offset of a micro-batch is a number in
        this log. A log that ends before that would give the number to other files.

        The log begins with its last summary, if it has one. It may be ahead of the offsets. A file may be empty after
        the machine has lost its power.
        """
        last = self.last_batch(generation)
        # Spark ignores the rest of a write that a crash has cut off, whose name begins with a dot
        sizes = {name: size for name, size in self._sizes(generation, "sources/0").items() if name[0].isdigit()}
        if not all(sizes.values()):
            return False
        names = [name.split(".") for name in sizes]
        first = max((int(name[0]) for name in names if name[1:] == ["compact"]), default=0)
        present = {int(name[0]) for name in names if name[1:] in ([], ["compact"])}
        try:
            end = int(self.offsets(generation, last)["logOffset"])
        except (IndexError, KeyError, TypeError, ValueError):
            return False
        return present >= set(range(first, max(present | {end}) + 1)) and (
            last == 0 or self.exists(f"{self.location(generation)}/offsets/{last - 1}")
        )

    def _last(self, generation: str, log: str) -> int:
        return max((int(name) for name in self._sizes(generation, log) if name.isdigit()), default=-1)

    def _sizes(self, generation: str, log: str) -> dict[str, int]:
        """Names of a log's files, with their bytes."""
        folder = self._hadoop_path(f"{self.location(generation)}/{log}")
        if not self._fs.exists(folder):
            return {}
        return {str(status.getPath().getName()): int(status.getLen()) for status in self._fs.listStatus(folder)}

    def offsets(self, generation: str, batch_id: int) -> Any:
        """The offset of the query's only source at the end of a batch, from Spark's `OffsetSeqLog`. None before the
        first batch.
        """
        if batch_id < 0:
            return None
        # the lines are: version, batch metadata, and one line of JSON for each source
        return json.loads(self.read_lines(f"{self.location(generation)}/offsets/{batch_id}")[2])

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._hadoop_path(path)))

    def read(self, name: str) -> str:
        """A small text file beside the generations. Empty if there is none."""
        path = f"{self._path.rstrip('/')}/{name}"
        return "".join(self.read_lines(path)) if self.exists(path) else ""

    def write(self, name: str, text: str) -> None:
        """Write such a file. A crash may cut it off."""
        stream = self._fs.create(self._hadoop_path(f"{self._path.rstrip('/')}/{name}"), True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def read_lines(self, path: str) -> list[str]:
        """The lines of a small text file."""
        stream = self._fs.open(self._hadoop_path(path))
        try:
            text: str = self._io_utils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return text.splitlines()
