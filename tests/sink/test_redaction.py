"""What looks like a secret is printed nowhere: not by rowdelta, and not by Spark."""

import base64
import re
import time
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote
from uuid import uuid4

import pytest
import yaml
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from sink import redaction
from sink.config import Config, load
from sink.errors import ConfigError, RowdeltaError, summary
from sink.redaction import masked, redacted, spark_pattern
from sink.spark import session
from sink.spark.job_errors import job_error
from sink.spark.joint import JointWriter
from sink.targets.iceberg.catalog import IcebergCatalogs
from tests.sink.test_config import KAFKA, refusal
from tests.stack.process import free_ports

URLS = {
    "https://ada:hunter2@catalog:8181/v1?warehouse=lake": "https://****@catalog:8181/v1?warehouse=lake",
    "https://hunter2@catalog": "https://****@catalog",
    "jdbc:postgresql://db:5432/lake?user=ada&password=hunter2&ssl=true": (
        "jdbc:postgresql://db:5432/lake?user=ada&password=****&ssl=true"
    ),
    "jdbc:postgresql://ada:hunter2@db/lake": "jdbc:postgresql://****@db/lake",
    "jdbc:sqlserver://db;user=ada;password=hunter2;encrypt=true": (
        "jdbc:sqlserver://db;user=ada;password=****;encrypt=true"
    ),
    "jdbc:oracle:thin:ada/hunter2@db:1521:lake": "jdbc:oracle:thin:****@db:1521:lake",
    "abfss://lake@account.dfs.core.windows.net/x?sv=1&sig=hunter2": "abfss://****@account.dfs.core.windows.net/x?sv=1&sig=****",
    "s3://lake/warehouse?X-Amz-Signature=hunter2": "s3://lake/warehouse?X-Amz-Signature=****",
    "mongodb://db/?authToken=hunter2": "mongodb://db/?authToken=****",
    "jdbc:sqlite:/lake/catalog.db?cache=shared": "jdbc:sqlite:/lake/catalog.db?cache=shared",
    "s3://lake/warehouse/design=a@b": "s3://lake/warehouse/design=a@b",
    "https://ada:hun/ter2@catalog:8181/v1": "https://****@catalog:8181/v1",
    "https://ada:hun?t#er2@catalog": "https://****@catalog",
    "https://catalog:8181/design=a@b": "https://catalog:8181/design=a@b",
    "jdbc:postgresql://db1:5432,db2:5432/lake?user=ada@b": "jdbc:postgresql://db1:5432,db2:5432/lake?user=ada@b",
}
NAMES = (
    "s3.secret-access-key",
    "s3.access-key-id",
    "token",
    "credential",
    "jdbc.password",
    "adls.auth.shared-key.account.key",
    "adls.sas-token.account",
    "basic.auth.user.info",
    "kafka.sasl.jaas.config",
    "gcs.oauth2.token",
    "header.X-Auth",
)
DELEGATION = "header.X-Iceberg-Access-Delegation"
"""The one header that Iceberg's documentation names. It is no secret, and its value is worth knowing."""


@pytest.mark.parametrize(("url", "shown"), URLS.items())
def test_secrets_inside_of_a_value_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert redacted({"uri": url}) == {"uri": shown}


@pytest.mark.parametrize("name", NAMES)
def test_values_of_options_with_a_telling_name_are_masked(name: str) -> None:
    assert redacted({"type": "rest", name: "hunter2"}) == {"type": "rest", name: "****"}


def test_what_a_catalog_is_asked_for_is_no_secret() -> None:
    assert redacted({DELEGATION: "vended-credentials"}) == {DELEGATION: "vended-credentials"}


def test_messages_about_other_errors_mask_secrets_inside_of_a_url() -> None:
    error = OSError("no answer from https://ada:hunter2@catalog:8181/v1\n\tat org.example.Client")
    assert summary(error) == "no answer from https://****@catalog:8181/v1"


def test_messages_about_the_configuration_mask_secrets_inside_of_a_value(tmp_path: Path) -> None:
    catalog = '"jdbc:postgresql://ada:hunter2@db/lake?password=hunter2"'
    message = refusal(tmp_path, KAFKA.replace("{type: hadoop, warehouse: ./warehouse}", catalog))
    assert "got 'jdbc:postgresql://****@db/lake?password=****'" in message


