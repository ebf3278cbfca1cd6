"""Users, tokens and certificates: `init` logs in with librdkafka, and what it writes is right for Java's client."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from sink import config
from sink.cli import main
from sink.config import Config, TableSection
from sink.errors import ConfigError
from sink.sources.kafka import KafkaSource
from sink.sources.kafka_client import Broker, client_settings
from tests.stack import tls, tokens
from tests.stack.secured_kafka import PASSWORD, SCRAM, USER, SecuredKafka
from tests.stack.tls import Tls

pytestmark = pytest.mark.kafka

EVENT = (
    '{"before":null,"after":{"id":1,"v":"a"},"source":{"version":"3.0","connector":"postgresql"},"op":"c","ts_ms":1}'
)
SECRETS = (PASSWORD, tokens.SECRET, tls.PASSWORD, "PRIVATE KEY")


@dataclass(frozen=True)
class Secured:
    broker: SecuredKafka
    tls: Tls
    provider: str

    def options(self, mechanism: str) -> dict[str, str]:
        """What `init` is given, with librdkafka's names."""
        trust = {"ssl.ca.location": self.tls.path("ca.pem")}
        user = {"sasl.username": USER, "sasl.password": "${KAFKA_PASSWORD}"}
        match mechanism:
            case "PLAIN" | "SCRAM-SHA-512":
                return {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, **user, **trust}
            case "OAUTHBEARER":
                oauth = {
                    "method": "oidc",
                    "client.id": tokens.CLIENT,
                    "client.secret": "${CLIENT_SECRET}",
                    "token.endpoint.url": f"{self.provider}/token",
                }
                named = {f"sasl.oauthbearer.{name}": value for name, value in oauth.items()}
                return {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, **named, **trust}
        key = {"ssl.key.location": self.tls.path("client.key")}
        if mechanism == "certificate and a key with a password":
            key = {"ssl.key.location": self.tls.path("client-secret.key"), "ssl.key.password": "${KEY_PASSWORD}"}
        return {"security.protocol": "SSL", "ssl.certificate.location": self.tls.path("client.crt"), **key, **trust}

    def stores(self) -> dict[str, dict[str, str]]:
        """Clients' certificates as Java has them."""
        found: dict[str, dict[str, str]] = {}
        for kind, end in (("JKS", "jks"), ("PKCS12", "p12"), ("PEM", "pem")):
            found[kind] = {"kafka.security.protocol": "SSL"}
            for store, name in (("truststore", "ca"), ("keystore", "client")):
                prefix = f"kafka.ssl.{store}"
                found[kind] |= {f"{prefix}.type": kind, f"{prefix}.location": self.tls.path(f"{name}.{end}")}
                if kind != "PEM":
                    found[kind][f"{prefix}.password"] = tls.PASSWORD
        return found


MECHANISMS = ("PLAIN", SCRAM, "OAUTHBEARER", "certificate", "certificate and a key with a password")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "tls").mkdir()
    certificates = tls.made(folder / "tls")
    certificates.add_stores()
    with tokens.running_provider() as provider:
        broker = SecuredKafka(folder, certificates, provider)
        try:
            broker.start()
            broker.add_user(USER, PASSWORD)  # that of PLAIN for SCRAM too
            broker.create_topic("shop.public.orders")
            producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
            producer.produce("shop.public.orders", EVENT, key='{"id":1}')
            producer.flush()
            yield Secured(broker, certificates, provider)
        finally:
            broker.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    monkeypatch.setenv("CLIENT_SECRET", tokens.SECRET)
    monkeypatch.setenv("KEY_PASSWORD", tls.PASSWORD)


def address(secured: Secured, options: Mapping[str, str]) -> str:
    is_user = any("sasl" in name for name in options)
    return secured.broker.for_users if is_user else secured.broker.for_certificates


def written(secured: Secured, mechanism: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Config:
    """What `init` writes, as the next command reads it."""
    file = folder / f"{mechanism}.yaml"
    options = secured.options(mechanism)
    given = [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    servers = address(secured, options)
    assert main(["init", "--bootstrap-servers", servers, *given, "--output", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    told = capsys.readouterr()
    assert [secret for secret in SECRETS if secret in text + told.out + told.err] == []
    login = re.search(r"(?m)^# (KAFKA_SASL_JAAS_CONFIG): (.*;)", text)
    with pytest.MonkeyPatch.context() as patch:
        if login is not None:
            escaped = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
            patch.setenv(login[1], login[2].replace("…", escaped))
        return config.load(file)


@pytest.mark.spark
def test_every_way_to_log_in(
    spark: SparkSession, secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configurations = {name: written(secured, name, tmp_path, capsys) for name in MECHANISMS}
    base = configurations["certificate"]
    for kind, options in secured.stores().items():
        servers = {"kafka.bootstrap.servers": secured.broker.for_certificates}
        source = base.source.model_copy(update={"options": servers | options})
        configurations[kind] = base.model_copy(update={"source": source})
    for name, configured in configurations.items():
        options = configured.source.options
        # the driver's client
        table = TableSection.model_validate({"source": "shop.public.orders", "target": "lake.shop.orders"})
        assert KafkaSource(spark, configured).with_messages([table]) == [table.id], name
        # a task's
        ours = {option: value for option, value in options.items() if option.startswith("kafka.")}
        frame = spark.read.format("kafka").options(**ours).option("subscribe", "shop.public.orders").load()
        assert [bytes(row.value).decode() for row in frame.select("value").collect()] == [EVENT], name
        if name not in ("JKS", "PKCS12"):
            assert "shop.public.orders" in Broker(options).topics(), name


def test_stores_that_only_java_reads(secured: Secured) -> None:
    stores = secured.stores()
    for kind in ("JKS", "PKCS12"):
        with pytest.raises(ConfigError, match=rf"truststore\.location is a Java trust store \({kind}\).*as PEM"):
            client_settings(stores[kind])
    mixed = {n: v for n, v in stores["PKCS12"].items() if "truststore" not in n}
    trust = {n: v for n, v in stores["PEM"].items() if "truststore" in n}
    servers = {"kafka.bootstrap.servers": secured.broker.for_certificates}
    assert "shop.public.orders" in Broker(servers | mixed | trust).topics()


@pytest.mark.parametrize("mechanism", ["PLAIN", "OAUTHBEARER", "certificate"])
def test_who_is_refused(
    secured: Secured,
    mechanism: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "planted-password")
    monkeypatch.setenv("CLIENT_SECRET", "planted-password")
    options = secured.options(mechanism)
    if mechanism == "certificate":
        options = {
            name: value
            for name, value in options.items()
            if name not in ("ssl.certificate.location", "ssl.key.location")
        }
    given = [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    file = tmp_path / "sink.yaml"
    code = main(["init", "--bootstrap-servers", address(secured, options), *given, "--output", str(file)])
    told = capsys.readouterr().err
    assert (code, told.splitlines()[-1][:16]) in [(2, "rowdelta: Kafka "), (75, "rowdelta: Kafka ")]
    assert "planted-password" not in told
    assert not file.exists()
