"""Records that no format foresees end as bad records; whatever they are, they must not stop the job."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.json as pj
import pytest

from changelog import formats
from changelog.changes import FormatError, UnavailableError
from changelog.decoding import ChangelogDecoder
from changelog.formats.row_kind import RowKindRows
from changelog.rows import BAD
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.table.inference import infer_fields
from tests.changelog.messages import Message, decode, messages, raw_records, spec

COLUMNS = {"id": "bigint", "v": "string"}


def event(after: Any) -> str:
    return json.dumps({"before": None, "after": after, "source": {"version": "3"}, "op": "c"}, separators=(",", ":"))


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + closing * depth


@pytest.mark.parametrize("schema_changes", ["evolve", "ignore"])
@pytest.mark.parametrize("field", ["unknown", "v"])
@pytest.mark.parametrize("depth", [90, 450, 700, 50_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_depth_is_no_danger(schema_changes: Any, field: str, depth: int, brackets: tuple[str, str]) -> None:
    opening, closing = brackets
    deep = nested(depth, opening, "") + "1" + nested(depth, "", closing)
    odd = event({"id": 2, "v": "b", "unknown": None}).replace('"unknown":null', f'"{field}":{deep}')
    if field == "v":
        odd = odd.replace('"v":"b",', "")
    records = [Message(event({"id": 1, "v": "a"}), 0), Message(odd, 1), Message(event({"id": 3, "v": "c"}), 2)]
    found = decode("debezium-json", raw_records(records), spec(COLUMNS, schema_changes=schema_changes))
    assert [d.row["id"] for d in found if d.error is None and d.row["id"] != 2] == [1, 3]
    assert len(found) == 3


class Fragile(RowKindRows):
    """Fails as a whole on certain records, as a format with a mistake in it would."""

    failure: ClassVar[Exception] = ArithmeticError("a mistake")

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        if any(b"poison" in (value or b"") for value in records.column("value").to_pylist()):
            raise self.failure
        yield from super().changes(records)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> type[Fragile]:
    monkeypatch.setitem(formats.OURS, "fragile", "tests.changelog.test_poison:Fragile")
    return Fragile


def test_a_record_on_which_a_format_fails_is_a_bad_record(fragile: type[Fragile]) -> None:
    rows = [{"row_kind": "+I", "id": n, "v": "poison" if n in (3, 8) else "fine"} for n in range(10)]
    batches = list(ChangelogDecoder("fragile", spec(COLUMNS))([raw_records(messages(*rows))]))
    found = pa.Table.from_batches(batches)
    bad = found.column(BAD).drop_null().to_pylist()
    assert [(b["offset"], b["error_class"], b["reason"]) for b in bad] == [
        (n, "decoder_failed", "the decoder failed: ArithmeticError: a mistake") for n in (3, 8)
    ]
    good = found.filter(found.column(BAD).combine_chunks().is_null())
    assert sorted(good.column("id").to_pylist()) == [0, 1, 2, 4, 5, 6, 7, 9]


def test_a_service_that_is_down_is_no_records_fault(fragile: type[Fragile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragile, "failure", UnavailableError("no answer"))
    records = raw_records(messages({"row_kind": "+I", "id": 1, "v": "poison"}))
    with pytest.raises(UnavailableError):
        list(ChangelogDecoder("fragile", spec(COLUMNS))([records]))


def code_that_is_wrong() -> Iterator[Exception]:
    """Exceptions as Python raises them for code that doesn't fit its libraries."""
    for statement in ("import no.such.module", "no_such_name", "json.no_such_function", "Fragile.no_such_constant"):
        try:
            exec(statement)
        except Exception as error:  # noqa: BLE001 - to be raised again
            yield error
    yield NotImplementedError("later")


