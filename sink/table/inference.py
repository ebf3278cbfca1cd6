"""Infers a table's columns and key from its source's messages, if the configuration doesn't have them."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from changelog import formats
from changelog.changes import RAW_SCHEMA, BadOptionError, Changes, FormatError, MessageKey, Rejected, UnavailableError
from changelog.foreign_messages import Unrecognized
from changelog.message_keys import of_changes
from changelog.observed_types import merged_types, observed_type
from changelog.parse.schema_registry import connect
from changelog.recognition import NO_ROWS, Recognized, is_foreign, other_format, recognize
from changelog.shown_values import told
from changelog.source_tables import Found, Named, first_place, takes, with_tombstones
from changelog.spec import ChangelogSpec
from changelog.values.defaults import default_of, without_default
from sink.config import Config, TableSection
from sink.errors import NotChangesError
from sink.redaction import masked

if TYPE_CHECKING:
    from sink.sources.kafka_client import Message

SAMPLE = 1000
"""The sample has this many messages from the beginning of the source."""
_RECOGNIZED = 100
"""So many of them are looked at to recognize messages that the format can't read."""
LAST = 20
"""The sample has this many messages from the end of each partition."""

NOT_NULL = " not null"

log = logging.getLogger(__name__)


class Sample(Protocol):
    """What is known of a source before its changes are applied."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing tells columns yet."""

    def columns(self) -> dict[str, str] | None:
        """Name -> type of each field (`changelog.observed_types.Observed`), with `NOT_NULL` behind it if it can't be
        NULL. None if nothing tells them yet.
        """

    def message_keys(self) -> frozenset[tuple[str, ...]]:
        """Keys that messages state, as names of fields."""

    def source_tables(self) -> Mapping[str, int]:
        """The source's tables that the messages name, the first one first, with the number of messages of each."""


def refuse_others(config: Config, table: TableSection, records: pa.Table) -> None:
    """:raises NotChangesError: raw records (`RAW_SCHEMA`) are known to be something else than the format's messages."""
    source = config.source
    if source.format not in formats.OURS:
        return
    what = _recognized(config, records)
    if isinstance(what, Unrecognized):
        if is_foreign(what, source.format, source.format_options):
            raise NotChangesError(table.target, table.source, what.reason, is_internal=what.internal)
        return
    other = other_format(what, source.format, source.format_options)
    if other and not infer_fields(config, records):
        raise NotChangesError(table.target, table.source, other, is_internal=False)


def tell_nothing(config: Config, records: pa.Table) -> bool:
    """Whether raw records (`RAW_SCHEMA`) are too few to tell columns, and no more than that is wrong."""
    if not records.num_rows or records.num_rows >= SAMPLE:
        return not records.num_rows
    what = _recognized(config, records)
    return (what == NO_ROWS or isinstance(what, Recognized)) and not infer_fields(config, records)


def _recognized(config: Config, records: pa.Table) -> Recognized | Unrecognized:
    first = records.slice(0, _RECOGNIZED)
    pairs = zip(first.column("key").to_pylist(), first.column("value").to_pylist(), strict=True)
    return recognize(pairs, connect(config.source.format_options) if "avro" in config.source.format else None)


def source_tables(config: Config, records: pa.Table) -> dict[str, int]:
    """The source's tables that raw records (`RAW_SCHEMA`) name, the first one first, with the number of records of
    each. Those that are ignored, such as DDL, don't count.
    """
    places: dict[str, tuple[int, int]] = {}
    counts = Counter[str]()
    for batch, found in _decoded(config, records):
        for name, rows in Named(found).changing.items():
            counts[name] += len(rows)
            place = first_place(batch, rows)
            places[name] = min(place, places.get(name, place))
    return {name: counts[name] for name in sorted(places, key=lambda name: places[name])}


def of_one_table(config: Config, records: pa.Table, patterns: Sequence[str]) -> pa.Table:
    """Raw records (`RAW_SCHEMA`) without those of other tables of the source.

    :param patterns: `source_tables` of the entry. Empty: the table that is named first.
    """
    names = source_tables(config, records)
    taken = list(patterns) or list(names)[:1]
    if all(takes(taken, name) for name in names):
        return records
    rest = []
    for batch, found in _decoded(config, records):
        others = np.concatenate([np.empty(0, np.int64), *Named(found).strangers(taken).values()])
        rest.append(batch.take(pa.array(np.setdiff1d(np.arange(batch.num_rows), with_tombstones(batch, others)))))
    return pa.Table.from_batches(rest, RAW_SCHEMA)


