"""Rows that are read from Postgres, against what Debezium's stream of the same rows becomes."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog import formats
from changelog.changes import Changes
from changelog.decoding import ChangelogDecoder
from changelog.formats.database_rows import NAME
from changelog.rows import BAD, RowKind
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values import convert
from changelog.values.readings import BINARIES, DECIMALS, TIME_UNITS
from sink.config import Config, DatabaseSection
from sink.databases.rows import TableRows
from sink.errors import ConfigError, TemporaryError
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.spark.versions import to_arrow
from sink.table.table_plan import TablePlan
from tests.changelog.messages import Message, raw_records, sql
from tests.stack.connect import Connect, json_converter, postgres_connector
from tests.stack.kafka import Kafka
from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import running, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


COLUMNS = {
    "i2": "smallint", "i4": "int", "i8": "bigint", "o": "oid", "f4": "real", "f8": "double precision",
    "n_un": "numeric", "n_12_2": "numeric(12,2)", "n_38_0": "numeric(38,0)", "n_50_5": "numeric(50,5)",
    "cents": "cents", "mny": "money", "b": "boolean", "c": "char(5)", "vc": "varchar(20)", "t": "text", "by": "bytea",
    "d": "date", "tm0": "time(0)", "tm3": "time(3)", "tm6": "time(6)", "tmtz": "timetz", "ts0": "timestamp(0)",
    "ts3": "timestamp(3)", "ts": "timestamp", "tstz0": "timestamptz(0)", "tstz3": "timestamptz(3)",
    "tstz": "timestamptz", "iv": "interval", "u": "uuid", "js": "json", "jb": "jsonb", "x": "xml", "m": "mood",
    "hs": "hstore", "ct": "citext", "lt": "ltree", "ip": "inet", "cd": "cidr", "mac": "macaddr", "bit1": "bit(1)",
    "bit4": "bit(4)", "bit12": "bit(12)", "vbit": "varbit(20)", "vb": "varbit", "pt": "point", "r4": "int4range",
    "rn": "numrange", "rts": "tsrange", "rtz": "tstzrange", "rd": "daterange", "tv": "tsvector",
    "ia": "int[]", "i8a": "bigint[]", "ta": "text[]", "ca": "char(3)[]", "na": "numeric(10,2)[]", "nua": "numeric[]",
    "fa": "float8[]", "f4a": "real[]", "ba": "boolean[]", "bya": "bytea[]", "ua": "uuid[]", "da": "date[]",
    "tsa": "timestamp[]", "ts3a": "timestamp(3)[]", "tza": "timestamptz[]", "tma": "time[]", "ma": "mood[]",
    "jba": "jsonb[]", "ipa": "inet[]", "vca": "varchar(5)[]",
}  # fmt: skip
"""Column -> its type in Postgres."""
TYPES = r"""
CREATE EXTENSION IF NOT EXISTS hstore;
CREATE EXTENSION IF NOT EXISTS citext;
CREATE EXTENSION IF NOT EXISTS ltree;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN cents AS numeric(8,2);
"""
ROWS = r"""
INSERT INTO edge VALUES (1, -32768, -2147483648, -9223372036854775808, 4294967295, 0.1, 0.1, 12345.678901234567890123,
  1.10, 99999999999999999999999999999999999999, 123456789012345678901234567890123456789012345.12345, 1.25, '12.34',
  true, 'ab', 'vc ', E'zoë 😀 ''"\\n\t', '\xdeadbeef', '2026-11-21', '23:59:59', '23:59:59.123', '23:59:59.123456',
  '10:11:12.5+02', '2026-11-21 01:02:03', '2026-11-21 01:02:03.123', '2026-11-21 01:02:03.123456',
  '2026-11-21 01:02:03+05', '2026-11-21 01:02:03.1+05', '2026-11-21 01:02:03.123456+05',
  '1 year 2 mons 3 days 04:05:06.7', '11111111-2222-3333-4444-555555555555', '{"a": 1.50,  "b":[1,2]}',
  '{"a": 1.50,  "b":[1,2]}', '<a>1</a>', 'ok', 'a=>1,b=>NULL,"c\"d"=>"x y"', 'CiText', 'Top.Science', '10.0.0.1/24',
  '10.0.0.0/24', '08:00:2b:01:02:03', '1', '1010', '101000000001', '10101', '101010101', '(1.5,2)', '[1,10)',
  '[1.5,2.5]', '[2026-01-01,2026-01-02)', '[2026-01-01 00:00+00,2026-01-02 00:00+00)', '[2026-01-01,2026-01-03)',
  'a fat cat'::tsvector, '{1,NULL,3}', '{9007199254740993}', '{"a",NULL,"b,c","\"q\""}', '{a,b}', '{1.10,2.20,NULL}',
  '{1.1,22.333}', '{0.1,NaN,1e300}', '{0.1,1e10}', '{t,f,NULL}', '{"\\xdead","\\x"}',
  '{11111111-2222-3333-4444-555555555555}', '{2026-01-01,NULL}', '{"2026-01-01 01:02:03.5"}',
  '{"2026-01-01 01:02:03.5"}', '{"2026-01-01 00:00:00+00"}', '{10:11:12}', '{ok,sad}', '{"{\"a\": 1}"}', '{10.0.0.1}',
  '{ab,c}');
