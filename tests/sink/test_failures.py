"""Failures of tasks, as the driver gets them. `test_commits` and others have them from real tasks."""

from collections.abc import Iterable, Iterator

import pytest

from changelog.changes import FormatError, UnavailableError
from changelog.parse.schema_registry import RegistryError
from deltawriters import CardinalityError
from deltawriters.keyindex import CorruptIndexError
from sink.spark.failures import TaskFailedError, TaskFailure, failure_of, told
from sink.spark.java_errors import without_stack

MESSAGE = 'two "changes"\nof {key} 7: Ü'


def failing(error: Exception) -> Iterator[int]:
    def step(items: Iterable[int]) -> Iterator[int]:
        for item in items:
            yield item
            raise error

    return told(step)([1, 2])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CardinalityError(MESSAGE), "contradiction"),
        (CorruptIndexError(MESSAGE), "corrupt index"),
        (FormatError(MESSAGE), "broken format"),
        (UnavailableError(MESSAGE), "unavailable"),
        (RegistryError(MESSAGE), "unavailable"),
    ],
)
def test_a_failure_comes_out_of_any_text_around_it(error: Exception, kind: str) -> None:
    expected = TaskFailure(kind, MESSAGE)  # type: ignore[arg-type]
    results = failing(error)
    assert next(results) == 1
    with pytest.raises(TaskFailedError) as raised:
        next(results)
    around = RuntimeError(f"Job aborted {{}}: \n  File x\nTaskFailedError: {raised.value}\n\tat org.apache.spark {{")
    assert failure_of(around) == expected
    assert failure_of(error) == expected


def test_other_errors_stay_what_they_are() -> None:
    results = failing(ValueError("rowdelta task failure: no"))
    next(results)
    with pytest.raises(ValueError, match="no") as raised:
        next(results)
    assert failure_of(raised.value) is None


def test_the_stack_in_the_message_of_a_failed_job_is_left_out() -> None:
    """`tests/faults/test_machine.py` has such a message from Spark."""
    message = (
        "Job aborted: java.io.IOException: No space left on device\n\tat a.b(C.java:1)\n\tat c.d(E.java)\n"
        "\t\tSuppressed: h: i\nCaused by: f: g\n\tat a.b(C.java:1)\n\t... 13 more\n\nDriver stacktrace:"
    )
    assert without_stack(message) == "Job aborted: java.io.IOException: No space left on device\nCaused by: f: g"
    assert without_stack("one line\n  at least one more") == "one line\n  at least one more"
