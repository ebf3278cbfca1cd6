"""The log: how lines look, and what each line is about.

`about` says for which table and micro-batch the work inside it is, and `note_snapshot` in which state that table is. A
line in JSON carries both, so a log with a thousand tables can be filtered. Lines of text name the table themselves.
"""

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sink.printing import PrintedRecords
from sink.redaction import masked

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_TEXT = "%(asctime)s %(levelname)s %(message)s"
_ABOUT: ContextVar[Mapping[str, Any]] = ContextVar("rowdelta-log", default=_NOTHING)


@contextmanager
def about(**what: Any) -> Iterator[None]:
    """Say what the lines inside are about, besides what they are about already.

    :param what: `table` (its target), `batch` (Spark's number of the micro-batch).
    """
    token = _ABOUT.set({**_ABOUT.get(), **what})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def note_snapshot(snapshot: int | None) -> None:
    """The table's state, for the lines that follow, up to the end of the innermost `about`. Outside of `about` no line
    says which table it is about.
    """
    if (what := _ABOUT.get()) is not _NOTHING:
        _ABOUT.set({**what, "snapshot": snapshot})


def start() -> None:
    """Log to stderr, in text. Before the configuration is read, nobody knows better."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(PrintedRecords())
    # other loggers may only print warnings
    logging.basicConfig(level=logging.WARNING, format=_TEXT, handlers=[handler])
    logging.getLogger("rowdelta").setLevel(logging.INFO)


def use_json(sink: str) -> None:
    """From now on each line is a JSON object.

    :param sink: its id, which is in each line.
    """
    for handler in logging.getLogger().handlers:
        handler.filters = [_is_of_interest]  # JSON escapes by itself what a terminal must not get
        handler.setFormatter(JsonLines(sink))


def is_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class JsonLines(logging.Formatter):
    """A record as one JSON object: `time` (ISO 8601, UTC), `level`, `logger`, `message`, `sink`, and where they are
    known `table`, `batch`, `snapshot` (text: an id of Iceberg doesn't fit into the numbers of all readers) and
    `exception`. Secrets that look like secrets are masked.
    """

    def __init__(self, sink: str) -> None:
        super().__init__()
        self._sink = sink

    def format(self, record: logging.LogRecord) -> str:
        known = _ABOUT.get()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": masked(record.getMessage()),
            "sink": self._sink,
        }
        line |= {name: known[name] for name in ("table", "batch") if name in known}
        if known.get("snapshot") is not None:
            line["snapshot"] = str(known["snapshot"])
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = masked("".join(traceback.format_exception(*record.exc_info)))
        return json.dumps(line)  # in ASCII: other characters may end a line for some readers


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Not what py4j logs (see `PrintedRecords`)."""
    return Path(record.pathname).parent.name != "py4j"