INSERT INTO edge (id) VALUES (2);
INSERT INTO edge (id, f4, f8, n_un, n_12_2, d, ts0, ts3, ts, tstz, tstz3, tm6, tmtz, iv, c, vc, t, by, mny, bit4, bit12,
  vbit, vb, js, jb, hs, ia, ta, bya) VALUES (3, 'NaN', 'NaN', 'NaN', 'NaN', 'infinity', 'infinity', 'infinity',
  'infinity', 'infinity', 'infinity', '24:00:00', '24:00:00+00', '-1 year -2 mons +3 days -04:05:06.789', '', '', '',
  '', '-92233720368547758.08', '0000', '000000000001', '', '', 'null', 'null', '', '{}', '{}', '{}');
INSERT INTO edge (id, f4, f8, n_un, d, ts3, ts, tstz, tstz3, iv, vbit, vb) VALUES (4, '-Infinity', '-Infinity', 0.00,
  '-infinity', '-infinity', '-infinity', '-infinity', '-infinity', '100 years 20000:00:54.775807', '00000001',
  '0000000000000001');
INSERT INTO edge (id, f4, f8, n_un, n_12_2, d, ts3, ts, tstz, tstz3, tm0, tm3, tm6, tmtz, iv) VALUES (5, 3.4e38,
  1.7e308, 1e100, -9999999999.99, '4713-01-01 BC', '0044-03-15 00:00:00.123 BC', '4713-01-01 00:00:00 BC',
  '0044-03-15 00:00:00 BC', '10000-01-01 00:00:00.5+00', '00:00:00', '00:00:00.001', '00:00:00.000001',
  '00:00:00+15:59', '00:00:00.000001');
INSERT INTO edge (id, f4, f8, n_un, n_12_2, d, ts3, ts, tstz, tstz3, tmtz, iv) VALUES
  (6, 1e-30, 4e-300, -0.100, 0.00, '9999-12-31', '1969-12-31 23:59:59.999', '9999-12-31 23:59:59.999999',
   '9999-12-31 23:59:59.999999+00', '0001-01-01 00:00:00+00', '23:59:59.999999-15:59', '5.1 seconds'),
  (7, 1e10, 1e7, 1.5e-10, 0.01, '0001-01-01', '0001-01-01', '1582-10-10', '1582-10-10 00:00:00+00',
   '1969-12-31 23:59:59.999+00', '00:00:00Z', '-00:00:00.000001'),
  (8, 0.001, 0.0001, 100, 1, '5874897-12-31', '9999-12-31 23:59:59.999', '9999-12-31 23:59:59.999999',
   '9999-12-31 23:59:59.999999+00', '2026-01-01', '12:00:00.123+00', '1 mon');
INSERT INTO edge (id, n_un) VALUES (9, 'infinity'), (10, '-infinity');
"""

CONNECTORS: Mapping[str, Mapping[str, str]] = {
    "usual": {},
    "texts": {
        "decimal.handling.mode": "string",
        "time.precision.mode": "connect",
        "binary.handling.mode": "hex",
        "interval.handling.mode": "string",
    },
    "iso": {
        "decimal.handling.mode": "double",
        "time.precision.mode": "isostring",
        "binary.handling.mode": "base64-url-safe",
        "interval.handling.mode": "string",
    },
}
"""Name -> the connector's settings of how it spells values."""
OTHER_TYPES = [
    *("string", "bigint", "int", "double", "float", "decimal(38,10)", "date", "timestamp", "timestamp_ntz", "boolean"),
    *("uuid", "map<string,string>"),
]
"""Types that a column of the table may have too, whatever its values are."""