@pytest.mark.parametrize("failure", list(code_that_is_wrong()), ids=lambda failure: type(failure).__name__)
def test_what_no_record_can_be_blamed_for_stops_the_task(
    fragile: type[Fragile], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(fragile, "failure", failure)
    records = raw_records(messages(*({"row_kind": "+I", "id": n, "v": "fine"} for n in range(9)), "poison"))
    with pytest.raises(FormatError, match=rf"format fragile fails in its own code: {type(failure).__name__}: "):
        list(ChangelogDecoder("fragile", spec(COLUMNS))([records]))


def test_a_delete_needs_no_required_column_but_the_key() -> None:
    """REPLICA IDENTITY DEFAULT sends the key only; a null source column says that the old partition is unknown."""
    table = spec({"id": "bigint", "region": "string"}, partition_sources=("region",), schema_changes="evolve")
    required = tuple(type(c)(c.name, c.type, required=True) for c in table.columns)
    table = ChangelogSpec(required, table.key, ("region",), schema_changes="evolve")
    observed: list[dict[str, str]] = []
    delete = json.dumps({"before": {"id": 1}, "after": None, "op": "d"})
    (rows,) = ChangelogDecoder("debezium-json", table, observed.append)([raw_records(messages(delete))])
    assert rows.column(BAD).null_count == rows.num_rows == 1
    assert observed == []


def test_columns_of_plain_debezium_json_are_inferred() -> None:
    config = Config.model_validate(
        {
            "sink": {"id": "x", "checkpoint": "/tmp/x"},
            "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "x:1"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "/tmp/w"}},
            "tables": [{"source": "t", "target": "lake.a.b", "key": ["id"]}],
        }
    )
    values = [event({"id": 1, "v": "a", "ok": True, "n": 1.5}), '{"op":"d","before":{"id":1},"after":null}', "odd"]
    found = infer_fields(config, pa.Table.from_batches([raw_records(messages(*values))]))
    assert found == {"id": "bigint", "v": "string", "ok": "boolean", "n": "double"}


def test_odd_records_do_not_make_a_batch_quadratic() -> None:
    """Each record of this topic is odd: it has an object where a text is expected. If the batch were joined again for
    each record, this would take minutes.
    """
    records = [event({"id": n, "v": {"a": n}}) for n in range(20_000)]
    found = decode("debezium-json", raw_records(messages(*records)), spec(COLUMNS))
    assert [d.row["v"] for d in found] == [f'{{"a":{n}}}' for n in range(20_000)]


@pytest.mark.parametrize(
    "text",
    [
        lambda text: "JSON parse error",
        lambda text: text.replace("row", "record"),
        lambda text: text.replace("changed from", "no longer"),
        lambda text: re.sub(r"row (\d+)", lambda row: f"row {int(row[1]) + 1}", text),
        lambda text: re.sub(r"row (\d+)", "row 0", text),
        lambda text: re.sub(r"row (\d+)", "row 999999", text),
    ],
    ids=["nothing", "other words", "other words for a change", "from 1", "always 0", "too high"],
)
def test_what_arrow_says_of_an_error_is_only_believed_if_it_helps(
    monkeypatch: pytest.MonkeyPatch, text: Callable[[str], str]
) -> None:
    """A release of Arrow may change its messages. Then records are read one by one, with the same result."""
    odd = {3: event({"id": 3, "v": {"a": 3}}), 700: event({"id": "700", "v": 1.5}), 1400: '{"after":{"id":1400,,}}'}
    records = [odd.get(n, event({"id": n, "v": str(n)})) for n in range(1500)]
    expected = decode("debezium-json", raw_records(messages(*records)), spec(COLUMNS))
    assert len(expected) == 1500
    assert [d.row["v"] for d in expected if d.row["id"] in (3, 700)] == ['{"a":3}', "1.5"]
    read_json = pj.read_json

    def worded(*args: Any, **options: Any) -> pa.Table:
        try:
            return read_json(*args, **options)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(text(str(error))) from None

    monkeypatch.setattr(pj, "read_json", worded)
    found = decode("debezium-json", raw_records(messages(*records)), spec(COLUMNS))
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_fields_named_by_data_do_not_pile_up() -> None:
    names = iter(range(10_000))
    decoder = ChangelogDecoder("debezium-json", spec(COLUMNS, schema_changes="evolve", excluded=frozenset({"z"})))
    batches = [
        raw_records(messages(*(event({"id": n, "v": "a", "z": {f"u{next(names)}": 1}}) for n in range(500))))
        for _ in range(8)
    ]
    assert [batch.num_rows for batch in decoder(batches)] == [500] * 8


@pytest.mark.parametrize("days", [11_268_737, 622_191_230, -(2**31)])
def test_a_date_that_no_text_can_show_is_a_misfit(days: int) -> None:
    declared = {
        "schema": {
            "type": "struct",
            "fields": [
                {
                    "field": "after",
                    "type": "struct",
                    "fields": [
                        {"field": "id", "type": "int64"},
                        {"field": "v", "type": "int32", "name": "io.debezium.time.Date"},
                    ],
                }
            ],
        },
        "payload": {"after": {"id": 1, "v": days}, "op": "c"},
    }
    (found,) = decode("debezium-json", raw_records(messages(declared)), spec(COLUMNS))
    assert found.error == f"type_mismatch: column v: '{days}' does not fit string"


def test_a_lone_surrogate_in_json_within_json() -> None:
    text = event({"id": 1, "v": '{"k": "\\ud800"}'})
    (found,) = decode("debezium-json", raw_records(messages(text)), spec({"id": "bigint", "v": "map<string,string>"}))
    assert found.error is not None
    assert found.error.startswith("type_mismatch: column v")
