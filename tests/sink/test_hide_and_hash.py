"""The recipes of docs/hide-and-hash.md: what isn't stored is nowhere in the table, its metadata and the log."""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import fastavro
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import SparkSession

from sink.config import Config, load
from sink.errors import ConfigError
from sink.redaction import masked
from sink.run.pipeline import Pipeline
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job
from tests.sink.partial_story import letters

pytestmark = pytest.mark.spark

PAGE = (Path(__file__).parents[2] / "docs" / "hide-and-hash.md").read_text(encoding="utf-8")
SALT = "Vt7sQ2mX9pLw"
CLEAR = ["Jo.Doe@example.org", "jo.doe@example.org", "+49 30 123456", "1987-06-05", "DE89370400440532013000", SALT]
RECIPE = ("key", "columns", "exclude", "schema_changes")
"""What a test takes from a recipe's entry."""


def configured(job: Job, recipe: int) -> Config:
    """The job with the columns of a recipe, loaded from a file."""
    block = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[recipe]
    said = yaml.safe_load(block)
    values = job.config_values()
    table = said["tables"][0]
    values["tables"][0] |= {name: value for name, value in table.items() if name in RECIPE}
    values["sink"] |= {"show_values": said["sink"]["show_values"]}
    file = job.folder / "sink.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load(file)


def contents(folder: Path) -> list[str]:
    """All that is in the files of a folder, as text."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.append(path.name + path.read_bytes().decode("latin-1"))
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(path)
            found.append(f"{parquet.read().to_pylist()} {parquet.metadata.to_dict()} {parquet.metadata.metadata}")
        if path.suffix == ".avro":
            with path.open("rb") as stream:
                found.append(str(list(fastavro.reader(stream))))
    return found


def customer(number: int, email: str | None = CLEAR[0]) -> dict[str, Any]:
    return {"id": number, "country": "DE", "email": email, "phone": CLEAR[2], "born": CLEAR[3], "iban": CLEAR[4]}


@pytest.mark.parametrize(("kind", "recipe"), [(Job, 0), (DeltaJob, 1)])
def test_what_is_hidden_is_nowhere(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    kind: type[Job], recipe: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("EMAIL_SALT", SALT)
    caplog.set_level(logging.DEBUG, "rowdelta")
    job = kind(spark, tmp_path, file_format="json", table={"late": "drop"})
    config = configured(job, recipe)
    job.write([("+I", customer(1)), ("+I", customer(2)), ("+I", customer(3, None))])
    job.write([("+U", customer(1, "x@example.org")), ("-D", customer(2)), ("-U", customer(3)), ("+U", customer(3))])
    Pipeline(spark, config).run()

    def hashed(email: str) -> str:
        return hashlib.sha256(f"{SALT if recipe else ''}{email}".encode()).hexdigest()

    rows = job.rows()
    assert [row["email"] for row in rows] == [hashed("x@example.org"), hashed(CLEAR[1])]
    if recipe == 0:
        assert [(row["phone_masked"], row["birth_year"]) for row in rows] == [("+49 30 12****", 1987)] * 2
    assert not {"clear_email", "phone", "born", "iban"} & set(rows[0])
    texts = contents(job.table_folder) + contents(job.checkpoint)
    assert any(hashed(CLEAR[1]) in text for text in texts)
    texts.append(caplog.text)
    assert [clear for clear in CLEAR if any(clear in text for text in texts)] == []

    caplog.clear()  # a bad record is kept as it came, and only there
    job.write([("+I", customer(4) | {"id": "none", "born": "nonsense"})])
    Pipeline(spark, config).run()
    ((_, reason, message),) = letters(job)
    assert message["email"] == CLEAR[0]
    assert [clear for clear in CLEAR if clear in reason + caplog.text] == []
    texts = contents(job.table_folder) + contents(job.checkpoint)
    assert [clear for clear in CLEAR if any(clear in text for text in texts)] == []


def test_a_salt_is_masked_where_its_expression_is_shown(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_SALT", f"{SALT}'")  # ends the text too early
    job = Job(spark, tmp_path, file_format="json")
    config = configured(job, 1)
    with pytest.raises(ConfigError, match=r"columns\.email\.expression") as caught:
        Pipeline(spark, config).run()
    assert SALT in str(caught.value)
    assert SALT not in masked(str(caught.value))


def test_a_key_can_t_be_hashed(spark: SparkSession, tmp_path: Path) -> None:
    columns: dict[str, Any] = {"id": {"type": "string", "expression": "sha2(email, 256)"}, "email": "string"}
    with pytest.raises(ValueError, match="key names 'id', which is computed; a key must be a field of the messages"):
        Job(spark, tmp_path, columns=columns).config()