ENDLESS_OR_OLD = (3, 4, 5, 8)
NOT_THE_SAME: Mapping[tuple[str, str, str], Sequence[int]] = {
    # of messages without `interval.handling.mode: string`; nothing else says it
    ("usual", "string", "iv"): (1, 3, 4, 5, 6, 7, 8),
    **{("texts", name, "iv"): (1, 3, 4, 5, 6, 7, 8) for name in OTHER_TYPES if name != "string"},
    **{("iso", name, "iv"): (1, 3, 4, 5, 6, 7, 8) for name in OTHER_TYPES if name != "string"},
    # numbers of arrays in a text column: equal as JSON, or as numbers
    **{(mode, "string", name): (1,) for mode in CONNECTORS for name in ("na", "nua", "fa", "f4a")},
    # Java's texts of what is infinite, and of years before 1 and after 9999
    **{("iso", dtype, name): ENDLESS_OR_OLD for dtype in OTHER_TYPES for name in ("d", "ts0", "ts3", "ts")},
    # objects and empty arrays whose fields nobody wants as a map
    **{(mode, "map<string,string>", name): (1, 3, 4, 5, 6, 7, 8) for mode in CONNECTORS
       for name in ("n_un", "pt", "ia", "ta", "bya")},
    # bytes of a number, 16 by chance
    ("usual", "uuid", "n_38_0"): (1,),
}  # fmt: skip
"""Connector, type and column -> rows whose values may differ."""


def test_rows_are_what_the_stream_makes_of_them(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres
) -> None:
    """Each type in each type of column, with three ways of spelling values; then all rows as changelog rows."""
    postgres.execute(TYPES)
    columns = ", ".join(f"{name} {dtype}" for name, dtype in COLUMNS.items())
    # the log has no generated columns
    postgres.execute(f"CREATE TABLE edge (id int PRIMARY KEY, {columns}, g int GENERATED ALWAYS AS (id * 2) STORED)")
    postgres.execute(ROWS)
    # no option repeats interval.handling.mode
    edge = Edge(postgres, "public", COLUMNS, "UPDATE edge SET i2 = i2", range(1, 11), {"iv": "bigint"})

    def connector(name: str) -> dict[str, str]:
        return postgres_connector(postgres, name, r"public\.edge")

    usual = check_each_type(spark, kafka, edge, CONNECTORS, connector, NOT_THE_SAME)
    check_changelog_rows(spark, edge, usual)
    check_a_table_that_is_altered(spark, postgres, edge)


@dataclass(frozen=True)
class Edge:
    """A table `edge` in a database.

    :param schema: its schema, or MySQL's database.
    :param touch: updates all rows.
    :param ids: of its rows.
    :param types: column -> its natural type, where no option repeats the connector's setting.
    """

    database: Postgres | MySQL
    schema: str
    columns: Mapping[str, str]
    touch: str
    ids: Collection[int]
    types: Mapping[str, str]

    @property
    def table(self) -> str:
        return f"{self.schema}.edge"

    @property
    def section(self) -> DatabaseSection:
        database = self.database
        return DatabaseSection(url=database.jdbc_url, user=database.user, password=database.password)


def streamed(edge: Edge, kafka: Kafka, prefix: str) -> pa.RecordBatch:
    """Messages of updates that change nothing: the snapshot's have old dates by another calendar."""
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": prefix, "auto.offset.reset": "earliest"}
    )
    topic, count = f"{prefix}.{edge.table}", len(edge.ids)
    found: list[Message] = []

    def has_all() -> bool:
        edge.database.execute(edge.touch)
        for message in consumer.consume(100, 0.5):
            value, offset = message.value(), message.offset()
            if message.error() is None and value is not None and json.loads(value)["payload"]["op"] == "u":
                key = json.loads(message.key() or b"null")
                found.append(Message(value.decode(), offset or 0, key, message.partition() or 0, topic))
        return len({str(message.key) for message in found}) == count

    try:
        consumer.subscribe([topic])
        assert wait_until(has_all, 120), f"{prefix}: {len(found)} updates"
    finally:
        consumer.close()
    return raw_records(found)


def configuration(edge: Edge, options: Mapping[str, str]) -> Config:
    return Config.model_validate(
        {
            "sink": {"id": "edge", "checkpoint": "/nowhere"},
            "source": {"type": "kafka", "format": "debezium-json", "format_options": dict(options),
                       "options": {"kafka.bootstrap.servers": "nowhere:9092"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "/nowhere"}},
            "tables": [{"source": f"usual.{edge.table}", "target": "lake.n.edge", "order_by": ["source.lsn"]}],
        }
    )  # fmt: skip


