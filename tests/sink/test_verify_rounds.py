"""What `rowdelta verify` makes of single values, and of what changes meanwhile, without servers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.rows import BAD, TRUNCATE, UNAVAILABLE, BadRecord
from sink import cli
from sink.commands import verify as command
from sink.commands.verify import as_json, exit_code, lines
from sink.config import DatabaseSection
from sink.databases.conversion import Kind, Selected, conversion
from sink.databases.database import connection_properties
from sink.databases.reading import Delivered, Keys, Newest, SourceRows
from sink.errors import ConfigError, TemporaryError
from sink.spark import session
from sink.spark.versions import parse_ddl
from sink.targets.catalogs import Catalogs
from sink.verify import rounds
from sink.verify.canonical import comparable
from sink.verify.rounds import Outcome, Patience, Rounds, _canonical
from sink.verify.topic import TopicChanges
from tests.sink.harness import Job

pytestmark = pytest.mark.spark


def test_a_partial_row_is_a_change_and_a_truncate_concerns_all_keys(spark: SparkSession) -> None:
    def changes(*classes: str | None) -> DataFrame:
        rows = [
            (n, None if name is None else (name,), b"\x80" if name == BadRecord.ROW_ABSENT else None)
            for n, name in enumerate(classes)
        ]
        return spark.createDataFrame(rows, f"id int, {BAD} struct<error_class: string>, {UNAVAILABLE} binary")

    found = TopicChanges.of(changes(None, BadRecord.ROW_ABSENT, BadRecord.NULL_KEY))
    assert ([row.id for row in found.rows.collect()], found.empties) == ([0, 1], False)
    assert TopicChanges.of(changes(None, TRUNCATE)).empties


VALUES: list[tuple[Kind | str, str, str, bool]] = [
    # kind or Spark type, value in SQL, the table's type, whether it fits
    (Kind.DOUBLE, "0.1D", "float", False),
    (Kind.DOUBLE, "0.5D", "float", True),
    (Kind.DOUBLE, "double('NaN')", "float", True),
    (Kind.DECIMAL, "'0.10'", "double", True),
    (Kind.DECIMAL, "'12.340000000000000000'", "double", True),
    (Kind.DECIMAL, "'0.12345678901234567890'", "double", False),
    (Kind.DECIMAL, "'16777217'", "float", False),
    (Kind.DECIMAL, "'1000000000000000000000000000000000000000'", "float", False),
    (Kind.DECIMAL, "'Infinity'", "double", True),
    (Kind.INTEGER, "9007199254740993L", "double", False),
    (Kind.INTEGER, "9007199254740992L", "double", True),
    (Kind.INTEGER, "4611686018427387904L", "float", True),
    (Kind.INTEGER, "9223372036854775807L", "double", False),
    ("bigint", "9223372036854775807L", "double", False),
    ("bigint", "16777217L", "float", False),
    ("bigint", "7L", "float", True),
    ("decimal(20,2)", "cast('123456789.01' as decimal(20,2))", "float", False),
    ("decimal(20,2)", "cast('0.00' as decimal(20,2))", "double", True),
    ("double", "0.1D", "float", False),
    ("double", "1e300D", "decimal(10,2)", False),
    ("timestamp", "timestamp'2026-01-01 00:00:01'", "date", False),
    ("timestamp", "timestamp'2026-01-01 00:00:00'", "date", True),
    ("timestamp_ntz", "timestamp_ntz'2026-01-01 00:00:01'", "date", False),
]


def test_a_value_that_the_column_cannot_hold_does_not_fit(spark: SparkSession) -> None:
    columns, expected = [], []
    for number, (kind, sql, dtype, fits) in enumerate(VALUES):
        selected = Selected("", kind) if isinstance(kind, Kind) else Selected("", Kind.SPARK, dtype=parse_ddl(kind))
        made = conversion(selected, parse_ddl(dtype))
        assert made is not None
        columns.append(made.source(F.expr(sql)).isNotNull().alias(f"c{number}"))
        expected.append(fits)
        assert made.may_misfit
    (row,) = spark.range(1).select(*columns).collect()
    assert [value for value, found, wanted in zip(VALUES, row, expected, strict=True) if found != wanted] == []


@pytest.mark.parametrize(("kind", "is_lost"), [(Kind.DECIMAL, False), (Kind.TEXT, True)])
@pytest.mark.parametrize("text", ["NaN", "NAN"])
def test_a_numeric_that_is_no_number_is_null(spark: SparkSession, kind: Kind, text: str, is_lost: bool) -> None:
    """Debezium sends null for it. A text that is no number is none of the column's values."""
    dtype = parse_ddl("decimal(12,2)")
    made = conversion(Selected("", kind), dtype)
    assert made is not None
    raw = F.lit(text)
    columns = _canonical(0, raw, made.source(raw), dtype, made.may_misfit, made.as_null)
    (row,) = spark.range(1).select(*columns).collect()
    assert row[0] is None
    assert row[1] == (text if is_lost else None)


