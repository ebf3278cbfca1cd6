"""What is asked beside the job: an error of it ends neither the job nor the asking."""

import logging
import threading
from typing import Any

import pytest

from sink.run import sampling
from sink.table.observer import Event, JvmMemory, Lags, LagsUnknown


def test_a_defect_makes_the_lags_unknown_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [Lags({}, "messages"), KeyError("0"), KeyError("0"), Lags({}, "messages")]
    heard: list[Event] = []
    all_asked = threading.Event()

    def lags() -> Lags:
        answer = answers.pop(0)
        if not answers:
            all_asked.set()
        if isinstance(answer, Exception):
            raise answer
        found: Lags = answer
        return found

    monkeypatch.setattr(sampling, "SECONDS", 0.001)
    monkeypatch.setattr(sampling, "activate", lambda _: None)
    monkeypatch.setattr(sampling.Sampling, "_heap", lambda _: 1)
    spark: Any = None
    asking = sampling.Sampling(spark, lambda: iter([lags()]), heard.append)
    with caplog.at_level(logging.ERROR, "rowdelta"):
        asking.start()
        try:
            assert all_asked.wait(30)
        finally:
            asking.stop()
    told = [event for event in heard if not isinstance(event, JvmMemory)]
    assert told[:4] == [Lags({}, "messages"), *[LagsUnknown("KeyError: '0'")] * 2, Lags({}, "messages")]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
