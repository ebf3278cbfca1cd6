"""Secrets and other people's texts end where they belong: not on a command line, not as configuration."""

import traceback
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from changelog.foreign_messages import Unrecognized
from changelog.recognition import Recognized, recognize
from sink import config
from sink.commands import proposal, training
from sink.commands.discovery import Found, LeftOut, directories
from sink.commands.initialize import from_kafka, hidden
from sink.config import SourceSection
from sink.errors import ConfigError
from sink.redaction import is_secret, masked
from sink.spark import session
from tests.sink.test_config import KAFKA, refusal

SECRETS = {
    "spark.sql.catalog.lake.credential": "hunter2",
    "spark.sql.catalog.lake.header.Authorization": "Bearer hunter2",
    "spark.sql.catalog.lake.header.X-Auth": "hunter2",
    "spark.sql.catalog.lake.uri": "jdbc:postgresql://ada:hunter2@db/lake",
    "spark.hadoop.fs.s3a.secret.key": "hunter2",
}


def test_the_jvms_command_line_has_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    told = {
        "spark.master": "local[2]",
        "spark.jars.packages": "a:b:1",
        "spark.driver.extraJavaOptions": "-Dpassword=x",
    }
    assert dict(session._for_command_line(told | SECRETS).getAll()) == told
    assert [record.args for record in caplog.records] == [("spark.driver.extraJavaOptions",)]


def test_the_launcher_is_told_what_it_needs_to_fetch_files() -> None:
    settings = SECRETS | {"spark.jars": "s3a://lake/own.jar"}
    told = dict(session._for_command_line(settings).getAll())
    assert told.keys() == {"spark.jars", "spark.hadoop.fs.s3a.secret.key"}
    for local in ("/opt/a.jar,file:///opt/b.jar", "https://repo/a.jar"):
        assert session._for_command_line(SECRETS | {"spark.jars": local}).getAll() == [("spark.jars", local)]


def test_a_secret_that_the_launcher_needs_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    repository = {"spark.jars.repositories": "https://ada:hunter2@repo/maven"}
    assert dict(session._for_command_line(repository | SECRETS).getAll()) == repository
    (warning,) = caplog.messages
    assert warning.startswith("spark: spark.jars.repositories has a secret, and Spark's launcher needs it on the JVM's")
    assert "hunter2" not in warning


def test_the_launcher_is_told_no_secrets_of_a_job_that_reads_files(tmp_path: Path) -> None:
    """Nor of the one that only prepares the next start, which reads files of its own."""
    values = yaml.safe_load(KAFKA)
    values["spark"] = {"spark.hadoop.fs.s3a.secret.key": "hunter2"}
    warm = training._config(config.Config.model_validate(values), tmp_path)
    values["source"] = {"type": "files", "format": "row-kind"}
    values["tables"] = [table | {"order_by": ["seq bigint"]} for table in values["tables"]]
    for reads_files in (config.Config.model_validate(values), warm):
        options = session.settings(reads_files)
        assert options["spark.hadoop.fs.s3a.secret.key"] == "hunter2"
        assert "hunter2" not in str(session._for_command_line(options).getAll())


def test_the_launchers_arguments_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load(KAFKA)
    values["catalogs"]["lake"]["credential"] = "hunter2"
    options = session.settings(config.Config.model_validate(values))
    assert options["spark.sql.catalog.lake.credential"] == "hunter2"
    assert "hunter2" not in str(session._for_command_line(options).getAll())


