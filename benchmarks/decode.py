"""How fast each format decodes, and Debezium JSON all the way into a table.

First every format alone, in one process on one core: raw records, as a Spark task gets them, to changelog rows of the
workload's accounts table. Then the whole sink: a topic's worth of Debezium JSON of about 700 bytes a message, from
files of JSON lines (a broker on the same two cores would be measured with them), in micro-batches of a million
messages. Messages are deterministic by seed.
"""

import argparse
import base64
import io
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder
from changelog.spec import ChangelogSpec, ColumnSpec, SchemaChanges

COLUMNS: Mapping[str, tuple[str, T.DataType]] = {
    "id": ("bigint", T.LongType()),
    "region": ("string", T.StringType()),
    "balance": ("decimal(12,2)", T.DecimalType(12, 2)),
    "name": ("string", T.StringType()),
    "note": ("string", T.StringType()),
    "updated_at": ("timestamp", T.TimestampType()),
    "version": ("bigint", T.LongType()),
}
BATCH = 32_768
"""Records in an Arrow batch, as the sink sets it for Spark."""

WARM_UP = 3
"""Micro-batches until the JVM has compiled what it runs."""

_BOTH: tuple[SchemaChanges, ...] = ("ignore", "evolve")

Row = dict[str, Any]
Encoder = Callable[[Row, Row | None, int], Any]

_EPOCH = 1_767_323_045_000_000


def rows(count: int, seed: int, keys: float = 0.1) -> list[tuple[Row, Row | None]]:
    """After and before images: seven updates for three inserts.

    :param keys: number of keys for each change.
    """
    random = np.random.default_rng(seed)
    numbers = random.integers(int(count * keys) + 1, size=count).tolist()
    updates = (random.random(count) < 0.7).tolist()
    pairs: list[tuple[Row, Row | None]] = []
    for number, (key, update) in enumerate(zip(numbers, updates, strict=True)):
        after = _row(key, number)
        pairs.append((after, _row(key, number - 1) if update else None))
    return pairs


def _row(key: int, version: int) -> Row:
    return {
        "id": key,
        "region": ("emea", "apac", "amer")[key % 3],
        "balance": (key * 7919 + version) % 10**8,
        "name": f"account {key:012d}",
        "note": (f"note {version} " * 10)[:32],
        "updated_at": _EPOCH + version,
        "version": version,
    }


def _connect(row: Row | None) -> Row | None:
    if row is None:
        return None
    cents = row["balance"]
    return row | {"balance": _base64(cents)}


def _base64(number: int) -> str:
    return base64.b64encode(number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)).decode()


def _plain(row: Row) -> Row:
    """Rows of tools that send decimals as numbers and times as text."""
    return row | {"balance": row["balance"] / 100, "updated_at": _time(row)}


def _time(row: Row) -> str:
    return str(np.datetime64(row["updated_at"], "us")).replace("T", " ")


def debezium(after: Row, before: Row | None, number: int) -> Row:
    source = {
        "version": "3.7.0.Final",
        "connector": "postgresql",
        "name": "bench",
        "ts_ms": 1_767_323_045_123,
        "snapshot": "false",
        "db": "bench",
        "sequence": f'["{number}","{number}"]',
        "ts_us": 1_767_323_045_123_456,
        "ts_ns": 1_767_323_045_123_456_000,
        "schema": "public",
        "table": "accounts",
        "txId": 755,
        "lsn": 27_627_472 + number,
        "xmin": None,
    }
    operation = "u" if before else "c"
    times = {"ts_ms": 1_767_323_045_400, "ts_us": 1_767_323_045_400_123, "ts_ns": 1_767_323_045_400_123_456}
    images = {"before": _connect(before), "after": _connect(after)}
    return images | {"source": source, "transaction": None, "op": operation} | times


def _flattened(after: Row, before: Row | None, number: int) -> Row:
    return (_connect(after) or {}) | {"__op": "u" if before else "c", "__deleted": "false", "__lsn": number}


def _canal(after: Row, before: Row | None, number: int) -> Row:
    texts = {name: str(value) for name, value in _plain(after).items()}
    old = {"version": str(before["version"]), "note": before["note"]} if before else None
    kind = "UPDATE" if before else "INSERT"
    return {"data": [texts], "old": [old] if old else None, "type": kind, "isDdl": False, "id": number, "ts": number}