def spec_of(types: Mapping[str, str], options: Mapping[str, str], **more: Any) -> ChangelogSpec:
    def column(name: str, dtype: str) -> ColumnSpec:
        return ColumnSpec(name, T.StringType() if dtype == "uuid" else sql(dtype), is_uuid=dtype == "uuid")

    columns = (ColumnSpec("id", T.IntegerType()), *(column(name, dtype) for name, dtype in types.items()))
    return ChangelogSpec(columns, ("id",), options=dict(options), **more)


def rows_of(config: Config, edge: Edge, spark: SparkSession) -> TableRows:
    return TableRows(spark, config, edge.section, edge.table, config.tables[0])


def plan_of(config: Config, spec: ChangelogSpec) -> TablePlan:
    return TablePlan(config.tables[0], spec, True, (*spec.columns, *map(metadata, spec.metadata)))


def metadata(name: str) -> ColumnSpec:
    return ColumnSpec(name, T.StringType())


def natural_types(config: Config, edge: Edge, stream: pa.RecordBatch, spark: SparkSession) -> dict[str, str]:
    """The types that the columns get, which stream and database say alike."""
    options: Any = config.source.format_options
    spec = spec_of({}, options, schema_changes="evolve", excluded=frozenset(["touched"]))
    observed: dict[str, str] = {}
    list(ChangelogDecoder("debezium-json", spec, observed.update)([stream]))
    with closing(rows_of(config, edge, spark)) as rows:
        assert rows.unknown(spec) == {**observed, **edge.types}
    assert set(observed) == set(edge.columns)
    return observed


def check_each_type(
    spark: SparkSession,
    kafka: Kafka,
    edge: Edge,
    connectors: Mapping[str, Mapping[str, str]],
    connector: Callable[[str], dict[str, str]],
    not_the_same: Mapping[tuple[str, str, str], Collection[int]],
) -> pa.RecordBatch:
    """Each type of the database in each type of column, with several ways of spelling values.

    :param connectors: name -> settings of how it spells values.
    :param connector: name -> its other settings.
    :return: the messages of the first one.
    """
    with running(lambda folder: Connect(folder, kafka), "connect") as connect:
        for name, settings in connectors.items():
            kafka.create_topic(f"{name}.{edge.table}")
            connect.put(name, {**connector(name), **json_converter(schemas=True), **settings})
        received = {name: streamed(edge, kafka, name) for name in connectors}
    for name, settings in connectors.items():
        options = {key: value for key, value in settings.items() if key in (DECIMALS, TIME_UNITS, BINARIES)}
        config = configuration(edge, options)
        types = natural_types(config, edge, received[name], spark)
        # JSON that isn't an array of one type is read in another way, with all arrays of the message
        arrays = [{column: "array<string>"} for column, dtype in types.items() if dtype.startswith("array")]
        for wanted in [types, *(dict.fromkeys(types, other) for other in OTHER_TYPES), *arrays]:
            spec = spec_of(wanted, options)
            differing = {
                (name, wanted[column] if wanted is not types else "", column): rows
                for column, rows in differences(config, edge, spec, received[name], spark).items()
            }
            assert {w: rows for w, rows in differing.items() if not {*rows} <= {*not_the_same.get(w, ())}} == {}
    return next(iter(received.values()))


def differences(
    config: Config, edge: Edge, spec: ChangelogSpec, stream: pa.RecordBatch, spark: SparkSession
) -> dict[str, list[int]]:
    """Column -> ids of the rows whose values aren't the same."""
    with closing(rows_of(config, edge, spark)) as rows:
        frame, parts = rows.reading(spec, rows.of(["1 = 1"], {}))
        read = list(parts.records(to_arrow(frame).to_batches()))
    sides = converted("debezium-json", spec, [stream]), converted(NAME, parts.decoder.spec, read)
    assert set(sides[0]["id"]) == set(sides[1]["id"]) == set(edge.ids)
    found = {name: [row for row, value in sides[0][name].items() if value != sides[1][name][row]] for name in sides[0]}
    return {name: rows for name, rows in found.items() if rows}


