"""The documents' examples of each format are decoded, and their format of one's own is found, configured
and used.
"""

import importlib
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from changelog import formats
from changelog.changes import Changes, Format, Wire
from changelog.formats.avro import Avro
from changelog.rows import RowKind
from sink.config import Config
from sink.table.plan import deletes_carry_row
from tests.changelog import avro_messages, fuzz
from tests.changelog.messages import decode, messages, raw_records, spec

DOCS = Path(__file__).parents[1] / "docs"
FORMATS = (DOCS / "formats.md").read_text(encoding="utf-8")
OWN = (DOCS / "own-formats.md").read_text(encoding="utf-8")
ORDERS = {"id": "bigint", "customer": "string", "amount": "decimal(12,2)"}
ADA = {"id": 7, "customer": "Ada", "amount": Decimal("10.50")}
JSON = [name for name in formats.OURS if "avro" not in name]
AVRO_BODY = "0e 06416461 02 04041a"


def block(text: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no example in {language}"
    return found[1]


def paragraph(name: str) -> str:
    """What the page says of a format."""
    return re.split(r"^\*\*`|^### ", FORMATS.split(f"\n**`{name}`**")[1], flags=re.MULTILINE)[0]


def docstring(name: str) -> str:
    return importlib.import_module(formats.OURS[name].partition(":")[0]).__doc__ or ""


def json_example(text: str) -> Any:
    """The first JSON object in a text, without what `…` stands for."""
    text = text[text.index("    {") :].replace(", …", "")
    return json.JSONDecoder().raw_decode(text.lstrip())[0]


def test_the_page_has_every_format() -> None:
    found = re.findall(r"^\*\*`([\w-]+)`\*\*", FORMATS, re.MULTILINE)
    assert sorted(found) == formats.names()


@pytest.mark.parametrize("name", formats.OURS)
def test_the_page_has_every_option(name: str) -> None:
    for option in formats.find(name).OPTIONS:
        assert f"`{option}`" in FORMATS or option.startswith("schema.registry.") or f"{option}: " in paragraph(name)


@pytest.mark.parametrize("name", JSON)
def test_examples_of_the_page(name: str) -> None:
    (row,) = decode(name, raw_records(messages(block(paragraph(name), "json").strip())), spec(ORDERS))
    assert (row.error, row.row) == (None, ADA)
    assert row.kind == ("+I" if name == "debezium-json" else "+U")


@pytest.mark.parametrize("name", JSON)
def test_examples_of_the_modules(name: str) -> None:
    """As Debezium's, they are of tables of their own: every field that is a column must decode."""
    columns = {
        "debezium-json": ORDERS | {"created_at": "timestamp"},
        "row-kind": ORDERS | {"created_at": "timestamp"},
        "dms-json": {"id": "bigint", "city": "string", "amount": "decimal(12,2)", "created": "timestamp"},
        "ogg-json": {"ID": "bigint", "CITY": "string"},
    }.get(name, {"id": "bigint", "city": "string", "amount": "decimal(12,2)"})
    example = json_example(docstring(name))
    key = "ID" if "ID" in columns else "id"
    found = decode(name, raw_records(messages(example)), spec(columns, key=(key,)))
    assert [row.error for row in found if row.bad] == []
    assert all(value is not None for value in found[-1].row.values())


def test_avro_examples() -> None:
    assert AVRO_BODY in paragraph("avro")
    schema = json_example(docstring("avro"))
    example = re.search(r"00 00000009 ([0-9a-f ]+?)  ", docstring("avro"))
    assert example is not None
    decoder = Avro(avro_messages.spec(["id", "customer", "amount"]), avro_messages.given({9: json.dumps(schema)}))
    bodies = [bytes.fromhex(body) for body in (AVRO_BODY, example[1])]
    found = avro_messages.outcome(decoder, [(None, b"\0\0\0\0\x09" + body) for body in bodies])
    amount = (1050).to_bytes(2, "big")
    assert [row for _, _, row in found.rows] == [
        {"id": 7, "customer": "Ada", "amount": amount},
        {"id": 1, "customer": "ann", "amount": amount},
    ]


def test_the_debezium_avro_example_is_a_real_message() -> None:
    real = (avro_messages.sample("orders")[0][1] or b"").hex()
    for text in (docstring("debezium-avro"), paragraph("debezium-avro")):
        example = re.search(r"00 0000000\d 00 ([0-9a-f ]+) …", text)
        assert example is not None
        assert real[10:].startswith("00" + example[1].replace(" ", ""))


@pytest.fixture(params=["(Format)", ""])
def own_format(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's example as an installed package, also if its class isn't derived from `Format`. Its name."""
    entry = re.search(r"^(\w+) = \"(\w+)\.(\w+):(\w+)\"$", block(OWN, "toml"), re.MULTILINE)
    assert entry is not None
    name, package, module, made = entry.groups()
    code = block(OWN, "python").replace("Lines(Format)", f"Lines{request.param}")
    for loaded in (package, f"{package}.{module}"):
        sys.modules.pop(loaded, None)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = tmp_path / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[{formats.GROUP}]\n{name} = {package}.{module}:{made}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def other_format(own_format: str, tmp_path: Path) -> Path:
    """The installed package's module, for other code. `own_format` finds it."""
    (module,) = tmp_path.glob("*/[!_]*.py")
    return module


@pytest.mark.parametrize("own_format", ["(Format)"], indirect=True)
def test_a_class_that_calls_the_constructor_of_its_base(own_format: str, other_format: Path) -> None:
    code = other_format.read_text(encoding="utf-8").replace("Lines(Format)", "Lines(Base)")
    code = code.replace("class Lines", "class Base:\n    pass\n\n\nclass Lines")
    code = re.sub(r"(def __init__.*\n)", r"\1        super().__init__()\n", code)
    other_format.write_text(code, encoding="utf-8")
    decodes_ada(own_format)


@pytest.mark.parametrize("own_format", ["(Format)", ""], indirect=True)
@pytest.mark.parametrize("made", ["def Lines(spec):\n    return Made(spec)", "Lines = Made.make"])
def test_a_function_that_makes_a_format(own_format: str, other_format: Path, made: str) -> None:
    code = other_format.read_text(encoding="utf-8").replace("class Lines", "class Made")
    make = "    @classmethod\n    def make(cls, spec):\n        return cls(spec)\n"
    other_format.write_text(f"{code}\n{make}\n{made}\n", encoding="utf-8")
    decodes_ada(own_format)


def decodes_ada(name: str) -> None:
    assert not deletes_carry_row(configured(name))
    (row,) = decode(name, fuzz.records([b"+;7;Ada;10.50"]), spec(ORDERS))
    assert (row.error, row.row) == (None, ADA)


def configured(name: str, **options: str) -> Config:
    table = {"source": "orders", "target": "lake.shop.orders", "key": ["id"], "columns": ORDERS}
    kafka = {"kafka.bootstrap.servers": "localhost:9092"}
    return Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": "state"},
            "source": {"type": "kafka", "format": name, "options": kafka, "format_options": options},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "warehouse"}},
            "tables": [table],
        }
    )


