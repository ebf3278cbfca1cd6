"""Spark's daemon of Python workers, with all that the sink's tasks import.

Spark has the daemon fork a worker for each task that finds none idle. The workers have what the daemon has imported:
otherwise each would import it again, which takes a second.
"""

import gc

from pyspark.daemon import manager

# No more than imports: a thread would be missing in the forked workers. Tasks import a target's modules when they
# unpickle a table.
import sink.spark.deletes
import sink.spark.tasks.decode
import sink.spark.tasks.index
import sink.spark.tasks.move
import sink.spark.tasks.shares
import sink.spark.tasks.write
import sink.targets.delta.uniting
import sink.targets.iceberg.uniting  # noqa: F401

if __name__ == "__main__":
    gc.freeze()  # workers collect garbage after each task, and needn't look through all modules for it
    manager()  # type: ignore[no-untyped-call]