def infer_fields(config: Config, records: pa.Table, kept: Collection[str] = ()) -> dict[str, str]:
    """Name -> type of each field of raw records (`RAW_SCHEMA`), as in `Observed`, without defaults.

    A field with a default is left out if some records' schema lacks it: it is newer than their rows. The micro-batch
    that has both adds the column, with the default for these rows.

    :param kept: fields that aren't left out, since the configuration names them.
    """
    found: Mapping[str, str] = {}
    fields = list[Collection[str]]()
    for _, batch in _decoded(config, records):
        for changes in (part for part in batch if isinstance(part, Changes)):
            seen = {name: observed_type(wire) for name, wire in changes.unknown.items()}
            found = merged_types(found, seen)
            fields += [seen] if seen else []
    newer = {
        name
        for name, dtype in found.items()
        if default_of(dtype) is not None and name not in kept and not all(name in some for some in fields)
    }
    return {name: without_default(dtype) for name, dtype in found.items() if name not in newer}


def message_keys(config: Config, records: pa.Table) -> frozenset[tuple[str, ...]]:
    """Keys that raw records (`RAW_SCHEMA`) state for their table (`MessageKey.fields`)."""
    stated = set[tuple[str, ...]]()
    for batch, found in _decoded(config, records):
        others = [part for part in found if isinstance(part, Rejected)]
        keys = (part for part in found if isinstance(part, MessageKey))
        stated.update(key.fields for key in of_changes(batch, keys, others))
    return frozenset(stated)


def stated_keys(
    config: Config, tables: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> list[frozenset[tuple[str, ...]]]:
    """Keys that the first and the last messages of each table's topics state (`MessageKey.fields`).

    :param tables: topics, and patterns of the source's tables whose messages count (`of_one_table`).

    A plain client reads all of them at once: 50 topics take 25 ms of a core's time. Spark needs a job for each.

    :raises ConfigError: the plain client can't be used with these options.
    :raises TemporaryError: no broker answers.
    :raises RegistryError: the schema registry doesn't answer.
    """
    from sink.sources.kafka_client import Broker  # its client is not loaded where nobody asks

    broker = Broker(config.source.options)
    existing = set(broker.topics())
    wanted = {topic for topics, _ in tables for topic in topics}
    found = {topic: raw_records(topic, messages) for topic, messages in broker.sample(sorted(wanted & existing), LAST)}
    none = RAW_SCHEMA.empty_table()
    samples = [pa.concat_tables([none, *(found.get(topic, none) for topic in topics)]) for topics, _ in tables]
    return [
        message_keys(config, of_one_table(config, one, some)) for one, (_, some) in zip(samples, tables, strict=True)
    ]


def raw_records(topic: str, messages: Sequence["Message"]) -> pa.Table:
    """Messages of a topic as raw records (`RAW_SCHEMA`), without their timestamps."""
    columns = {name: [getattr(each, name) for each in messages] for name in ("partition", "offset", "key", "value")}
    columns |= {"source": [topic] * len(messages), "timestamp": [None] * len(messages)}
    return pa.table(columns, schema=RAW_SCHEMA)


def _decoded(config: Config, records: pa.Table) -> Iterator[tuple[pa.RecordBatch, Sequence[Found]]]:
    """Batches of records, and what the format makes of them."""
    decoder = formats.find(config.source.format)(
        ChangelogSpec(
            (),
            (),
            options=config.source.format_options,
            schema_changes="evolve",
            show_values=config.sink.show_values,
        )
    )
    for batch in records.cast(RAW_SCHEMA).to_batches():
        try:
            yield batch, list(decoder.changes(batch))
        except (BadOptionError, UnavailableError):
            raise
        except Exception as error:
            found = []
            for row in range(batch.num_rows):
                with suppress(Exception):
                    found.append((batch.slice(row, 1), list(decoder.changes(batch.slice(row, 1)))))
            if not found and not config.sink.show_values:
                raise FormatError(f"format {config.source.format} fails: {told(error, visible=False)}") from None
            if not found:
                raise
            what = masked(told(error, visible=config.sink.show_values))
            log.warning("messages of the sample that can't be decoded: %d, %s", batch.num_rows - len(found), what)
            yield from found
