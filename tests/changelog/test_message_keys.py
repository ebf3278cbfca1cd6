"""What messages say of their table's key, in every format and spelling."""

import json
from typing import Any

import pyarrow as pa
import pytest

from changelog import formats
from changelog.changes import MessageKey, Rejected
from changelog.decoding import ChangelogDecoder, Stated
from changelog.formats.avro import Avro
from changelog.message_keys import MessageKeys, of_changes
from changelog.parse.avro_schema import SchemaError
from changelog.spec import ChangelogSpec
from tests.changelog import avro_messages
from tests.changelog.messages import Message, messages, raw_records, sample, spec

Keys = dict[tuple[str, ...], int]


def of_texts(*keys: str | bytes | None, value: str | None = "{}") -> Keys:
    """Each key that the messages state, and the first one that does."""
    encoded = [key.encode() if isinstance(key, str) else key for key in keys]
    return stated(MessageKeys(), avro_messages.batch([(key, (value or "").encode() or None) for key in encoded]))


def stated(looked: MessageKeys, batch: pa.RecordBatch) -> Keys:
    return {found.fields: found.record for found in looked.stated(batch)}


def enveloped(names: list[str], payload: Any) -> str:
    fields = [{"type": "int64", "optional": False, "field": name} for name in names]
    return json.dumps({"schema": {"type": "struct", "fields": fields}, "payload": payload}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (['{"id":1}', '{"id":2}'], {("id",): 0}),
        (['{"id":1}', '{"tenant":1,"id":2}', '{"id":3}', '{"tenant": 2, "id": 2}'], {("id",): 0, ("tenant", "id"): 1}),
        (['{"a":"x\\"},{","b":{"scale":1,"value":"AQ=="}}', '{"a":"","b":null}'], {("a", "b"): 0}),
        ([' { "größe" : 1.5e3 } ', '{"größe":2}'], {("größe",): 0}),
        (['{"a.b*":1,"c d":[1,2]}'], {("a.b*", "c d"): 0}),
        (['{"a":{"b":{"c":1}}}', '{"a":{"b":{"c":2}}}', '{"z":1}'], {("a",): 0, ("z",): 2}),
        ([enveloped(["id"], {"id": 1}), enveloped(["a", "id"], {"a": 1, "id": 1})], {("id",): 0, ("a", "id"): 1}),
        ([enveloped(["id"], {"id": 1}), '{"id":7}', '{"schema":{"type":"int64"},"payload":7}'], {("id",): 0}),
        # no key
        ([None, '{"id":1}', None], {(): 0, ("id",): 1}),
        (["{}"], {(): 0}),
        # what says nothing of fields: a single value, text, bytes, an array
        (["7", '"x"', "x", b"\xff\xfe", "[1]", "", "{", '{"id":1} {"id":2}'], {}),
    ],
)  # fmt: skip
def test_json(keys: list[str | None], expected: Keys) -> None:
    assert of_texts(*keys) == expected


def test_a_tombstone_without_a_key_says_nothing() -> None:
    assert of_texts(None, None, value=None) == {}
    assert of_texts('{"id":1}', value=None) == {("id",): 0}


def test_keys_of_more_shapes_than_are_remembered() -> None:
    keys = [json.dumps({f"k{i % 200}": i}) for i in range(400)]
    assert of_texts(*keys) == {(f"k{i}",): i for i in range(200)}


def test_shapes_are_remembered_from_batch_to_batch() -> None:
    looked = MessageKeys()
    for _ in range(3):
        assert stated(looked, raw_records([Message({}, 0, {"b": 1}), Message({}, 1, {"a": 1})])) == {
            ("b",): 0,
            ("a",): 1,
        }


ID = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
BOTH = {"type": "record", "name": "Key", "fields": [{"name": "tenant", "type": "int"}, {"name": "id", "type": "long"}]}


def test_avro() -> None:
    schemas = {1: json.dumps(ID), 2: json.dumps(BOTH), 3: '"long"'}
    pairs = [
        (avro_messages.message(3, "long", 7), b""),
        (avro_messages.message(1, ID, {"id": 1}), b""),
        (avro_messages.message(2, BOTH, {"tenant": 1, "id": 1}), b""),
        (b'{"id":1,"tenant":2}', b""),
        (b"\0\0\0\0\x63\x02", b""),  # a schema that the registry doesn't know
        (None, b""),
    ]
    found = stated(MessageKeys(avro_messages.given(schemas)), avro_messages.batch(pairs))
    assert found == {(): 5, ("id",): 1, ("tenant", "id"): 2, ("id", "tenant"): 3}


def test_a_schema_is_asked_for_until_it_is_known() -> None:
    asked = []

    class Counted(avro_messages.Known):
        def get(self, schema_id: int) -> Any:
            asked.append(schema_id)
            if schema_id == 9:
                raise SchemaError("unknown")
            return super().get(schema_id)

    looked = MessageKeys(lambda: Counted({1: json.dumps(ID)}))
    batch = avro_messages.batch([(avro_messages.message(1, ID, {"id": 1}), b""), (b"\0\0\0\0\x09", b"")])
    assert stated(looked, batch) == stated(looked, batch) == {("id",): 0}
    assert asked == [1, 9, 9]