def _maxwell(after: Row, before: Row | None, number: int) -> Row:
    old = {"version": before["version"], "note": before["note"]} if before else {}
    return {"database": "bench", "table": "accounts", "type": "update" if before else "insert", "ts": number} | (
        {"data": _plain(after)} | ({"old": old} if before else {})
    )


def _ogg(after: Row, before: Row | None, number: int) -> Row:
    image = {"before": _plain(before)} if before else {}
    return {"table": "BENCH.ACCOUNTS", "op_type": "U" if before else "I", "pos": f"{number:020d}"} | (
        image | {"after": _plain(after)}
    )


def _dms(after: Row, before: Row | None, number: int) -> Row:
    metadata = {"operation": "update" if before else "insert", "record-type": "data", "transaction-id": number}
    return {"data": _plain(after), "metadata": metadata}


def _row_kind(after: Row, before: Row | None, number: int) -> Row:
    return {"row_kind": "+U" if before else "+I", "seq": number} | _plain(after)


JSON_FORMATS: Mapping[str, tuple[str, Encoder, Mapping[str, str]]] = {
    "debezium-json": ("debezium-json", debezium, {}),
    "debezium-json, flattened": ("debezium-json", _flattened, {"flattened": "true"}),
    "canal-json": ("canal-json", _canal, {}),
    "maxwell-json": ("maxwell-json", _maxwell, {}),
    "ogg-json": ("ogg-json", _ogg, {}),
    "dms-json": ("dms-json", _dms, {}),
    "row-kind": ("row-kind", _row_kind, {}),
}


AVRO_SCHEMA: Mapping[str, Any] = {
    "type": "record",
    "name": "Account",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "region", "type": "string"},
        {"name": "balance", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "name", "type": "string"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "updated_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "version", "type": "long"},
    ],
}
DEBEZIUM_AVRO_SCHEMA: Mapping[str, Any] = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", AVRO_SCHEMA]},
        {"name": "after", "type": ["null", "Account"]},
        {
            "name": "source",
            "type": {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": ["null", "long"]}]},
        },
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"]},
    ],
}


