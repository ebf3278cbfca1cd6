"""The client against a real registry: Apicurio with Confluent's API, plain and behind TLS with a password."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from hypothesis import example, given
from hypothesis import strategies as st

from changelog.decoding import ChangelogDecoder
from changelog.formats.avro import Avro
from changelog.parse.avro_schema import SchemaError
from changelog.parse.schema_registry import Registry as Client
from changelog.parse.schema_registry import RegistryError, connect
from tests.changelog import fuzz, test_debezium_samples
from tests.changelog.avro_messages import Pair, batch, message, outcome, sample, sample_schemas, spec
from tests.changelog.messages import Decoded, in_order
from tests.changelog.messages import spec as typed_spec
from tests.stack import tls
from tests.stack.registry import Registry, running_registry

ROW = {
    "type": "record",
    "name": "Row",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}],
}
PASSWORD = "user:se:cret"


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with running_registry() as server:
        yield server


@pytest.fixture(scope="module")
def admin(registry: Registry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.url}) as client:
        yield client


@dataclass(frozen=True)
class Guarded:
    """The registry behind TLS and a password. Yields the options for a client, and the list of requested paths."""

    options: dict[str, str]
    asked: list[str]


@pytest.fixture(scope="module")
def guarded(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    certificates = tls.made(tmp_path_factory.mktemp("tls"))
    asked: list[str] = []

    class Guard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            expected = f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"
            status, body = 401, b'{"error_code": 401, "message": "Unauthorized"}'
            if self.headers["Authorization"] == expected:
                try:
                    with urlopen(registry.url + self.path) as response:
                        status, body = response.status, response.read()
                except HTTPError as error:
                    with error:
                        status, body = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Guard) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {
            "schema.registry.url": f"https://127.0.0.1:{server.server_address[1]}",
            "schema.registry.ssl.ca.location": certificates.path("ca.pem"),
            "schema.registry.basic.auth.user.info": PASSWORD,
            "schema.registry.max.retries": "0",
        }
        yield Guarded(options, asked)
        server.shutdown()


def test_rows_with_registered_schemas(registry: Registry, admin: SchemaRegistryClient) -> None:
    first = admin.register_schema("rows-value", Schema(json.dumps(ROW)))
    wider = {**ROW, "fields": [*ROW["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
    second = admin.register_schema("rows-value", Schema(json.dumps(wider)))
    key = admin.register_schema("rows-key", Schema('"long"'))
    assert len({first, second, key}) == 3
    decoder = Avro(spec(["id", "name", "note"], options={"schema.registry.url": registry.url}))
    found = outcome(
        decoder,
        [
            (None, message(first, ROW, {"id": 1, "name": "a"})),
            (None, message(second, wider, {"id": 2, "name": "b", "note": "x"})),
            (message(key, "long", 1), None),
            (None, message(999_999, ROW, {"id": 3, "name": "c"})),
        ],
    )
    assert [(c.record, c.kind, c.row) for c in found.changes] == [
        (0, "+U", {"id": 1, "name": "a"}),
        (1, "+U", {"id": 2, "name": "b", "note": "x"}),
        (2, "-D", {"id": 1}),
    ]
    assert found.rejected == {
        3: f"unparseable: schema id 999999 is unknown to the schema registry {registry.url}",
    }


def registered(admin: SchemaRegistryClient, table: str) -> list[Pair]:
    """Real messages with the ids that the registry gave their schemas."""

    def renumbered(value: bytes | None) -> bytes | None:
        if value is None:
            return None
        old = int.from_bytes(value[1:5], "big")
        new = admin.register_schema(f"{table}-{old}", Schema(sample_schemas()[old]))
        return value[:1] + new.to_bytes(4, "big") + value[5:]

    return [(renumbered(key), renumbered(value)) for key, value in sample(table)]


def typed_rows(registry: Registry, messages: list[Pair], columns: dict[str, str]) -> list[Decoded]:
    """From raw records to the table's types, as a Spark task does it."""
    table = typed_spec(columns, options={"schema.registry.url": registry.url})
    (rows,) = ChangelogDecoder("debezium-avro", table)([batch(messages)])
    rows.validate(full=True)
    return in_order(rows, table, {})


def test_real_debezium_messages_become_what_the_database_held(registry: Registry, admin: SchemaRegistryClient) -> None:
    rows = typed_rows(registry, registered(admin, "orders"), test_debezium_samples.ORDERS)
    assert [row.error for row in rows if row.bad] == []
    ann = test_debezium_samples.ANN_NEW
    assert [(row.kind, row.row) for row in rows][:4] == [
        ("+I", ann),
        ("+I", test_debezium_samples.BOB),
        ("+I", test_debezium_samples.ZOE),
        ("+I", test_debezium_samples.CAT),
    ]
    assert (rows[4].kind, rows[4].row) == ("+U", test_debezium_samples.ANN_PAID)
    assert (rows[5].kind, rows[5].row["id"]) == ("-D", 2)