SPELLED = [
    # kind, the source's value in SQL, the table's type and its value in SQL: as Debezium's messages have them
    (Kind.DECIMAL, "'1.10'", "string", "'1.1'"),  # without a scale, a numeric comes without zeros at its end
    (Kind.DECIMAL, "'0.00'", "string", "'0'"),
    (Kind.DECIMAL, "'-1200.50'", "string", "'-1200.50'"),
    (Kind.DECIMAL, "'100'", "string", "'100'"),
    (Kind.SHORT_BITS, "'0000'", "binary", "x''"),  # and bits of Postgres come without highest bytes of 0
    (Kind.SHORT_BITS, "'000000000001'", "binary", "x'01'"),
    (Kind.SHORT_BITS, "'101000000000'", "binary", "x'000a'"),
    (Kind.BITS, "'000000000001'", "binary", "x'0100'"),  # those of MySQL with all of them
]


def test_values_are_equal_as_messages_spell_them(spark: SparkSession) -> None:
    columns = list[Column]()
    for kind, source, dtype, table in SPELLED:
        made = conversion(Selected("", kind), parse_ddl(dtype))
        assert made is not None
        columns.append((made.source(F.expr(source)) == made.table(F.expr(table))).alias(f"c{len(columns)}"))
    (row,) = spark.range(1).select(*columns).collect()
    assert [case for case, is_equal in zip(SPELLED, row, strict=True) if not is_equal] == []


INTS, TEXTS, NUMERICS, DAYS = (
    Selected("", Kind.ARRAY, element=Selected("", kind)) for kind in (Kind.INTEGER, Kind.TEXT, Kind.DECIMAL, Kind.DATE)
)
MAP = T.MapType(T.StringType(), T.DecimalType(5, 2))
ROW = T.StructType([T.StructField("a", T.IntegerType()), T.StructField("b", MAP)])
ROWS = Selected("", Kind.SPARK, dtype=T.ArrayType(ROW))


@pytest.mark.parametrize(
    ("selected", "source", "table", "is_equal"),
    [
        (INTS, """'["1", null, "3"]'""", "[1,null, 3]", True),
        (INTS, """'["1", "3"]'""", "[1,null,3]", False),
        (TEXTS, r"""'["a, b", "c\\"d", ""]'""", r'[ "a, b","c\"d",""]', True),
        (TEXTS, """'["a"]'""", '["A"]', False),
        (TEXTS, """'[]'""", "[]", True),
        (TEXTS, """'[]'""", "no array", False),
        (TEXTS, "cast(null AS string)", "[]", False),
        (NUMERICS, """'["1.50"]'""", "[1.50]", True),
        (NUMERICS, """'["12345678901234567890.10", "-0.05", null]'""", "[12345678901234567890.10, -0.05,null]", True),
        (DAYS, """'["20778"]'""", '["2026-11-21"]', True),
        (
            ROWS,
            "array(named_struct('a', 1, 'b', map('x', cast(1.5 AS decimal(5,2)))))",
            '[{"b":{"x":1.50},"a":1}]',
            True,
        ),
        (
            ROWS,
            "array(named_struct('a', 1, 'b', map('x', cast(1.5 AS decimal(5,2)))))",
            '[{"b":{"x":1.51},"a":1}]',
            False,
        ),
    ],
)
def test_an_array_in_a_text_column_is_compared_as_json(
    spark: SparkSession, selected: Selected, source: str, table: str, is_equal: bool
) -> None:
    """The table has the messages' text, whose blanks and spelling of numbers say nothing."""
    made = conversion(selected, T.StringType())
    assert made is not None
    raw, text = F.expr(source), F.lit(table)
    sides = [
        _canonical(0, raw, made.source(raw), made.dtype, True),
        _canonical(0, text, made.table(text), made.dtype, True),
    ]
    one, other = (spark.range(1).select(*columns).collect()[0] for columns in sides)
    assert (tuple(one) == tuple(other)) == is_equal