def converted(name: str, spec: ChangelogSpec, records: Sequence[pa.RecordBatch]) -> dict[str, dict[int, str]]:
    """Column -> id -> what the table has, as a text."""
    read, found = formats.find(name)(spec), dict[str, dict[int, str]]()
    for changes in (change for batch in records for change in read.changes(batch)):
        if not isinstance(changes, Changes) or not len(changes.record):
            continue
        if changes.kind[0].as_py() not in (RowKind.INSERT, RowKind.UPDATE_AFTER):
            continue
        ids = changes.fields["id"].values.to_pylist()
        for column in spec.columns:
            target = pa.binary() if column.is_uuid else to_arrow_type(column.type)
            values, misfit = convert(changes.fields[column.field], target, column.is_uuid)
            texts = map(repr, without_times(values).to_pylist())
            unfit = [False] * len(ids) if misfit is None else misfit.to_pylist()
            found.setdefault(column.name, {}).update(
                (row, "misfit" if bad else text) for row, text, bad in zip(ids, texts, unfit, strict=True)
            )
    return found


def without_times(values: pa.Array) -> pa.Array:
    """Python has fewer dates and times than Arrow."""
    if not pa.types.is_temporal(values.type):
        return values
    return values.cast(pa.int32() if pa.types.is_date(values.type) else pa.int64())


def check_changelog_rows(spark: SparkSession, edge: Edge, stream: pa.RecordBatch) -> None:
    """Read by Spark's tasks, in two parts. What makes a bad record of a message makes one of the row."""
    config, section = configuration(edge, {}), edge.section
    types = natural_types(config, edge, stream, spark)
    spec = spec_of(types, {}, order_by=(("source.lsn", T.LongType()),), metadata=("_op", "_source"))
    expected = pa.Table.from_batches(ChangelogDecoder("debezium-json", spec)([stream]))
    rows = rows_of(config, edge, spark)
    try:
        frame = rows.of(["id < 6", "id >= 6"], {"source.lsn": 77}).changes(plan_of(config, spec))
        plan = frame._jdf.queryExecution().toString()
        assert section.password is not None
        assert section.password not in plan
        assert "id < 6" not in plan, "a condition has values of rows"
        found = to_arrow(frame)
    finally:
        rows.close()

    def good(table: pa.Table) -> dict[str, dict[str, str]]:
        names = ["id", *types]
        rows = table.filter(table.column(BAD).is_null())
        # Spark gives times inside of arrays a zone
        columns = [
            [repr(value).replace(", tzinfo=zoneinfo.ZoneInfo(key='UTC')", "") for value in values.to_pylist()]
            for values in (without_times(rows.column(name).combine_chunks()) for name in names)
        ]
        return {row[0]: dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)}

    def bad(table: pa.Table) -> dict[int, str]:
        letters = table.column(BAD).drop_null().to_pylist()
        keys = [json.loads(letter["key"]) if letter["key"] else json.loads(letter["value"]) for letter in letters]
        ids = [key.get("payload", key)["id"] for key in keys]
        return dict(zip(ids, (letter["error_class"] for letter in letters), strict=True))

    for name in ("headers.seq", "source.sequence"):
        other = replace(spec, order_by=((name, T.LongType()),))
        refused = pytest.raises(ConfigError, match=f"order_by has {name}, which public.edge of jdbc:")
        with closing(rows_of(config, edge, spark)) as others, refused:
            others.of(["true"], {"source.lsn": 77}).changes(plan_of(config, other))
    assert good(found) == good(expected)
    assert bad(found) == bad(expected)
    assert set(bad(found)) == {3, 4}, "what is infinite"
    fine = found.filter(found.column(BAD).is_null())
    assert set(fine.column("_op").to_pylist()) == {"r"}
    assert set(fine.column("_source").to_pylist()) == {"usual.public.edge"}
    assert set(fine.column("_rowdelta_order_0").to_pylist()) == {77}


def check_a_table_that_is_altered(spark: SparkSession, postgres: Postgres, edge: Edge) -> None:
    """A task's failure means the same as the driver's own."""
    spec = spec_of({"t": "string", "n_12_2": "decimal(12,2)"}, {})
    config = configuration(edge, {})
    with closing(rows_of(config, edge, spark)) as rows:
        for statement, kind, text in (
            ("ALTER TABLE edge ALTER COLUMN n_12_2 TYPE text USING 'x'", TemporaryError, "have other types now"),
            ("ALTER TABLE edge RENAME COLUMN t TO other", ConfigError, 'column "t" does not exist. Is the table there'),
        ):
            postgres.execute(statement)
            with pytest.raises(JOB_ERRORS) as raised:
                rows.of(["id = 1"], {}).changes(plan_of(config, spec)).collect()
            error = job_error("lake.n.edge", raised.value)
            assert isinstance(error, kind)
            assert text in str(error)