def _avro(row: Row) -> Row:
    cents = row["balance"]
    return row | {"balance": cents.to_bytes(cents.bit_length() // 8 + 1, "big", signed=True)}


def avro_values(pairs: list[tuple[Row, Row | None]], enveloped: bool) -> list[bytes]:
    """Rows, or Debezium's events, in Confluent's wire format, of the schema with the id 1 or 2."""
    parsed = fastavro.parse_schema(_physical(DEBEZIUM_AVRO_SCHEMA if enveloped else AVRO_SCHEMA))
    values = []
    for number, (after, before) in enumerate(pairs):
        record: Row = _avro(after)
        if enveloped:
            images = {"before": _avro(before) if before else None, "after": record}
            record = images | {"source": {"lsn": number}, "op": "u" if before else "c", "ts_ms": number}
        body = io.BytesIO()
        fastavro.schemaless_writer(body, parsed, record)
        values.append(bytes([0, 0, 0, 0, 2 if enveloped else 1]) + body.getvalue())
    return values


def _physical(schema: Any) -> Any:
    """Without logical types, for which fastavro would want other Python values."""
    if isinstance(schema, dict):
        return {name: _physical(value) for name, value in schema.items() if name != "logicalType"}
    return [_physical(part) for part in schema] if isinstance(schema, list) else schema


@contextmanager
def registry() -> Iterator[str]:
    """The address of a schema registry that has the two schemas."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            schema = DEBEZIUM_AVRO_SCHEMA if "/ids/2" in self.path else AVRO_SCHEMA
            body = json.dumps({"schema": json.dumps(schema)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def spec(options: Mapping[str, str], schema_changes: SchemaChanges) -> ChangelogSpec:
    columns = tuple(ColumnSpec(name, dtype) for name, (_, dtype) in COLUMNS.items())
    return ChangelogSpec(columns, ("id",), options=dict(options), schema_changes=schema_changes)


def text(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode_speed(name: str, values: list[bytes], table: ChangelogSpec) -> float:
    """Records a second of CPU time; the best of three passes, after one to warm up."""
    batches = []
    for start in range(0, len(values), BATCH):
        part = values[start : start + BATCH]
        columns: dict[str, list[Any]] = {field: [None] * len(part) for field in RAW_SCHEMA.names}
        columns |= {"source": ["accounts"] * len(part), "partition": [0] * len(part), "value": part}
        columns["offset"] = list(range(start, start + len(part)))
        batches.append(pa.RecordBatch.from_pydict(columns, schema=RAW_SCHEMA))
    decoder = ChangelogDecoder(name, table)
    best = float("inf")
    for _ in range(4):
        started = process_time()
        decoded = sum(batch.num_rows for batch in decoder(batches))
        best = min(best, process_time() - started)
    if decoded < len(values):
        raise SystemExit(f"{name}: {decoded:,} changes of {len(values):,} records")
    return len(values) / best


def end_to_end(folder: Path, values: list[bytes], batches: int, schema_changes: str) -> float:
    """Messages a second from files into an Iceberg table: the median micro-batch, after `WARM_UP`."""
    from benchmarks.streams import CATALOG, TimedPipeline, build_session
    from sink.config import Config
    from sink.spark import session

    source = folder / f"messages-{schema_changes}"
    source.mkdir(parents=True)
    for number in range(batches):
        for half in range(2):
            path = source / f"{number:03d}-{half}.json"
            path.write_bytes(b"\n".join(values[half::2]) + b"\n")
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    config = Config.model_validate(
        {
            "sink": {"id": "decode", "checkpoint": str(folder / f"state-{schema_changes}")},
            "source": {"type": "files", "format": "debezium-json", "options": {"maxFilesPerTrigger": 2}},
            "catalogs": {CATALOG: {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [
                {
                    "source": str(source),
                    "target": f"{CATALOG}.decode.{schema_changes}",
                    "key": ["id"],
                    "order_by": ["source.lsn bigint"],
                    "columns": {name: sql for name, (sql, _) in COLUMNS.items()},
                    "schema_changes": schema_changes,
                }
            ],
        }
    )
    spark = build_session(folder / "warehouse")
    session.start(config)
    pipeline = TimedPipeline(spark, config)
    started = perf_counter()
    pipeline.run()
    seconds = sorted(pipeline.batch_seconds[WARM_UP:])
    print(
        f"  {schema_changes}: {batches} micro-batches in {perf_counter() - started:.1f} s: "
        f"{[round(s, 2) for s in seconds]}"
    )
    return len(values) / seconds[len(seconds) // 2]


def _report(label: str, name: str, values: list[bytes], options: Mapping[str, str]) -> None:
    ignore, evolve = (decode_speed(name, values, spec(options, changes)) for changes in _BOTH)
    print(f"{label:40} {sum(map(len, values)) // len(values):>6} {ignore:>10,.0f} {evolve:>10,.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000, help="records of each format")
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages of a micro-batch, end to end")
    parser.add_argument("--keys", type=float, default=0.1, help="keys to a message, end to end; 10: they hardly repeat")
    parser.add_argument("--batches", type=int, default=8, help=f"micro-batches, of which {WARM_UP} warm up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["formats", "end-to-end"])
    arguments = parser.parse_args()
    if arguments.only != "end-to-end":
        pairs = rows(arguments.records, arguments.seed)
        print(
            f"{'format':40} {'bytes':>6} {'ignore':>10} {'evolve':>10}   records a second and core, by schema_changes"
        )
        for label, (name, encode, options) in JSON_FORMATS.items():
            _report(label, name, [text(encode(*pair, number)) for number, pair in enumerate(pairs)], options)
        with registry() as url:
            for name in ("avro", "debezium-avro"):
                _report(name, name, avro_values(pairs, name != "avro"), {"schema.registry.url": url})
    if arguments.only != "formats":
        messages = rows(arguments.messages, arguments.seed, arguments.keys)
        values = [text(debezium(after, before, number)) for number, (after, before) in enumerate(messages)]
        print(f"Debezium JSON into a table, {sum(map(len, values)) // len(values)} bytes a message:")
        with tempfile.TemporaryDirectory() as folder:
            for changes in _BOTH:
                speed = end_to_end(Path(folder), values, arguments.batches, changes)
                print(f"  {changes}: {speed:,.0f} messages/s", flush=True)


if __name__ == "__main__":
    main()
