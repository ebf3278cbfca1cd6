"""Finds changelogs for `rowdelta init`: topics or directories, and their format, key and columns.

A plain Kafka client reads the topics, and PyArrow reads the files. So all this needs no JVM.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema

from changelog.changes import RAW_SCHEMA, BadOptionError, UnavailableError
from changelog.parse.schema_registry import Registry, RegistryError
from changelog.recognition import Recognized, json_rows, kind_options, recognize
from changelog.values.encoded import looks_like_base64
from sink.config import Config, SinkSection, SourceSection
from sink.errors import ConfigError, TemporaryError
from sink.redaction import masked
from sink.run.columns import column_type
from sink.run.inference import infer_fields, message_keys, of_one_table, raw_records, source_tables
from sink.sources.kafka_client import Broker, Message
from sink.targets.capabilities import ICEBERG

SAMPLE = 100
"""`init` looks at this many messages from the beginning of a topic, and as many from its end. In a directory, it looks
at this many lines of the first files.
"""

_OWN_TOPICS: Mapping[str, str] = {
    r"__debezium-heartbeat.*": "heartbeats of Debezium",
    r"__.*": "Kafka's own",
    r"_schemas|_confluent.*|kafkasql-(journal|snapshots|topic)|.*-ksql-.*": "the schema registry's own",
    r"(.*[-_.])?connect[-_.]?(configs?|offsets?|status(es)?)": "Kafka Connect's own",
}
_ORDER_COLUMNS = (
    "_offset", "offset", "seq", "seqno", "sequence", "_seq", "lsn", "_lsn", "commit_lsn", "scn", "_commit_version",
    "version", "ts_us", "ts_ms", "_ts", "ts", "commit_ts", "_commit_timestamp", "event_time", "timestamp", "changed_at",
    "updated_at",
)  # fmt: skip
"""Names of columns that say which change of a key is the last, in lower case. The most reliable names come first."""
_ORDERED = re.compile(r"tinyint|smallint|int|bigint|decimal\(.*|date|timestamp.*")
_ORDER_PATHS: Mapping[str, Sequence[tuple[str, str]]] = {
    "debezium-json": (("source.lsn", "bigint"), ("source.pos", "bigint"), ("ts_ms", "bigint")),
    "canal-json": (("id", "bigint"), ("es", "bigint")),
    "maxwell-json": (("xid", "bigint"), ("xoffset", "bigint"), ("ts", "bigint")),
    "ogg-json": (("pos", "string"), ("op_ts", "string")),
    "dms-json": (("metadata.timestamp", "string"),),
}
"""Paths in messages from files that can order them. Of those that all messages have, the first one is taken; for
Maxwell, all are.
"""

_DECIMAL = re.compile(r"[+-]?\d+\.\d+")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)")
_WALL_CLOCK = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DAY_NAME = re.compile(r"(^|_)(d|dt|date|day|dob|birth\w*)(_|$)|date$|_on$", re.IGNORECASE)
_MICROSECONDS = range(10**14, 4 * 10**15)
_MILLISECONDS = range(10**11, 4 * 10**12)
_DAYS = range(40_000)


@dataclass(frozen=True)
class Found:
    """A changelog.

    :param name: the topic's name, or the directory of the files.
    :param key: key columns; empty if nothing states them.
    :param looked_at: how many messages were looked at.
    :param key_is_stated: every message states this key, so the configuration doesn't have to.
    :param key_is_guess: only the column's name suggests that it is the key.
    :param columns: name -> Spark SQL type, if no schema states the types.
    :param remarks: column -> what else its type may be.
    :param empty: fields that are null in all messages, likewise.
    :param excluded: fields that can't be columns.
    :param order_by: columns or paths that order the changes, for files only.
    :param parquet: whether the files are Parquet.
    :param tables: the source's tables that the messages name, the first one first, with their numbers of messages. All
        else is of the first one.
    """

    name: str
    recognized: Recognized
    key: tuple[str, ...]
    looked_at: int
    key_is_stated: bool = False
    key_is_guess: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    empty: Sequence[str] = ()
    excluded: Sequence[str] = ()
    order_by: Sequence[str] = ()
    parquet: bool = False
    tables: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """A topic or directory that doesn't become a table.

    :param internal: the topic belongs to Kafka, Connect or another program.
    :param asked_for: False if `--topics` doesn't match the topic.
    :param needs_registry: only a schema registry could say what the messages are.
    """

    name: str
    reason: str
    _: KW_ONLY
    internal: bool = False
    asked_for: bool = True
    needs_registry: bool = False


def topics(
    broker: Broker,
    registry_options: Mapping[str, str],
    pattern: str,
    key: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Found | LeftOut]:
    """Find out which topics of a broker are changelogs.

    :param registry_options: `format_options` of the registry; empty if there is none.
    :param pattern: regular expression. Only topics whose whole name it matches are looked at.
    :param key: key columns, for tables whose messages don't state a key.
    :param progress: is called with the number of topics that are done, and of all.
    :raises ConfigError: there is no topic, or no message.
    :raises TemporaryError: the broker or the registry doesn't answer.
    """
    existing = broker.topics()
    chosen = [name for name in existing if re.fullmatch(pattern, name)]
    names = [name for name in chosen if own_topic(name) is None]
    if not names:
        others = [name for name in existing if own_topic(name) is None]
        if others:
            raise ConfigError(
                f"no topic of Kafka at {broker.servers} matches {pattern!r}; there are {', '.join(others[:10])}"
                f"{', …' if len(others) > 10 else ''}. Correct --topics."
            )
        raise ConfigError(
            f"Kafka at {broker.servers} has no topic but its own. Start what writes the changes, for example a "
            "Debezium connector, and run this again."
        )
    try:
        registry = Registry(registry_options) if registry_options else None
    except (BadOptionError, ValueError) as error:
        raise ConfigError(f"the schema registry's client refuses its options: {masked(str(error))}.") from None
    result: list[Found | LeftOut] = [
        LeftOut(name, reason, internal=True) for name in chosen if (reason := own_topic(name)) is not None
    ]
    result += [LeftOut(name, "not asked for", asked_for=False) for name in existing if name not in set(chosen)]
    empty = 0
    for number, (name, messages) in enumerate(broker.sample(names, SAMPLE)):
        progress(number, len(names))
        if not messages:
            empty += 1
            result.append(LeftOut(name, "no messages yet"))
            continue
        try:
            result.append(_topic(name, messages, registry, registry_options, key))
        except RegistryError as error:
            raise TemporaryError(f"{error}. Correct --registry, or run again once it answers.") from None
    if empty == len(names):
        raise ConfigError(
            f"no topic has a message yet: {', '.join(names[:10])}{', …' if empty > 10 else ''}. A topic's format "
            "can only be seen in its messages: run this again when there are some."
        )
    return result


def own_topic(name: str) -> str | None:
    """Which program the topic belongs to, by its name. None if it may be a changelog."""
    return next((whose for pattern, whose in _OWN_TOPICS.items() if re.fullmatch(pattern, name)), None)


def _topic(
    name: str,
    messages: Sequence[Message],
    registry: Registry | None,
    registry_options: Mapping[str, str],
    key: Sequence[str],
) -> Found | LeftOut:
    what = recognize([(message.key, message.value) for message in messages], registry)
    if not isinstance(what, Recognized):
        return LeftOut(name, what.reason, internal=what.internal, needs_registry=what.needs_registry)
    options = registry_options if what.format in ("avro", "debezium-avro") else {}
    return _found(name, what, raw_records(name, messages), options, key)


def directories(
    folder: Path, key: Sequence[str], order_by: Sequence[str], progress: Callable[[int, int], None]
) -> list[Found | LeftOut]:
    """Find out what the change files of a folder are. If it has no files itself, look into each folder in it.

    :param key: key columns, for files that have these columns.
    :param order_by: columns that order the changes, likewise.
    :param progress: is called with the number of folders that are done, and of all.
    :raises ConfigError: there are no files.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder. Give --files the folder with the change files, or with their folders."
        )
    own = _files(folder)
    places = (
        [folder] if own else sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    )
    result: list[Found | LeftOut] = []
    for number, place in enumerate(places):
        progress(number, len(places))
        result.append(_directory(place, key, order_by))
    if not any(_files(place) for place in places):
        raise ConfigError(
            f"{folder} has no change files, neither itself nor in its folders. They end with .parquet, .json, .jsonl "
            "or .ndjson, and don't begin with . or _."
        )
    return result


