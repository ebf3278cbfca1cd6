"""Errors whose class says what the caller may do next. Each class has an exit code, with which `rowdelta` ends."""

from typing import ClassVar

from sink.redaction import beginning


class RowdeltaError(Exception):
    """Base of all errors meant for people. The message names what is wrong, what was expected and the next step."""

    exit_code: ClassVar[int] = 1
    stops_job: ClassVar[bool] = False
    """Whether it ends the whole job, even if `on_table_error: continue` would set only one table aside."""
    is_harmless: bool = False
    """Whether nothing is wrong. The table only has to be opened again, at once, and read on from its position."""


def summary(error: BaseException) -> str:
    """An error's message without the Java stack that py4j and Spark put into it, and without secrets."""
    if isinstance(error, RowdeltaError):
        return str(error)
    lines = [line for line in str(error).splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return beginning(" ".join(lines[:3]), 800)


class ConfigError(RowdeltaError):
    """The configuration is wrong. Running again without a change won't help."""

    exit_code = 2


class NotChangesError(ConfigError):
    """A source's messages can't be a table's changes.

    :param what: what they are, for people.
    :param is_internal: they are a program's own, and no format could read them.
    """

    def __init__(self, target: str, source: str, what: str, *, is_internal: bool) -> None:
        way_out = ". Leave it out of tables[].source" if is_internal else ""
        super().__init__(f"{target}: the messages of {source} are {what}{way_out}.")
        self.left_out = f"{source} is left out: its messages are {what}"
        self.is_internal = is_internal


class DataError(RowdeltaError):
    """The source's data was refused: a bad record with `on_bad_record: fail`, a contradiction, a re-read in changelog
    mode.
    """

    exit_code = 3


class TooManyBadRecordsError(DataError):
    """There are more bad records than `max_bad_records`. This limit is meant to stop the whole job."""

    stops_job = True


class TableError(RowdeltaError):
    """The target table doesn't fit the configuration, is gone or was replaced, or another sink uses our id."""

    exit_code = 4


class FencedError(TableError):
    """Another run with our sink id is active. One of the two must be stopped."""

    stops_job = True


class TableGoneError(TableError):
    """The table was dropped, or dropped and created again."""


class TemporaryError(RowdeltaError):
    """A service was unreachable, or it is unknown whether a commit succeeded. Running again is safe, and the right
    thing to do.
    """

    exit_code = 75


class NoMessagesError(TemporaryError):
    """A table can't be opened before its source has messages, because only these state its columns or its key."""

    def __init__(self, target: str, source: str) -> None:
        super().__init__(
            f"{target}: {source} has no messages yet that tell the table's key and columns. It is created when the "
            "first ones come."
        )


class MoreTopicsError(TemporaryError):
    """A table's pattern has found more topics, which it isn't read from yet."""

    is_harmless = True


class AmendedError(TemporaryError):
    """Rows of the table were corrected (`rowdelta reconcile`) while the sink ran. Its position is the same."""

    is_harmless = True


class RolledBackError(TemporaryError):
    """The table was rolled back while the sink ran, so its position is earlier than the sink expected."""

    is_harmless = True
