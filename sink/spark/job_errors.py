"""What the errors of a table's jobs mean for people, and what may be done after them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from deltawriters.keyindex import CorruptIndexError
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.table import UnreadableRowsError
from deltawriters.vectors import LostVectorError
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError
from sink.redaction import beginning
from sink.spark.failures import TaskFailure, failure_of

JOB_ERRORS = (PySparkException, Py4JJavaError)
"""What a failed Spark job raises."""


@contextmanager
def before_commit(name: str) -> Iterator[None]:
    """Translate errors before the commit. After them nothing is committed, so all of the micro-batch's files can be
    deleted.
    """
    try:
        yield
    except CorruptIndexError as error:
        raise IndexLostError(str(error)) from error
    except (LostVectorError, UnreadableRowsError) as error:
        raise _not_replaceable(name, str(error)) from error
    except JOB_ERRORS as error:
        raise job_error(name, error) from error
    except (OSError, pa.ArrowException) as error:
        raise TemporaryError(
            f"{name}: what the commit needs could not be read or written: {error}. Nothing was applied; run again."
        ) from error


_EXPIRED = "Some data may have been lost because they are not available in Kafka any more"
"""What Spark's Kafka source says of messages that it was to read, unless `failOnDataLoss` is false."""


def job_error(target: str, error: Exception) -> RowdeltaError:
    """What a failed Spark job means for the user."""
    failure, text = failure_of(error), str(error)
    if failure is not None:
        return _meaning(target, failure)
    if "PARQUET_COLUMN_DATA_TYPE_MISMATCH" in text or "SchemaColumnConvertNotSupportedException" in text:
        return DataError(f"{target}: a change file has a column of another type. {_first_lines(text)}")
    failed = re.search(r"\[([A-Z_.]+)\] (.*?)SQLSTATE: 22", text)
    if failed:
        # SQLSTATE 22 is a "data exception" of an expression; conversions of messages' values raise no errors
        return DataError(
            f"{target}: the expression of a computed column failed on a value: {failed.group(2).strip()} Nothing was "
            "applied. Correct the expression; try_cast and the like give null instead."
        )
    if _EXPIRED in text:
        return DataError(
            f"{target}: messages expired in Kafka before they were read. Nothing of this micro-batch was applied. Take "
            "a new snapshot of the source into the topic (mode: upsert), with source.options.failOnDataLoss: false to "
            f"go on from what is there. {_first_lines(text)}"
        )
    if "No space left on device" in text:
        return TemporaryError(
            f"{target}: no space left on device while writing. Free space and run again; nothing was applied."
        )
    return TemporaryError(f"{target}: the Spark job failed; nothing was applied. {_first_lines(text)}")


def _meaning(target: str, failure: TaskFailure) -> RowdeltaError:
    if failure.kind == "contradiction":
        return DataError(f"{target}: {failure.message}")
    if failure.kind == "unreadable file":
        return DataError(f"{target}: {failure.message}. Nothing was applied; then run again.")
    if failure.kind == "broken format":
        return ConfigError(
            f"{target}: {failure.message}. No record is at fault, and nothing was applied. Correct the format, or "
            "install the versions of the packages that it needs, and run again."
        )
    if failure.kind == "refused":
        return ConfigError(f"{target}: {failure.message}")
    if failure.kind == "not replaceable":
        return _not_replaceable(target, failure.message)
    # a damaged index is built again where the job was started; where it wasn't, the next run does it
    return TemporaryError(f"{target}: {failure.message}. Nothing was applied; run again.")


def _not_replaceable(target: str, reason: str) -> TableError:
    return TableError(
        f"{target}: a data file can't be replaced by one without the deleted rows: {reason}. Nothing was applied. "
        "Rewrite the file with the format's own compaction, or restore what is missing; or write deletes: position."
    )


def _first_lines(text: str) -> str:
    """The important lines of an error: Spark's first lines, or Python's exception, which comes after its calls."""
    raised: list[str] = _RAISED.findall(text)
    if raised:
        return beginning(raised[-1], 800)
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("at ", "File "))
    ]
    return beginning(" ".join(lines[:3]), 800)


_RAISED = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", re.MULTILINE)