def _files(folder: Path) -> list[Path]:
    suffixes = (".parquet", ".json", ".jsonl", ".ndjson")
    return sorted(
        p
        for p in folder.iterdir()
        if p.is_file() and p.suffix.lower() in suffixes and not p.name.startswith((".", "_"))
    )


def _directory(folder: Path, key: Sequence[str], order_by: Sequence[str]) -> Found | LeftOut:
    name, files = str(folder), _files(folder)
    parquet = [file for file in files if file.suffix.lower() == ".parquet"]
    if not files:
        return LeftOut(name, "no change files yet")
    if parquet and len(parquet) < len(files):
        return LeftOut(name, "both Parquet and JSON files: put them into folders of their own")
    try:
        return _parquet(name, parquet, key, order_by) if parquet else _json_lines(name, files, key, order_by)
    except (OSError, pa.ArrowException) as error:
        return LeftOut(name, f"can't be read: {str(error).splitlines()[0]}")


def _parquet(name: str, files: Sequence[Path], key: Sequence[str], order_by: Sequence[str]) -> Found | LeftOut:
    with pq.ParquetFile(files[0]) as file:
        schema = file.schema_arrow
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_integer(f.type)]
        rows = next(file.iter_batches(1000), None) if file.metadata.num_rows else None
    if rows is None:
        return LeftOut(name, "no rows yet")
    options = kind_options(
        {text: rows.column(text).unique().to_pylist() for text in texts if text in rows.schema.names}
    )
    if options is None:
        return LeftOut(name, f"no column with the kind of change among {', '.join(schema.names)}")
    kind = dict(options).get("column", "row_kind")
    if pa.types.is_integer(schema.field(str(kind)).type):
        options = tuple(sorted({**dict(options), "column_type": "integer"}.items()))
    types = {f.name: f.dataType.simpleString() for f in from_arrow_schema(schema) if f.name != kind}
    what = Recognized("row-kind", options, has_schema=True)
    found = _keyed(name, what, types, [(False, row) for row in rows.to_pylist()], key)
    return _ordered(found, types, rows.to_pylist(), order_by, parquet=True)