@pytest.mark.parametrize(
    "name",
    [
        "header.Authorization",
        "kafka.ssl.keystore.key",
        "kafka.ssl.key.pem",
        "s3.sse.key",
        "gcs.decryption-key",
        "fs.s3a.encryption.key",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


def test_secrets_at_the_beginning_of_a_value_are_masked() -> None:
    assert masked("AccountKey=hunter2;AccountName=lake") == "AccountKey=****;AccountName=lake"
    assert masked("-----BEGIN PRIVATE KEY-----\nhunter2") == "****"


@pytest.mark.parametrize("value", ["*hunter2", "&hunter2 x *y", "!hunter2 x", "!hunter2!x y"])
def test_messages_about_yaml_do_not_quote_a_secret(tmp_path: Path, value: str) -> None:
    catalog = "{type: hadoop, warehouse: ./warehouse}"
    text = KAFKA.replace(catalog, f"\n    credential: {value}")
    message = refusal(tmp_path, text)
    assert "hunter2" not in message


def test_messages_about_the_indexs_properties_do_not_quote_a_secret(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{KAFKA}index: {{properties: {{s3.secret-access-key: [hunter2]}}}}\n")
    assert "index.properties" in message
    assert "hunter2" not in message


def test_a_model_that_refuses_does_not_print_what_it_was_given() -> None:
    secret: dict[str, str | tuple[str, ...]] = {"schema.registry.basic.auth.user.info": "u:hunter2", "x": "y"}
    with pytest.raises(ValidationError) as caught:
        SourceSection(type="kafka", format="avro", format_options=secret, options={})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_init_refuses_options_that_the_registrys_client_lacks(tmp_path: Path) -> None:
    options = ["schema.registry.basic.auth.user.info=u:hunter2", "schema.registry.nonsense=1"]
    with pytest.raises(ConfigError) as caught:
        from_kafka("127.0.0.1:9", tmp_path / "sink.yaml", "http://127.0.0.1:9", options=options)
    assert "schema.registry.nonsense" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kafka.sasl.jaas.config", 'Module required username="${USER}" password="hunter2";'),
        ("schema.registry.basic.auth.user.info", "${USER}:hunter2"),
        ("schema.registry.url", "http://${USER}:hunter2@registry"),
        ("kafka.sasl.password", "${PASSWORD:-hunter2}"),
        ("kafka.ssl.keystore.key", "hunter2"),
        ("kafka.ssl.key.passphrase", "hunter2"),
    ],
)
def test_init_writes_no_secret_that_stands_beside_a_reference(name: str, value: str) -> None:
    assert hidden(name, value, "V") == "${V}"


def test_init_keeps_references() -> None:
    assert hidden("kafka.sasl.password", "${PASSWORD}", "V") == "${PASSWORD}"


PLACE = proposal.Place("kafka", {"kafka.bootstrap.servers": "b:9092"}, Path("/tmp"))
INJECTED = "x\nspark: {spark.driver.extraJavaOptions: -javaagent:evil.jar}\r\x85\u2028\ud800#"


def test_names_in_messages_stay_in_comments(tmp_path: Path) -> None:
    left = recognize([(None, b'{"x\\nspark: {spark.master: local}\\n": 1}')])
    assert isinstance(left, Unrecognized)
    found = Found("orders", Recognized("debezium-json", note=INJECTED), ("id",), 1, columns={"id": "int"})
    text = proposal.write(PLACE, [found, LeftOut("other", left.reason), LeftOut("connect", INJECTED, internal=True)])
    (tmp_path / "sink.yaml").write_text(text, encoding="utf-8")
    assert config.load(tmp_path / "sink.yaml").spark == {}


@pytest.mark.parametrize(
    "name", ["a\u0085b", "a\u2028b", "a\u007fb", "a\U0001f600b", "a\u00a0b", 'a"\\b: #', "é" * 200]
)
def test_columns_are_written_as_they_are(tmp_path: Path, name: str) -> None:
    found = Found("orders", Recognized("debezium-json"), (name,), 1, columns={name: "int"})
    (tmp_path / "sink.yaml").write_text(proposal.write(PLACE, [found]), encoding="utf-8")
    (table,) = config.load(tmp_path / "sink.yaml").tables
    assert table.key == [name]
    assert list(table.columns or {}) == [name]


def test_the_environment_is_not_read_for_names_in_messages(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1.json").write_text('{"row_kind": "+I", "${HOME}": 1, "seq": 1}\n')
    (found,) = directories(tmp_path, ["${HOME}"], ["seq bigint"], lambda done, of: None)
    assert isinstance(found, LeftOut)
    assert "environment" in found.reason


def test_a_message_whose_type_is_no_text_is_recognized_as_none() -> None:
    assert isinstance(recognize([(None, b'{"isDdl": false, "type": {"a": 1}}')]), Unrecognized)
