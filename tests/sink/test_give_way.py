import os
import sys
import threading

import pytest

from sink.spark.tasks.worker import give_way


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has the priority of its process")
def test_only_the_work_itself_gives_way() -> None:
    """The process runs tasks of micro-batches after it."""
    before = _niceness()
    assert give_way(_niceness) == min(19, before + 10)
    assert _niceness() == before


def test_its_errors_are_raised() -> None:
    def fail() -> None:
        raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        give_way(fail)