def _json_lines(name: str, files: Sequence[Path], key: Sequence[str], order_by: Sequence[str]) -> Found | LeftOut:
    lines: list[bytes] = []
    for file in files:
        with file.open("rb") as opened:
            lines += [line.strip() for line, _ in zip(opened, range(SAMPLE), strict=False) if line.strip()]
        if len(lines) >= SAMPLE:
            break
    if not lines:
        return LeftOut(name, "no lines yet")
    what = recognize((None, line) for line in lines)
    if not isinstance(what, Recognized):
        return LeftOut(name, what.reason, internal=what.internal)
    columns = {field.name: [None] * len(lines) for field in RAW_SCHEMA} | {"value": lines}
    found = _found(name, what, pa.table(columns, schema=RAW_SCHEMA), {}, key)
    paths = _ORDER_PATHS.get(what.format)
    if isinstance(found, LeftOut):
        return found
    if paths is None or order_by:
        return _ordered(found, found.columns, [row for _, row in json_rows(what.format, lines)], order_by)
    messages = [row for _, row in json_rows("", lines)]
    there = [f"{path} {dtype}" for path, dtype in paths if all(_at(message, path) is not None for message in messages)]
    if not there:
        return LeftOut(name, "nothing in the messages orders them; give --order-by")
    return replace(found, order_by=there if what.format == "maxwell-json" else there[:1])