def test_a_format_of_ones_own(own_format: str) -> None:
    assert own_format in formats.names()
    assert not deletes_carry_row(configured(own_format))
    with pytest.raises(ValueError, match=rf"unknown key\. Known for {own_format}: none"):
        configured(own_format, separator="|")
    values = [b"+;7;Ada;10.50", None, b"-;7;;", b"+;x;Ada;1", b"+;8;Eve;1.234", b"\xff", b"+;9;Bob;"]
    found = decode(own_format, fuzz.records(values), spec(ORDERS))
    assert [(row.offset, row.kind, row.row) for row in found if not row.bad] == [
        (0, "+U", ADA),
        (2, "-D", {"id": 7, "customer": None, "amount": None}),
    ]
    assert [(row.offset, row.error) for row in found if row.bad] == [
        (3, "unparseable: not op;id;customer;amount"),
        (4, "type_mismatch: column amount: '1.234' does not fit decimal(12,2)"),
        (5, "unparseable: not op;id;customer;amount"),
        (6, "type_mismatch: column amount: '' does not fit decimal(12,2)"),
    ]


def test_no_such_format() -> None:
    assert "lines" not in formats.names()
    with pytest.raises(KeyError):
        formats.find("lines")
    with pytest.raises(ValueError, match=r"there is no format 'debezium' .*write one of avro, canal-json"):
        configured("debezium")


@pytest.mark.parametrize("name", ["avro", "debezium-avro"])
def test_a_registry_is_required(name: str) -> None:
    with pytest.raises(ValueError, match=f"format: {name} needs schema.registry.url"):
        configured(name)
    assert configured(name, **{"schema.registry.url": "http://localhost:8081"}).source.format_options


class Crowded(Format):
    """Each record stands for as many inserts as its value says."""

    DELETES_CARRY_ROW = True

    def changes(self, records: pa.RecordBatch) -> Any:
        counts = [int(value) for value in records.column("value").to_pylist()]
        record = [row for row, count in enumerate(counts) for _ in range(count)]
        after = [place for count in counts for place in range(count)]
        kinds = pa.repeat(pa.scalar(int(RowKind.INSERT), pa.int8()), len(record))
        ids = {"id": Wire(pa.array(after, pa.int64()))}
        yield Changes(pa.array(record, pa.int64()), kinds, ids, place=pa.array(after, pa.int64()))


def test_a_record_has_a_bounded_number_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one after would have the place of the next record's first."""
    monkeypatch.setitem(formats.OURS, "crowded", f"{__name__}:Crowded")
    found = decode("crowded", fuzz.records([b"65536", b"65537", b"1"]), spec({"id": "bigint"}))
    assert [(row.offset, row.error) for row in found if row.bad] == [
        (1, "unsupported_event: the record stands for more than 65,536 changes")
    ]
    good = [(row.offset, row.half) for row in found if not row.bad]
    assert good == [*((0, place) for place in range(65536)), (2, 0)]