def test_the_order_in_a_map_does_not_count_wherever_the_map_is(spark: SparkSession) -> None:
    inner = "map('a', map(1, 2, 3, 4), 'b', null)"
    other = "map('b', null, 'a', map(3, 4, 1, 2))"
    column = "{0} AS m, array({0}, null) AS a, named_struct('x', {0}, 'y', array(named_struct('z', {0}))) AS s"
    column += ", if(id < 0, named_struct('x', {0}), null) AS n"
    texts = []
    for value in (inner, other):
        frame = spark.sql(f"SELECT {column.format(value)} FROM range(1)")
        texts.append(frame.select(*(comparable(F.col(f.name), f.dataType)[0] for f in frame.schema)).collect()[0])
    assert tuple(texts[0]) == tuple(texts[1])
    assert texts[0][3] is None
    assert '"key":"a"' in texts[0][2]


def test_a_driver_does_not_wait_for_a_silent_server_without_end() -> None:
    def properties(url: str) -> Mapping[str, str]:
        return connection_properties(DatabaseSection.model_validate({"url": url, "user": "u", "password": "p"}))

    account = {"user": "u", "password": "p"}
    postgres, mariadb = properties("jdbc:postgresql://db/shop"), properties("jdbc:mariadb://db/shop?sockettimeout=5")
    assert postgres == account | {"socketTimeout": "3600", "tcpKeepAlive": "true"}
    assert mariadb == account | {"tcpKeepAlive": "true"}
    assert properties("jdbc:mysql://db/shop")["socketTimeout"] == "3600000"


class Scripted:
    """A source, and the topic between it and the table: in each round the next keys change.

    :param rounds: for each round, the keys in the topic; None is a TRUNCATE.
    """

    name = "the source"
    is_live = True

    def __init__(self, frame: DataFrame, rounds: list[list[int] | None]) -> None:
        self.frame = frame
        self.rounds = rounds
        self.keys: list[Keys | None] = []

    @property
    def group(self) -> str:
        """Of the jobs of the last round."""
        return f"{id(self)}, round {len(self.keys)}"

    def columns(self) -> Mapping[str, Selected]:
        return {"id": Selected("", Kind.TEXT, key_text=".*"), "region": Selected("", Kind.TEXT)}

    def unknown(self) -> Mapping[str, str]:
        return {}

    @contextmanager
    def reading(self, columns: list[str], keys: Keys | None) -> Iterator[SourceRows]:
        self.keys.append(keys)
        self.frame.sparkSession.sparkContext.setJobGroup(self.group, "")
        yield SourceRows(self.frame.select(*columns), f"LSN {len(self.keys)}")

    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        return Delivered.YES, ""

    def since_now(self) -> Newest:
        return lambda fields: []

    def ends(self) -> Mapping[str, int]:
        return {}

    def left(self, *_: object) -> int:
        return 0

    def changes(self, *_: object) -> TopicChanges:
        keys = self.rounds.pop(0) if self.rounds else []
        rows = self.frame.sparkSession.createDataFrame([(key,) for key in keys or []], "id bigint")
        return TopicChanges(rows, keys is None)


