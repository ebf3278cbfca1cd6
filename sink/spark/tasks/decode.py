"""Tasks that decode raw records, and pass the changes to a further step."""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.accumulators import Accumulator

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder, Stated, decoded_together
from changelog.formats.row_kind_parquet import SOURCE, FileReader, typed_records
from changelog.rows import BLOCK, FILE, ROW
from sink.spark.exchange import LOCAL, Step
from sink.spark.tasks.worker import forget_archives


def decode(decoder: ChangelogDecoder, then: Step | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode a task's raw records, and pass the changes to `then`.

    :param batches: columns of `RAW_SCHEMA`. Columns that the source doesn't have may be left out, and a value may be
        text.
    """
    changes = decoder(numbered(map(_completed, batches)))
    yield from changes if then is None else then(changes)
    forget_archives()


def name_tables(decoder: ChangelogDecoder, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Tell which tables of the source a task's raw records name, in a column `name`.

    :param batches: as for `decode`.
    """
    stated = list[Stated]()

    def names(changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in changes:
            pass
        found = [fact for facts in stated for fact in facts if isinstance(fact, str)]
        yield pa.RecordBatch.from_pydict({"name": pa.array(found, pa.string())})

    yield from decode(replace(decoder, observe_stated=stated.append), names, batches)


def decode_together(
    decoders: Sequence[ChangelogDecoder], steps: Sequence[Step], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Like `decode`, for several tables at once. What their steps yield comes in any order.

    :param steps: what takes the changes of each table. What the others haven't taken yet is kept in memory. So that
        none gets ahead, a step yields something, if only an empty batch, whenever it has taken one.
    """
    made = decoded_together(decoders, map(_completed, batches))
    taken = [0] * len(steps)

    def changes(number: int, decoded: Iterable[list[list[pa.RecordBatch]]]) -> Iterator[pa.RecordBatch]:
        for found in decoded:
            taken[number] += 1
            yield from found[number]

    copies = enumerate(itertools.tee(made, len(steps)))
    running = {number: steps[number](changes(number, copy)) for number, copy in copies}
    while running:
        number = min(running, key=taken.__getitem__)
        batch = next(running[number], None)
        if batch is None:
            del running[number]
        else:
            yield batch
    forget_archives()


def decode_columns(
    decoder: ChangelogDecoder, then: Step | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode rows of Parquet files that Spark has read, and pass the changes to `then`.

    :param batches: the files' columns, `SOURCE`, `FILE` and `ROW`.
    """

    def records() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            source, file, row = (columns.pop(name) for name in (SOURCE, FILE, ROW))
            yield typed_records(columns, source, file, row)

    changes = decoder(records())
    yield from changes if then is None else then(changes)
    forget_archives()


def decode_files(
    decoder: ChangelogDecoder,
    reader: FileReader,
    sources: Mapping[str, str],
    read: Accumulator[list[tuple[str, int]]],
    then: Step,
    files: Iterable[tuple[str, bytes | None]],
) -> Iterator[pa.RecordBatch]:
    """Decode a task's Parquet files, and pass the changes to `then`.

    :param files: paths and contents, see `sink.spark.exchange.WholeFiles`.
    :param sources: by the files' paths how Spark's reader spells them, in the order of files.
    :param read: collects each file's path with the checksum of what was read.
    """
    numbers = {path: number for number, path in enumerate(sources)}

    def records() -> Iterator[pa.RecordBatch]:
        for path, given in files:
            content = Path(path.removeprefix(LOCAL)).read_bytes() if given is None else given
            read.add([(path, zlib.crc32(content))])
            yield from reader(content, sources[path], numbers[path])

    yield from then(decoder(records()))
    forget_archives()


def _completed(records: pa.RecordBatch) -> pa.RecordBatch:
    have = dict(zip(records.schema.names, records.columns, strict=True))
    columns = [
        have[field.name].cast(field.type) if field.name in have else pa.nulls(records.num_rows, field.type)
        for field in RAW_SCHEMA
    ]
    completed = pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)
    for name in have.keys() - {*RAW_SCHEMA.names}:
        completed = completed.append_column(name, have[name])
    return completed


def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give records of text files their `ROW`: the first byte of the part of the file, plus the number in the part. A
    line has at least one byte, so the rows of a later part have higher numbers.
    """
    last, count = None, 0
    for batch in batches:
        if BLOCK not in batch.schema.names or not batch.num_rows:
            yield batch
            continue
        file, block = (batch.column(name).to_numpy().astype(np.int64) for name in (FILE, BLOCK))
        starts = np.flatnonzero(np.r_[True, (np.diff(file) != 0) | (np.diff(block) != 0)])
        number = np.arange(len(file)) - np.repeat(starts, np.diff(np.r_[starts, len(file)]))
        if last == (file[0], block[0]):
            number[: starts[1] if len(starts) > 1 else len(file)] += count
        last, count = (file[-1], block[-1]), int(number[-1]) + 1
        yield batch.append_column(ROW, pa.array(block + number))