def test_every_postgres_type(registry: Registry, admin: SchemaRegistryClient) -> None:
    """The same values as with `debezium-json`."""
    (first, *_) = registered(admin, "alltypes")
    columns = test_debezium_samples.ALLTYPES | {
        "pt": "struct<x:double,y:double,wkb:binary,srid:int>",
        "na": "array<decimal(10,2)>",
    }
    (row,) = typed_rows(registry, [first], columns)
    assert row.error is None
    expected = test_debezium_samples.TRUE_VALUES | {"i8": 9007199254740993, "na": [Decimal("1.10"), Decimal("2.20")]}
    wkb = bytes.fromhex("0101000000000000000000f83f0000000000000040")
    expected |= {"pt": {"x": 1.5, "y": 2.0, "wkb": wkb, "srid": None}}
    assert test_debezium_samples.true_row(row.row) == expected


def test_a_schema_that_refers_to_another(registry: Registry, admin: SchemaRegistryClient) -> None:
    admin.register_schema("shop.Row", Schema(json.dumps(ROW)))
    outer = {"type": "record", "name": "Outer", "fields": [{"name": "row", "type": "shop.Row"}]}
    references = [SchemaReference("shop.Row", "shop.Row", 1)]
    schema_id = admin.register_schema("outer-value", Schema(json.dumps(outer), "AVRO", references))
    expected = pa.struct([("row", pa.struct([("id", pa.int64()), ("name", pa.string())]))])
    assert connect({"schema.registry.url": registry.url}).get(schema_id).arrow() == expected


def test_the_latest_schema_of_a_subject(registry: Registry, admin: SchemaRegistryClient) -> None:
    admin.register_schema("newest-value", Schema(json.dumps(ROW)))
    client = Client({"schema.registry.url": registry.url})
    assert list(client.latest("newest-value").fields) == ["id", "name"]
    with pytest.raises(SchemaError, match="subject nothing is unknown to the schema registry"):
        client.latest("nothing")


def test_a_replica_that_learns_of_a_schema_later(registry: Registry, admin: SchemaRegistryClient) -> None:
    known = admin.register_schema("late-value", Schema(json.dumps({**ROW, "name": "Early"})))
    client = Client({"schema.registry.url": registry.url})
    late = {**ROW, "name": "Late"}
    threading.Timer(1.0, lambda: admin.register_schema("late-value", Schema(json.dumps(late)))).start()
    assert list(client.get(known + 1).fields) == ["id", "name"]


def test_many_unknown_ids_cost_one_wait(registry: Registry) -> None:
    client = Client({"schema.registry.url": registry.url})
    began = time.monotonic()
    for number in range(900_000, 900_003):
        with pytest.raises(SchemaError, match="unknown to the schema registry"):
            client.get(number)
    assert time.monotonic() - began < 2 * 5.0


def test_a_schema_that_is_not_avro(registry: Registry, admin: SchemaRegistryClient) -> None:
    schema_id = admin.register_schema(
        "json-value", Schema('{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}', "JSON")
    )
    with pytest.raises(SchemaError, match=f"schema id {schema_id} is JSON, not Avro"):
        Client({"schema.registry.url": registry.url}).get(schema_id)


def test_tls_and_a_password(admin: SchemaRegistryClient, guarded: Guarded) -> None:
    schema_id = admin.register_schema("guarded-value", Schema(json.dumps(ROW)))
    options = guarded.options
    assert list(Client(options).get(schema_id).fields) == ["id", "name"]
    wrong = options | {"schema.registry.basic.auth.user.info": "user:wrong"}
    with pytest.raises(RegistryError, match=f"refused schema id {schema_id}: Unauthorized") as refused:
        Client(wrong).get(schema_id)
    assert "wrong" not in str(refused.value)
    untrusted = {name: value for name, value in options.items() if "ssl" not in name}
    with pytest.raises(RegistryError, match="certificate"):
        Client(untrusted).get(schema_id)


def test_a_schema_is_asked_for_once(admin: SchemaRegistryClient, guarded: Guarded) -> None:
    schema_id = admin.register_schema("once-value", Schema(json.dumps({**ROW, "name": "Once"})))
    found = connect(guarded.options).get(schema_id)
    # the next task of the worker
    assert connect(dict(guarded.options)).get(schema_id) is found
    assert guarded.asked.count(f"/schemas/ids/{schema_id}") == 1


def test_a_password_in_the_address_is_not_shown() -> None:
    options = {"schema.registry.url": "http://user:secret@127.0.0.1:9", "schema.registry.max.retries": "0"}
    with pytest.raises(RegistryError, match=r"http://127\.0\.0\.1:9 can't be asked") as refused:
        Client(options).get(1)
    assert "secret" not in str(refused.value)


def test_an_address_that_is_not_the_registrys(registry: Registry) -> None:
    """All schemas are unknown to this registry. That must not make every record a bad record."""
    elsewhere = registry.url.removesuffix("/apis/ccompat/v7")
    with pytest.raises(RegistryError, match=f"the schema registry {elsewhere} refused schema id 1: "):
        Client({"schema.registry.url": elsewhere}).get(1)


