"""What exceptions of Iceberg's Java library mean for the user."""

from sink.errors import TableError, TableGoneError, TemporaryError
from sink.spark.java_errors import exception_message, java_class, java_exception, java_message

NOT_AUTHORIZED = "NotAuthorizedException"
REFUSALS = ("IllegalArgumentException", "BadRequestException", NOT_AUTHORIZED, "ForbiddenException")
_AHEAD = ("Expected sorted snapshot log entries", "Expected sorted previous metadata log entries")
"""What Iceberg says if a snapshot would be more than a minute older than the one before it."""


def with_cause(error: Exception) -> str:
    """The message, and that of the innermost cause. If a catalog doesn't answer, the innermost one has its address."""
    exception = java_exception(error)
    while (cause := exception.getCause()) is not None:
        exception = cause
    message, inner = java_message(error).strip(), exception_message(exception)
    return message if inner in message else f"{message} ({inner})"


def replaced(name: str) -> TableGoneError:
    return TableGoneError(f"{name} was dropped and created again while the sink ran. Start the sink again.")


def table_error(name: str, error: Exception) -> TableError | TemporaryError:
    """The error that a Java exception means for the table: it is gone or was replaced, or the error is temporary."""
    kind, message = java_class(error), java_message(error)
    # the hadoop catalog says it by the message
    if kind in ("NoSuchTableException", "NotFoundException") or message.startswith("Metadata file for version"):
        return TableGoneError(
            f"{name} is gone: it was dropped or its files were removed. Start again to create it anew. ({message})"
        )
    if "UUID does not match" in message:
        return replaced(name)
    if any(text in message for text in _AHEAD):
        return TemporaryError(
            f"{name}: this machine's clock is behind the time of the table's last snapshot, made while a clock was "
            "ahead. Iceberg refuses commits until the clock has passed that time. Nothing was applied; correct the "
            f"clock, or wait. ({message})"
        )
    if kind in (*REFUSALS, "ValidationException"):
        return TableError(f"{name}: {message}")
    return TemporaryError(f"{name}: catalog {name.split('.')[0]} failed: {kind}: {with_cause(error)}")