@pytest.fixture(scope="module")
def job(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A table with the keys 1 and 2."""
    made = Job(spark, tmp_path_factory.mktemp("rounds"))
    made.write([("+I", {"id": n, "region": "eu"}) for n in (1, 2)])
    made.run()
    return made


def compared(job: Job, rows: list[tuple[str, str]], script: list[list[int] | None]) -> tuple[Outcome, Scripted]:
    config = job.config()
    target = Catalogs(job.spark, config).load(job.target)
    assert target is not None
    source = Scripted(job.spark.createDataFrame(rows, "id string, region string"), script)
    found = Rounds(job.plan(), target, cast(Any, source), cast(Any, source), "p.", Patience(0, 30), 20)
    return found.run(), source


EQUAL = [("1", "eu"), ("2", "eu")]


def test_a_verdict_says_what_was_compared(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_ROUNDS", 2)

    def told(rows: list[tuple[str, str]], script: list[list[int] | None]) -> tuple[str, int, list[str]]:
        outcome, _ = compared(job, rows, script)
        first, _, *others = lines(outcome)
        assert json.loads(as_json(outcome))["equal"] is (outcome.exit_code == 0)
        return first.partition("source: ")[2], outcome.exit_code, others

    again = "compare again when traffic is lower"
    assert told(EQUAL, [[]]) == ("EQUAL", 0, [])
    assert told(EQUAL, [[1], []]) == ("EQUAL", 0, [])
    all_time = "  changed all the time: {} not compared"
    assert told(EQUAL, [[1]] * 2) == ("EQUAL in what was compared", 0, [all_time.format("1 key")])
    never = f"NOT COMPARED, all keys changed all the time; {again}"
    assert told(EQUAL, [[1, 2]] * 2) == (never, 75, [all_time.format("2 keys")])
    other = [("1", "eu"), ("2", "us")]
    assert told(other, [[2], []]) == (
        f"UNCERTAIN, {again}",
        75,
        ["  differed in the last round, and may be equal by now: 1 key"],
    )
    assert told(other, [[]])[:2] == ("DIFFERENT in 1 key", 1)


def test_a_round_with_a_truncate_tells_no_differences(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = compared(job, EQUAL[:1], [[], None, [2]])
    assert (outcome.different, outcome.rounds) == (1, 4)
    monkeypatch.setattr(rounds, "_ROUNDS", 2)
    outcome, _ = compared(job, EQUAL, [None, []])
    assert (outcome.verdict, outcome.rounds, outcome.position) == ("equal", 2, "LSN 2")
    outcome, _ = compared(job, EQUAL, [None] * 2)
    assert (outcome.verdict, outcome.exit_code) == ("not compared", 75)


def test_texts_are_not_looked_up_by_the_numbers_that_the_table_has(job: Job) -> None:
    outcome, source = compared(job, [("007", "eu"), ("01", "eu"), ("2", "eu")], [[1], []])
    assert source.keys == [None, None]
    assert (outcome.different, outcome.rounds) == (1, 2)


def test_few_keys_are_compared_again_without_a_shuffle_of_all_rows(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    job.write([("+I", {"id": 0, "region": "eu"})])
    job.run()
    spark.sql(f"INSERT INTO {job.target} (id, region) SELECT id, 'eu' FROM range(1, 20000)")
    rows = [(str(n), "us" if n % 5_000 == 7 else "eu") for n in range(20_000)]
    outcome, source = compared(job, rows, [[3], []])
    assert (outcome.different, outcome.rounds) == (4, 2)
    tracker, store = spark.sparkContext.statusTracker(), cast(Any, spark.sparkContext)._jsc.sc().statusStore()
    infos = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(source.group)]
    stages = {stage for info in infos if info is not None for stage in info.stageIds}
    shuffled = sum(store.lastStageAttempt(stage).shuffleWriteRecords() for stage in stages)
    assert 4 <= shuffled < 100


def test_all_tables_are_compared_and_what_is_printed_is_escaped(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(spark, tmp_path, table={"verify": {"spark_table": "x"}})
    values = job.config_values()
    other = {"source": f"{job.changes_folder}_2", "target": f"{job.target}_2"}
    values["tables"].append({**values["tables"][0], **other})
    config = tmp_path / "sink.yaml"
    config.write_text(yaml.safe_dump(values))
    found: list[Outcome | Exception] = []

    def one(*_: object) -> Outcome:
        outcome = found.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(command, "_verify", one)
    monkeypatch.setattr(session, "start", lambda *_, **__: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)
    differs, equal = Outcome("a", "s\n  id=1: evil\x1b[2J\u202e", different=1), Outcome("b", "s", compared=True)

    def run(*outcomes: Outcome | Exception, options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        found.extend(outcomes)
        return cli.main(["verify", str(config), *options]), capsys.readouterr().out.splitlines()

    assert run(TemporaryError("no answer"), equal) == (
        75,
        [f"{job.target}: NOT COMPARED: no answer", "b against s: EQUAL", "  table at ; 0 and 0 rows, 1 round"],
    )
    code, printed = run(differs, TemporaryError("no\nanswer"))
    assert code == 1
    assert printed[0] == "a against s\\n  id=1: evil\\u001b[2J\\u202e: DIFFERENT in 1 key"
    assert printed[-1] == f"{job.target}_2: NOT COMPARED: no\\nanswer"
    code, printed = run(differs, ConfigError("no"), options=("--json",))
    assert [json.loads(line)["verdict"] for line in printed] == ["different", "not compared"]
    assert printed[0].isascii()
    assert exit_code([Outcome("a", "", error=TemporaryError("")), Outcome("b", "", error=ConfigError(""))]) == 2
    assert exit_code([equal]) == 0
