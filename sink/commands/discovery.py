"""Finds changelogs for `rowdelta init`: topics or directories, and their format, key and columns.

A plain Kafka client reads the topics, and PyArrow reads the files. So all this needs no JVM.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema

from changelog.changes import RAW_SCHEMA, BadOptionError, UnavailableError
from changelog.parse.schema_registry import Registry, RegistryError
from changelog.recognition import Recognized, kind_options, recognize
from changelog.values.encoded import MAYBE_BASE64
from sink.config import Config, SinkSection, SourceSection
from sink.errors import ConfigError, TemporaryError
from sink.redaction import masked
from sink.sources.kafka_client import Broker, Message
from sink.table.columns import column_type
from sink.table.inference import infer_fields, message_keys, of_one_table, raw_records, source_tables
from sink.table.plan import can_be_column
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


@dataclass(frozen=True)
class Found:
    """A changelog.

    :param name: the topic's name, or the directory of the files.
    :param key: key columns.
    :param looked_at: how many messages were looked at.
    :param key_is_stated: every message states this key, so the configuration doesn't have to.
    :param columns: name -> Spark SQL type, if no schema states the types.
    :param excluded: fields that can't be columns.
    :param order_by: columns that order the changes, for files only.
    :param parquet: whether the files are Parquet.
    :param tables: the source's tables that the messages name, the first one first, with their numbers of messages. All
        else is of the first one.
    """

    name: str
    recognized: Recognized
    key: tuple[str, ...]
    looked_at: int
    key_is_stated: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    excluded: Sequence[str] = ()
    order_by: Sequence[str] = ()
    parquet: bool = False
    tables: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """A topic or directory that doesn't become a table.

    :param internal: the topic belongs to Kafka, Connect or another program.
    :param needs_registry: only a schema registry could say what the messages are.
    """

    name: str
    reason: str
    _: KW_ONLY
    internal: bool = False
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
        rows = next(file.iter_batches(1000, columns=texts), None) if file.metadata.num_rows else None
    if rows is None:
        return LeftOut(name, "no rows yet")
    options = kind_options({text: rows.column(text).unique().to_pylist() for text in rows.schema.names})
    if options is None:
        return LeftOut(name, f"no column with the kind of change among {', '.join(schema.names)}")
    kind = dict(options).get("column", "row_kind")
    if pa.types.is_integer(schema.field(str(kind)).type):
        options = tuple(sorted({**dict(options), "column_type": "integer"}.items()))
    types = {f.name: f.dataType.simpleString() for f in from_arrow_schema(schema) if f.name != kind}
    found = _keyed(name, Recognized("row-kind", options, has_schema=True), types, rows.num_rows, frozenset(), key)
    return _ordered(replace(found, parquet=True) if isinstance(found, Found) else found, types, order_by)


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
    return _ordered(found, found.columns if isinstance(found, Found) else {}, order_by)


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
        observed = infer_fields(source, records)
        types = {column: column_type(dtype) for column, dtype in observed.items()}
        base64 = [column for column, dtype in observed.items() if dtype == MAYBE_BASE64]
        if base64:
            what = _noted(what, f"{', '.join(base64)}: texts like base64, as which Debezium sends decimals")
        stated = message_keys(source, records)
    except UnavailableError:
        raise
    except Exception as error:  # noqa: BLE001 - a message that a decoder fails on must not stop `init`
        what = _noted(what, f"no columns could be inferred: {error}")
    found = _keyed(name, what, types, records.num_rows, stated, key)
    return replace(found, tables=tables) if isinstance(found, Found) else found


def _noted(what: Recognized, note: str) -> Recognized:
    return replace(what, note="; ".join(filter(None, [what.note, note])))


def _keyed(
    name: str,
    what: Recognized,
    types: Mapping[str, str],
    looked_at: int,
    stated: Collection[tuple[str, ...]],
    given: Sequence[str],
) -> Found | LeftOut:
    """The changelog with its key: what all messages state, or what is given."""
    lower = [column.lower() for column in types]
    excluded = sorted(c for c in types if lower.count(c.lower()) > 1 or not can_be_column(c, ICEBERG))
    columns = {column: dtype for column, dtype in types.items() if column not in excluded}
    key = (next(iter(stated)) if len(stated) == 1 else ()) or what.key
    if not key and set(given) <= types.keys():
        key = tuple(given)
    if not key:
        return LeftOut(name, _no_key(what.format))
    if what.format != "avro" and not set(key) <= columns.keys():
        # with Avro, the key's columns may be only in the message's key
        return LeftOut(name, f"its key {', '.join(key)} is no column of its rows: {', '.join(columns)}")
    if any("${" in text for text in (name, *key, *excluded, *columns, *columns.values())):
        return LeftOut(name, "a name has ${ in it, which means an environment variable in a configuration")
    shown = {} if what.has_schema else columns
    return Found(name, what, key, looked_at, key_is_stated=set(stated) == {key}, columns=shown, excluded=excluded)


def _no_key(kind: str) -> str:
    if kind in ("debezium-json", "debezium-avro", "avro"):
        return (
            f"{kind}, but its messages have no key: give the source's table a primary key, or name columns with --key"
        )
    return f"{kind}, but its messages don't say which columns are the key; name them with --key"


def _ordered(found: Found | LeftOut, types: Mapping[str, str], given: Sequence[str]) -> Found | LeftOut:
    """The changelog with the column that orders the changes in its files: what is given, or a usual name."""
    if isinstance(found, LeftOut):
        return found
    usual = {name.lower(): name for name, dtype in types.items() if _ORDERED.fullmatch(dtype)}
    order_by = list(given) or [usual[name] for name in _ORDER_COLUMNS if name in usual][:1]
    if not order_by:
        names = ", ".join(types)
        return LeftOut(
            found.name, f"no column says which change is the last, among {names}; give --order-by, also as a path"
        )
    return replace(found, order_by=order_by)