@pytest.mark.spark
@pytest.mark.parametrize(
    "properties",
    [
        {"type": "rest", "uri": "http://ada:hunter2@{address}?token=hunter2"},
        {"type": "jdbc", "uri": "jdbc:sqlite:/proc/nowhere/lake.db?password=hunter2", "warehouse": "/nowhere"},
        {"type": "jdbc", "uri": "jdbc:nosuch://ada:hunter2@{address}/lake?password=hunter2", "warehouse": "/nowhere"},
    ],
)
def test_messages_about_a_catalog_mask_secrets_inside_of_its_uri(
    spark: SparkSession, properties: dict[str, str]
) -> None:
    name = f"c{uuid4().hex[:8]}"
    (port,) = free_ports(1)
    spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
    for key, value in properties.items():
        spark.conf.set(f"spark.sql.catalog.{name}.{key}", value.format(address=f"127.0.0.1:{port}"))
    with pytest.raises(RowdeltaError) as caught:
        IcebergCatalogs(spark).load(f"{name}.shop.orders")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("given", [None, "(?i)custom", "custom|other"])
def test_the_sessions_pattern_extends_the_users(given: str | None) -> None:
    values = yaml.safe_load(KAFKA) | {"spark": {} if given is None else {"spark.redaction.regex": given}}
    pattern = session.settings(Config.model_validate(values))["spark.redaction.regex"]
    assert pattern == spark_pattern(given)


@pytest.mark.spark
@pytest.mark.parametrize("given", [None, "(?i)custom", "custom|other"])
def test_spark_redacts_by_it(spark: SparkSession, given: str | None) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    pattern = jvm.java.util.regex.Pattern.compile(spark_pattern(given))

    def is_redacted(name: str, value: str) -> bool:
        """As Spark's `Utils.redact` does it: by the name, or by the value."""
        return bool(pattern.matcher(name).find() or pattern.matcher(value).find())

    for url, shown in URLS.items():
        assert is_redacted("spark.sql.catalog.lake.uri", url) == (url != shown)
    assert all(is_redacted(f"spark.sql.catalog.lake.{name}", "hunter2") for name in NAMES)
    assert not is_redacted(f"spark.sql.catalog.lake.{DELEGATION}", "remote-signing")
    assert is_redacted("spark.my.custom", "x") == (given is not None)
    assert not is_redacted("spark.sql.catalog.lake.type", "rest")
    assert not is_redacted("spark.master", "local[2]")


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", redaction._Known())


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("token", "tell it nobody", "tell it nobody"),
        ("credential", "ada:hun+ter/2ä", "hun+ter/2ä"),
        ("kafka.sasl.jaas.config", 'x.PlainLoginModule required username="ada" password="hun\\"ter2";', 'hun"ter2'),
        ("kafka.sasl.jaas.config", 'x.Module required clientId="ada" clientSecret="hunter2";', "hunter2"),
        ("uri", "jdbc:postgresql://ada:hunter2@db/lake", "hunter2"),
        ("uri", "jdbc:postgresql://db/lake?user=ada&password=hunter%202", "hunter 2"),
        ("s3.secret-access-key", "hun+ter/2", "hun+ter/2"),
        ("database.password", "hunter-2\n", "hunter-2"),
        ("kafka.ssl.keystore.key", "-----BEGIN X-----\nMIIEvQIBADANBgkqhkiG9w0\n", "MIIEvQIBADANBgkqhkiG9w0"),
    ],
)
def test_known_secrets_are_masked_wherever_they_stand(name: str, value: str, secret: str) -> None:
    forms = [secret, quote(secret), quote(secret, safe=""), base64.b64encode(secret.encode()).decode(), f'"{secret}"']
    assert any(form in masked(f"refused: {form}, of ada") for form in forms), "unknown yet"
    redaction.remember({name: value, "other": "refused"})
    for form in forms:
        shown = masked(f"refused: {form}, of ada")
        assert secret not in shown
        assert form not in shown
        assert re.fullmatch(r'refused: "?\*{4}=*"?, of ada', shown)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", "short"),
        ("s3.access-key-id", "rowdelta"),
        ("fs.s3a.access.key", "rowdelta"),
        ("uri", "http://rowdelta"),
    ],
)
def test_words_that_may_stand_anywhere_are_not_masked(name: str, value: str) -> None:
    redaction.remember({name: value})
    assert masked(f"rowdelta: {value}") == f"rowdelta: {value}"


