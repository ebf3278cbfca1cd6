"""Partial updates in a table of any format: the messages that tools really send, faults, and other writers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from sink.deadletters import table as dead_letters
from sink.deadletters.table import Selection
from sink.errors import DataError, TemporaryError
from sink.spark.versions import to_arrow
from tests.changelog.messages import sample
from tests.sink.harness import Job

TOAST = {"id": "int", "note": "string", "big": "string", "bb": "binary", "arr": "array<string>"}
"""Columns of the sample's table."""
FIRST = {"id": 1, "note": "a", "big": "x" * 9000, "bb": b"\x00\xff", "arr": ["1", "2"]}
Read = Callable[[], list[dict[str, Any]]]


def toast_job(job: Job, table: dict[str, Any] | None = None) -> Job:
    job.columns, job.file_format = TOAST, "json"
    job.sections = {"source": {"format": "debezium-json"}}
    job.table = {"order_by": ["source.lsn bigint"], **(table or {})}
    return job


def inserted(number: int, lsn: int) -> dict[str, Any]:
    row = FIRST | {"id": number, "bb": "AP8="}
    return {"before": None, "after": row, "op": "r", "source": {"lsn": lsn}}


def update(number: int = 1, lsn: int | None = None, **values: Any) -> dict[str, Any]:
    """The real message, in which text, bytes and array are unavailable."""
    found: dict[str, Any] = json.loads(sample("pgnull", "toast_def")[0].raw()[4] or "")
    found["after"] |= {"id": number} | values
    found["source"]["lsn"] = found["source"]["lsn"] if lsn is None else lsn
    return found


def write(job: Job, *messages: Any) -> None:
    job.write_text("".join(json.dumps(message) + "\n" for message in messages))


def letters(job: Job) -> list[tuple[str, str, Any]]:
    rows = to_arrow(dead_letters.find(job.spark, job.config(), Selection())).to_pylist()
    return [(row["error_class"], row["reason"], json.loads(row["value"])) for row in rows]


ABSENT = "column big: the source didn't send the unchanged value, and the table has no row with this key"


def play_toast(job: Job, read: Read, crashing: Callable[[], Any], foreign: Callable[[], None]) -> None:
    """A row is completed from the table's, from a row that another writer wrote, and from the micro-batch. A row that
    isn't there becomes a dead letter once, also after a crash.

    :param crashing: a context in which the next commit of the table fails.
    :param foreign: appends the row 3 as another writer does.
    """
    write(job, inserted(1, 1))
    job.run()
    foreign()
    unknown = update(7, 5)
    write(job, update(), unknown, update(3, 6, big="new"), inserted(2, 7), update(2, 8, note=None))
    with crashing(), pytest.raises(TemporaryError, match="crash"):
        job.run()
    assert letters(job) == [("row_absent", ABSENT, unknown)]
    job.run()
    assert letters(job) == [("row_absent", ABSENT, unknown)]
    assert read() == [
        FIRST | {"note": "b"},
        FIRST | {"id": 2, "note": None},
        FIRST | {"id": 3, "note": "b", "big": "new"},
    ]
    assert job.check_index() is not None
    strict = dict(job.sections)
    job.sections = strict | {"sink": {"on_bad_record": "fail"}}
    write(job, update(7, 9))
    with pytest.raises(DataError, match=f"1 bad record, and on_bad_record is fail.*{ABSENT}"):
        job.run()


def play_read_again(job: Job, read: Read, forget: Callable[[], None]) -> None:
    """A dead letter that the table can complete after all is applied when it is read again. One that nothing completes
    is not kept twice.

    :param forget: removes the table's position.
    """
    toast_job(job, {"unavailable": "reject"})
    write(job, inserted(1, 1), update(1, 5), update(7, 6))
    job.run()
    assert [letter[0] for letter in letters(job)] == ["unavailable_value"] * 2
    assert read() == [FIRST]
    kept = letters(job)

    toast_job(job)
    forget()
    job.lose_checkpoint()
    job.run()
    assert read() == [FIRST | {"note": "b"}]
    assert letters(job) == kept


def play_tools(job: Job, read: Read) -> None:
    """Compressed updates of GoldenGate, then updates of DMS with unknown values, in the same table."""
    job.columns, job.file_format = {"id": "bigint", "title": "string", "shelf": "string"}, "json"
    order = {"order_by": ["pos bigint"]}
    job.table, job.sections = order, {"source": {"format": "ogg-json"}}
    write(
        job,
        {"op_type": "I", "pos": 1, "after": {"id": 1, "title": "lamp", "shelf": "a1"}},
        {"op_type": "I", "pos": 2, "after": {"id": 2, "title": "desk", "shelf": "a2"}},
    )
    write(
        job,
        {"op_type": "U", "pos": 3, "before": {"id": 1}, "after": {"id": 1, "shelf": "b1"}},
        {"op_type": "U", "pos": 4, "before": {"id": 2}, "after": {"id": 3, "shelf": "b2"}},
    )
    job.run()
    ((error_class, reason, _),) = letters(job)
    moved = "column title is missing, and the key changed: the value is in the old key's row"
    assert (error_class, reason) == ("missing_column", moved)
    desk = {"id": 2, "title": "desk", "shelf": "a2"}
    assert read() == [{"id": 1, "title": "lamp", "shelf": "b1"}, desk]

    options = {"missing.columns": "unavailable"}
    job.sections = {"source": {"format": "dms-json", "format_options": options}}
    metadata = {"record-type": "data", "operation": "update"}
    write(job, {"data": {"id": 1, "title": None}, "metadata": metadata, "pos": 5})
    job.run()
    assert read() == [{"id": 1, "title": None, "shelf": "b1"}, desk]

    job.table = order | {"unavailable": "reject"}
    write(job, {"data": {"id": 1, "title": "x"}, "metadata": metadata, "pos": 6})
    job.run()
    reasons = [letter[1] for letter in letters(job) if letter[1] != moved]
    assert [reason.partition(",")[0] for reason in reasons] == ["column shelf is missing"]
