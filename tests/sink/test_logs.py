"""Lines of the log in JSON, and what they are about."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from sink import logs

log = logging.getLogger("rowdelta.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines("shop"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    yield stream
    log.removeHandler(handler)
    log.propagate = True


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_say_what_they_are_about(lines: io.StringIO) -> None:
    log.info("start")
    with logs.about(batch=7):
        with logs.about(table="lake.shop.orders"):
            logs.note_snapshot(None)
            log.info("no %s", "snapshot")
            logs.note_snapshot(4358109269898191347)
            threads = [
                threading.Thread(target=copy_context().run, args=(log.info, "in a thread that was told")),
                threading.Thread(target=log.info, args=("in a thread of its own",)),
            ]
            for thread in threads:
                thread.start()
                thread.join()
        log.info("all tables")
    about = [{key: line[key] for key in line.keys() & {"table", "batch", "snapshot"}} for line in parsed(lines)]
    assert about == [
        {},
        {"table": "lake.shop.orders", "batch": 7},
        {"table": "lake.shop.orders", "batch": 7, "snapshot": "4358109269898191347"},
        {},
        {"batch": 7},
    ]
    first = parsed(lines)[0]
    assert (first["level"], first["logger"], first["message"], first["sink"]) == (
        "INFO", "rowdelta.test", "start", "shop",
    )  # fmt: skip
    assert first["time"].endswith("+00:00")


def test_a_record_is_one_line_whatever_is_in_it(lines: io.StringIO) -> None:
    log.warning("%s", 'two\nlines, "quotes", \x00, \u2028 and schöne Zeichen')
    try:
        raise ValueError("https://user:planted@host/?token=planted")
    except ValueError:
        log.exception("failed at s3://k:planted@bucket")
    found = parsed(lines)
    assert lines.getvalue().count("\n") == 2
    assert "two\nlines" in found[0]["message"]
    assert "ValueError" in found[1]["exception"]
    assert "planted" not in lines.getvalue()