def of_format(name: str, batch: pa.RecordBatch, **options: Any) -> Stated:
    """What the decoder reports for a table whose columns don't matter."""
    found: list[Stated] = []
    decoder = ChangelogDecoder(name, spec({"id": "bigint"}, options=options), observe_stated=found.append)
    list(decoder([batch]))
    return {fact: place for fact, place in found[0].items() if isinstance(fact, tuple)} if found else {}


@pytest.mark.parametrize("server", ["pgj", "pgenv", "pgnull"])
def test_real_debezium_messages(server: str) -> None:
    expected = {"orders": ("id",), "comp": ("tenant", "id"), "nokey": (), "alltypes": ("id",)}
    for table, key in expected.items():
        found = sample(server, table)
        if found:
            assert list(of_format("debezium-json", raw_records(found))) == [key]


def test_real_avro_messages() -> None:
    schemas = avro_messages.given(avro_messages.sample_schemas())
    for table, key in {"orders": ("id",), "comp": ("tenant", "id"), "nokey": ()}.items():
        found = Avro(ChangelogSpec((), ()), schemas).changes(avro_messages.batch(avro_messages.sample(table)))
        assert {part.fields for part in found if isinstance(part, MessageKey)} == {key}


CANAL = {"data": [{"id": "1"}], "old": None, "type": "INSERT", "isDdl": False}
MAXWELL = {"type": "insert", "data": {"id": 1}}
OGG = {"op_type": "I", "after": {"id": 1}}


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("canal-json", "pkNames", CANAL),
        ("maxwell-json", "primary_key_columns", MAXWELL),
        ("ogg-json", "primary_keys", OGG),
    ],
)
def test_keys_in_the_message_itself(name: str, field: str, message: dict[str, Any]) -> None:
    values = [message | {field: names} for names in ([], ["id"], None, ["tenant", "id"], ["id"], "id", [None])]
    found = of_format(name, raw_records(messages(*values, message)))
    assert found == {(): (0, 0), ("id",): (0, 1), ("tenant", "id"): (0, 3)}
    assert of_format(name, raw_records(messages(message))) == {}


def test_ddl_of_canal_says_nothing() -> None:
    ddl = {"data": None, "type": "ALTER", "isDdl": True, "sql": "ALTER TABLE t", "pkNames": ["x"]}
    assert of_format("canal-json", raw_records(messages(ddl))) == {}


def test_a_decoder_reports_the_first_place_of_each_key() -> None:
    batches = [
        raw_records(
            [Message({"row_kind": "+I", "id": 1}, 9, {"id": 1}), Message({"row_kind": "+I", "id": 1}, 8, {"a": 1})]
        ),
        raw_records(
            [Message({"row_kind": "+I", "id": 1}, 7, {"a": 1}), Message({"row_kind": "+I", "id": 1}, 20, {"id": 1})]
        ),
    ]
    found: list[Stated] = []
    list(ChangelogDecoder("row-kind", spec({"id": "bigint"}), observe_stated=found.append)(batches))
    assert found == [{("id",): (0, 9), ("a",): (0, 7)}]


def test_which_formats_state_keys() -> None:
    assert [name for name in formats.OURS if not formats.find(name).STATES_KEY] == ["dms-json"]


@pytest.mark.parametrize("key", [None, '{"foo":1}'])
def test_a_message_that_can_not_be_understood_states_no_key(key: str | None) -> None:
    """One such message would stop a table whose key is that of its messages."""
    garbage = Message("hello", 0, key)
    good = Message({"op": "c", "before": None, "after": {"id": 1}}, 1, {"id": 1})
    seen = list[Stated]()
    decoder = ChangelogDecoder("debezium-json", spec({"id": "bigint"}), observe_stated=seen.append)
    (rows,) = decoder([raw_records([garbage, good])])
    assert rows.num_rows == 2
    assert [list(stated) for stated in seen] == [[("id",)]]


def test_a_key_stays_stated_if_its_first_message_can_not_be_understood() -> None:
    """The messages behind it state it too, in every spelling."""
    good = [Message({"op": "c", "before": None, "after": {"id": n}}, n, {"id": n}) for n in (1, 2)]
    for key in ({"id": 0}, enveloped(["id"], {"id": 0})):
        seen = list[Stated]()
        decoder = ChangelogDecoder("debezium-json", spec({"id": "bigint"}), observe_stated=seen.append)
        (rows,) = decoder([raw_records([Message("hello", 0, key), *good])])
        assert rows.num_rows == 3
        assert [dict(stated) for stated in seen] == [{("id",): (0, 1)}]


def test_a_key_in_confluent_s_format_stays_stated() -> None:
    keys = [b"\0\0\0\0\7" + bytes([n]) for n in range(3)]
    batch = avro_messages.batch([(key, b"{}") for key in keys])
    (left,) = of_changes(batch, [MessageKey(("id",), 0)], [Rejected(pa.array([0]), "unparseable", "no")])
    assert left == MessageKey(("id",), 1)
    assert list(of_changes(batch, [MessageKey(("id",), 0)], [Rejected(pa.array([0, 1, 2]), "unparseable", "no")])) == []
