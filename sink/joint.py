"""One Spark job for all tables that have little in a micro-batch: a job for each would take longer to plan than to run."""

import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sink import task
from sink.microbatch import TableShare, TableSink

log = logging.getLogger("rowdelta")


class JointWriter:
    """Writes several tables' shares of a micro-batch."""

    def __init__(self, spark: SparkSession) -> None:
        self._paths = spark.sparkContext.accumulator(list[tuple[str, str]](), task.ListParam[tuple[str, str]]())

    def write(
        self, spark: SparkSession, sinks: Mapping[str, TableSink], shares: Mapping[str, TableShare]
    ) -> dict[str, Mapping[str, Any]]:
        """Write what it can, and have each table's sink take its files over.

        :param shares: by source; at least one.
        :return: results of `task.run_shares` by source. A table that isn't there has to be written by itself, whatever the reason: that
            shows the reason too.
        """
        # as for a table's own job
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        tasks = min(len(shares), int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
        reads = [share.batch.share for share in shares.values() if share.batch.share is not None]
        plans = {source: share.share for source, share in shares.items()}
        function = functools.partial(task.run_shares, plans, self._paths)
        self._paths.value = []
        try:
            records = reads[0].read([read.range for read in reads]).coalesce(tasks)
            if tasks > 1:
                records = records.repartition(tasks, "source")
            written = records.sortWithinPartitions("source").mapInArrow(
                lambda batches: function(batches), task.RESULT_SCHEMA
            )
            results = [json.loads(row.result) for row in written.collect()]
        except (PySparkException, Py4JJavaError) as error:
            # what a task has done is undone if another fails
            log.info(
                "%d tables could not be written in one job, each gets its own: %s", len(shares), _first_line(error)
            )
            for source, paths in self._written().items():
                sinks[source].take_over(shares[source], {}, paths)
                sinks[source].discard()
            return {}
        written_paths = self._written()
        done: dict[str, Mapping[str, Any]] = {}
        for result in results:
            source = result["source"]
            if "failed" in result:
                log.info("%s: to be written by itself: %s", sinks[source].table.name, result["failed"])
                continue
            sinks[source].take_over(shares[source], result, written_paths.get(source, []))
            done[source] = result
        return done

    def _written(self) -> dict[str, list[str]]:
        by_source: dict[str, list[str]] = {}
        for source, path in self._paths.value:
            by_source.setdefault(source, []).append(path)
        return by_source


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