def test_options_that_are_wrong() -> None:
    with pytest.raises(ValueError, match=r"lacks schema\.registry\.url"):
        Client({})
    with pytest.raises(ValueError, match=r"schema\.registry\.timeout is 'soon', expected a number"):
        Client({"schema.registry.url": "http://127.0.0.1:9", "schema.registry.timeout": "soon"})


UNION = {
    "type": "record",
    "name": "Wide",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string", "long"]},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}},
    ],
}


@pytest.mark.parametrize("name", ["avro", "debezium-avro"])
@pytest.mark.parametrize("schema_changes", ["ignore", "evolve"])
def test_no_message_is_lost(registry: Registry, admin: SchemaRegistryClient, name: str, schema_changes: str) -> None:
    """Random bytes, cut and changed messages, wrong unions, huge numbers. In a batch, each message gives the same
    result as alone.
    """
    events = [value for _, value in registered(admin, "orders") if value is not None][:12]
    wide = admin.register_schema("wide-value", Schema(json.dumps(UNION)))
    narrow = admin.register_schema("narrow-value", Schema(json.dumps(ROW)))
    good = [
        *events,
        message(narrow, ROW, {"id": 1, "name": "a"}),
        message(wide, UNION, {"id": -(2**63), "name": 7, "amount": Decimal("9" * 36 + ".99")}),
        message(wide, UNION, {"id": 2, "name": "b", "amount": Decimal("-1.50")}),
    ]
    options = {"schema.registry.url": registry.url}
    columns = {"id": "bigint", "name": "string", "customer": "string", "amount": "decimal(12,2)"}
    table = typed_spec(columns, options=options, schema_changes=schema_changes, trust_before=True)
    whole = st.sampled_from(good)
    headers = st.sampled_from([value[:5] for value in good])
    flipped = st.builds(
        lambda value, at, octet: value[: at % len(value)] + bytes([octet]) + value[at % len(value) + 1 :],
        whole,
        st.integers(5, 200),
        st.integers(0, 255),
    )
    broken = st.one_of(
        whole,
        flipped,
        st.builds(lambda value, size: value[:size], whole, st.integers(0, 60)),
        st.builds(lambda header, body: header + body, headers, st.binary(max_size=40)),
        st.builds(lambda one, other: one + other, whole, whole),
        st.binary(max_size=12),
    )

    @fuzz.much(60)
    @given(st.lists(broken, min_size=1, max_size=16))
    @example([b"\0\x80\0\0\0", good[0]])
    def run(values: list[bytes]) -> None:
        fuzz.assert_accounted(
            name, [(None, value) for value in values], table, lambda op: op == b"m", parse=lambda value: value[-1:]
        )

    run()


class Referring:
    """Stands for the registry's client: schema `n` is version 1 of subject `sn`.

    :param references: (subject, version) to which a subject's versions refer.
    """

    def __init__(self, references: dict[str, list[tuple[str, int]]]) -> None:
        self.asked: list[tuple[str, int | str]] = []
        self._references = references

    def schema(self, subject: str, version: int | str) -> Schema:
        text = json.dumps({"type": "record", "name": f"{subject}_{version}", "fields": [{"name": "id", "type": "int"}]})
        named = [SchemaReference(f"{other}_{v}", other, v) for other, v in self._references.get(subject, [])]
        return Schema(text, "AVRO", named)

    def get_schema(self, schema_id: int) -> Schema:
        return self.schema(f"s{schema_id}", 1)

    def get_version(self, subject: str, version: int | str) -> Any:
        assert len(self.asked) < 1000, "asked again and again"
        self.asked.append((subject, version))
        return SimpleNamespace(schema=self.schema(subject, version))


def referring(references: dict[str, list[tuple[str, int]]]) -> tuple[Client, Referring]:
    client, fake = Client({"schema.registry.url": "http://127.0.0.1:1"}), Referring(references)
    client._client = fake  # type: ignore[assignment]
    return client, fake


def test_each_reference_is_asked_for_once() -> None:
    twice = {f"s{n}": [(f"s{n - 1}", 1), (f"s{n - 1}", 2)] for n in range(1, 31)}
    client, fake = referring(twice)
    client.get(30)
    assert len(fake.asked) == len(set(fake.asked)) == 60
    client, fake = referring({"s1": [("s2", 1)], "s2": [("s1", 1), ("s2", 1)]})
    client.get(1)
    assert len(fake.asked) == 2, "a cycle ends"


def test_very_many_references_are_refused() -> None:
    for chain in ({f"s{n}": [(f"s{n + 1}", 1)] for n in range(900)}, {"s0": [(f"s{n}", 1) for n in range(1, 900)]}):
        client, fake = referring(chain)
        with pytest.raises(SchemaError, match=r"^schema id 0: refers to more than 200 other schemas$"):
            client.get(0)
        assert len(fake.asked) == 200