def _found(
    name: str, what: Recognized, records: pa.Table, registry: Mapping[str, str], key: Sequence[str]
) -> Found | LeftOut:
    """A changelog with the columns and the key that raw records have."""
    section = SourceSection(
        type="kafka", format=what.format, format_options={**dict(what.options), **registry}, options={}
    )
    source = Config.model_construct(sink=SinkSection.model_construct(), source=section)
    types: Mapping[str, str] = {}
    stated: frozenset[tuple[str, ...]] = frozenset()
    tables: Mapping[str, int] = {}
    try:
        tables = source_tables(source, records)
        records = of_one_table(source, records, ())
        types = {column: column_type(dtype) for column, dtype in infer_fields(source, records).items()}
        stated = message_keys(source, records)
    except UnavailableError:
        raise
    except Exception as error:  # noqa: BLE001 - a message that a decoder fails on must not stop `init`
        what = replace(what, note="; ".join(filter(None, [what.note, f"no columns could be inferred: {error}"])))
    rows = list(json_rows(what.format, records.column("value").to_pylist()))
    if len(stated) == 1:
        what = replace(what, key=next(iter(stated)) or what.key)
    found = _keyed(name, what, types, rows, key)
    if isinstance(found, Found):
        return replace(found, key_is_stated=stated == {found.key}, tables=tables)
    return found


def _keyed(
    name: str,
    what: Recognized,
    types: Mapping[str, str],
    rows: Sequence[tuple[bool, Mapping[str, Any]]],
    given: Sequence[str],
) -> Found | LeftOut:
    excluded = sorted(column for column in types if not _can_be_column(column, types))
    columns = {column: dtype for column, dtype in types.items() if column not in excluded}
    remarks, empty = {}, list[str]()
    if not what.has_schema:
        valued = {column for _, row in rows for column, value in row.items() if value is not None}
        names = dict.fromkeys(column for _, row in rows for column in row if not column.startswith("__"))
        empty = [column for column in names if column not in valued and column not in types]
        for column, dtype in columns.items():
            values = [row[column] for _, row in rows if row.get(column) is not None]
            remark = guess(column, dtype, values, is_debezium=what.format == "debezium-json")
            if remark:
                remarks[column] = remark
    key, is_guess = what.key, False
    if not key and given and set(given) <= types.keys():
        key = tuple(given)
    elif not key and what.format != "debezium-json":
        key = _guessed_key(name, columns, rows)
        is_guess = bool(key)
    if what.format != "avro" and not set(key) <= columns.keys():
        # with Avro, the key's columns may be only in the message's key
        return LeftOut(name, f"its key {', '.join(key)} is no column of its rows: {', '.join(columns)}")
    if any("${" in text for text in (name, *key, *excluded, *columns, *columns.values())):
        return LeftOut(name, "a name has ${ in it, which means an environment variable in a configuration")
    shown = {} if what.has_schema else columns
    return Found(
        name,
        what,
        key,
        len(rows),
        key_is_guess=is_guess,
        columns=shown,
        remarks=remarks,
        empty=empty,
        excluded=excluded,
    )


def _guessed_key(
    name: str, columns: Mapping[str, str], rows: Sequence[tuple[bool, Mapping[str, Any]]]
) -> tuple[str, ...]:
    """The column that has a typical key's name, and whose values could be a key."""
    table = re.split(r"[./]", name)[-1].lower()
    likely = ("id", f"{table}_id", f"{table.removesuffix('s')}_id", f"{table}id")
    for column in columns:
        values = [row.get(column) for _, row in rows]
        new = [row.get(column) for is_new, row in rows if is_new]
        if column.lower() in likely and None not in values and len(set(map(str, new))) == len(new):
            return (column,)
    return ()


