"""What Java throws, as Python sees it."""

import re

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import CapturedException

from sink.redaction import masked

JAVA_ERRORS = (Py4JJavaError, CapturedException)
"""What a Java call raises: PySpark turns some exceptions (IllegalArgumentException, …) into its own, whoever threw
them.
"""
SPARK_ERRORS = (PySparkException, Py4JError)
"""What Spark raises, whatever the reason is. These errors have long tracebacks from Java."""


def java_class(error: Exception) -> str:
    """Simple class name of the Java exception of one of `JAVA_ERRORS`."""
    return str(java_exception(error).getClass().getSimpleName())


def message_of(error: Exception) -> str:
    """The message of any exception, Python's or Java's."""
    return java_message(error) if isinstance(error, JAVA_ERRORS) else str(error)


def java_message(error: Exception) -> str:
    """Without secrets: a driver's message may quote the whole address."""
    return exception_message(java_exception(error))


def exception_message(exception: JavaObject) -> str:
    return masked(without_stack(str(exception.getMessage() or exception)))


_STACK = re.compile(r"\n(?:[ \t]+(?:at [^\s(]+\(.*\)|\.\.\. \d+ more|Suppressed: .*)|Driver stacktrace:)(?=\n|\Z)")


def without_stack(message: str) -> str:
    """The message of a failed Spark job, which has the stack of the task's error in it, and calls of the driver."""
    return _STACK.sub("", message).rstrip()


def java_exception(error: Exception) -> JavaObject:
    """The Java object itself, of one of `JAVA_ERRORS`."""
    return error.java_exception if isinstance(error, Py4JJavaError) else error._origin  # type: ignore[attr-defined]