@pytest.mark.parametrize(
    "name", ["kafka.sasl.oauthbearer.token.endpoint.url", "schema.registry.bearer.auth.credentials.source"]
)
def test_where_a_token_comes_from_is_no_secret(name: str) -> None:
    assert redacted({name: "https://sso/token"}) == {name: "https://sso/token"}


@pytest.mark.usefixtures("nothing_known")
def test_a_configuration_that_was_read_is_known(tmp_path: Path) -> None:
    text = KAFKA.replace("{type: hadoop, warehouse: ./warehouse}", "{type: rest, token: hunter2hunter2, unknown: {}}")
    refusal(tmp_path, text)
    assert masked("hunter2hunter2") == "****"


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("password", ["12345678", "01234567", "0x12345678", "1_000_000", "1234567.50", "1.5e+10"])
def test_a_password_of_digits_is_known_and_stays_as_it_is_written(tmp_path: Path, password: str) -> None:
    file = tmp_path / "sink.yaml"
    text = KAFKA.replace("{type: hadoop, warehouse: ./warehouse}", f"{{type: rest, uri: u, token: {password}}}")
    file.write_text(text)
    assert load(file).catalogs["lake"]["token"] == password
    assert masked(f"refused: {password}") == "refused: ****"


@pytest.mark.parametrize(("text", "is_text"), [("true", True), ("False", True), ("yes", False), ("Off", False)])
def test_a_secret_that_yaml_reads_as_yes_or_no(tmp_path: Path, text: str, is_text: bool) -> None:
    """Others than `true` and `false` may be meant as passwords."""
    config = KAFKA.replace("{type: hadoop, warehouse: ./warehouse}", f"{{type: rest, uri: u, token: {text}}}")
    (tmp_path / "sink.yaml").write_text(config)
    if is_text:
        assert load(tmp_path / "sink.yaml").catalogs["lake"]["token"] == text
        return
    with pytest.raises(ConfigError, match=r"sink\.yaml:\d+: catalogs\.lake\.token: .* in quotes") as caught:
        load(tmp_path / "sink.yaml")
    assert text not in str(caught.value).split("got")[1].split()


FOREIGN = (
    "://a:b",
    "://a:b@",
    ":thin:a/",
    ":thin:",
    "token",
    "?a.",
    "://",
    "&passwordtoken=",
    'a"',
    "://1:1/",
    ":thin:a@",
)


@pytest.mark.parametrize("piece", FOREIGN)
@pytest.mark.parametrize("end", ["", "@", " x@y"])
def test_masking_takes_time_in_proportion_to_the_text(piece: str, end: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + end

        def once() -> float:
            started = time.thread_time()
            masked(text)
            return time.thread_time() - started

        return min(once() for _ in range(2))

    small = 1 << 14 if piece == "token" else 1 << 16
    assert seconds(4 * small) < 9 * seconds(small) + 0.02, "16 times as long if each place is read to the end"


def test_the_beginning_of_a_long_text_shows_no_part_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    redaction.remember({"token": "hunter2" * 50})
    beginning = redaction.beginning
    assert beginning("short ://a:b@c", 100) == "short ://****@c"
    assert beginning("x" * 1_000_000, 100) == "x" * 100
    for size in range(700, 760):  # the cut is inside the secret, and what is before it becomes short
        text = "hunter2" * 100 + "x" * (size - 700) + "hunter2" * 1000
        assert "hunter2" not in beginning(text, 100)
        for word in ("https://ada:", "jdbc:oracle:thin:ada/"):
            assert "hunter3" not in beginning("a " + word + "hunter3" * 200 + "@host" + "x" * size, 100)
    read = len(beginning("://a:b" * 200_000, 800))
    assert read <= 800


def test_no_part_of_a_secret_is_in_what_is_told_of_a_failed_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the text is cut inside of it. The reason is told, however many tables the job wrote."""
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    redaction.remember({"token": "hunter2" * 50})
    tables = ", ".join(f"lake.a_namespace_of_many_tables.table_{number}" for number in range(8))
    for before in (100, 290, 790):
        text = f"no answer {'x' * before}{'hunter2' * 50} from it"
        raised = Py4JError(f"Traceback (most recent call last):\n  File x\nOSError: {text}")
        JointWriter(Mock())._pause(8, job_error(tables, raised))
        JointWriter(Mock())._pause(8, OSError(text))
    assert len(caplog.messages) == 6
    for text in caplog.messages:
        assert "no answer" in text
        assert "hunter2" not in masked(text)