def _ordered(
    found: Found | LeftOut,
    types: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    given: Sequence[str],
    *,
    parquet: bool = False,
) -> Found | LeftOut:
    """The changelog with the column that orders the changes in its files."""
    if isinstance(found, LeftOut):
        return found
    if given:
        names = [text.split()[0] for text in given]
        if parquet and not set(names) <= types.keys():
            return LeftOut(found.name, f"it has no column {' and '.join(sorted(set(names) - types.keys()))}")
        return replace(found, order_by=list(given), parquet=parquet)
    lower = {name.lower(): name for name in types}
    for likely in _ORDER_COLUMNS:
        name = lower.get(likely)
        if name is None or not _ORDERED.fullmatch(types[name]) or any(row.get(name) is None for row in rows):
            continue
        return replace(found, order_by=[name], parquet=parquet)
    return LeftOut(found.name, f"no column says which change is the last, among {', '.join(types)}; give --order-by")


def guess(column: str, dtype: str, values: Sequence[Any], *, is_debezium: bool) -> str:
    """A comment that says what else a column's type may be, since JSON doesn't state types. Empty if there is no doubt.

    :param dtype: the type that was inferred from the values.
    """
    if not values:
        return "every value is null so far"
    texts = [str(value) for value in values]
    if dtype == "double":
        return "a number with a fraction; if it is a decimal in the source, write decimal(p,s)"
    if dtype == "string" and any(isinstance(value, dict | list) for value in values):
        return "JSON text of an object or array"
    if dtype == "string":
        return _guess_of_text(texts, is_debezium=is_debezium)
    if dtype in ("int", "bigint"):
        return _guess_of_integers(column, [value for value in values if isinstance(value, int)], is_debezium)
    return ""


def _guess_of_integers(column: str, numbers: Sequence[int], is_debezium: bool) -> str:
    if not numbers:
        return ""
    computed = "a computed column makes it a timestamp: {{type: timestamp, expression: timestamp_{}({})}}"
    if all(number in _MICROSECONDS for number in numbers):
        way = "then write timestamp_ntz" if is_debezium else computed.format("micros", column)
        return f"may be a time in microseconds: {way}"
    if all(number in _MILLISECONDS for number in numbers):
        if is_debezium:
            way = f"then write timestamp_ntz, and format_options: {{milliseconds: [{column}]}} under source"
            return f"may be a time in milliseconds: {way}"
        return f"may be a time in milliseconds: {computed.format('millis', column)}"
    if is_debezium and all(number in _DAYS for number in numbers) and _DAY_NAME.search(column):
        return "may be a date in days since 1970: then write date"
    return ""


def _guess_of_text(texts: Sequence[str], *, is_debezium: bool) -> str:
    if all(map(_DECIMAL.fullmatch, texts)):
        also = ", and format_options: {decimal.handling.mode: string}" if is_debezium else ""
        return f"may be a decimal as text: then write decimal(p,s){also}"
    for pattern, dtype in ((_TIME, "timestamp"), (_WALL_CLOCK, "timestamp_ntz"), (_DATE, "date")):
        if all(map(pattern.fullmatch, texts)):
            return f"may be a {dtype}: then write {dtype}"
    if is_debezium and looks_like_base64(pa.array(texts)):
        return "base64: a decimal (then write decimal(p,s), as the source has it) or bytes (binary)"
    return ""


def _can_be_column(name: str, types: Mapping[str, str]) -> bool:
    namesake = any(other != name and other.lower() == name.lower() for other in types)
    return not (
        namesake or name in ICEBERG.reserved_columns or name.startswith("_rowdelta_") or "." in name or "'" in name
    )


def _at(message: Mapping[str, Any], path: str) -> Any:
    found: Any = message
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
