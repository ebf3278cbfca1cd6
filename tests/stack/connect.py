"""Kafka Connect with Debezium's connectors of PostgreSQL and MySQL or MariaDB, and Apicurio's Avro converter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from zipfile import ZipFile

from tests.stack.container import Container, has
from tests.stack.jars import HERE, jars, unpacked
from tests.stack.kafka import Kafka
from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres
from tests.stack.process import Process, Service, ServiceError, free_ports, java, wait_until

JSON = "org.apache.kafka.connect.json.JsonConverter"
AVRO = "io.apicurio.registry.utils.converter.AvroConverter"


class Connect(Service):
    """A distributed worker on 127.0.0.1, which keeps its connectors in topics of the broker. `url` is its REST API.

    :param flush_seconds: how often it stores the offsets of what it has sent. After a crash it goes on from there.
    """

    OFFSETS = "connect-offsets"
    """The topic of these offsets."""

    def __init__(self, folder: Path, kafka: Kafka, flush_seconds: int = 1) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        settings = _SETTINGS | {"offset.flush.interval.ms": f"{flush_seconds}000"}
        if has("connect"):
            self._runner = self._container(port, kafka, settings)
        else:
            self._runner = self._local(port, folder, kafka, settings)

    def _container(self, port: int, kafka: Kafka, settings: dict[str, str]) -> Container:
        container = Container("connect", port, self._answers)
        environment = container.environment
        environment["BOOTSTRAP_SERVERS"] = kafka.inside
        environment |= {f"CONNECT_{key.upper().replace('.', '_')}": value for key, value in settings.items()}
        # the image's own name for it
        environment["OFFSET_FLUSH_INTERVAL_MS"] = settings["offset.flush.interval.ms"]
        return container

    def _local(self, port: int, folder: Path, kafka: Kafka, settings: dict[str, str]) -> Process:
        plugins = folder / "plugins"
        plugins.mkdir()
        for connector in unpacked(HERE / "ivy-debezium.xml").iterdir():
            if connector.is_dir():
                (plugins / connector.name).symlink_to(connector)
        _link_avro_converter(plugins / "avro-converter")
        file = folder / "connect.properties"
        properties = _local_settings(kafka.bootstrap_servers, port, plugins) | settings
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        classpath = jars(HERE / "ivy-connect.xml")
        command = java(classpath, "org.apache.kafka.connect.cli.ConnectDistributed", str(file))
        return Process(command, folder / "connect.log", self._answers)

    def put(self, name: str, connector: Mapping[str, str]) -> None:
        """Create a connector, or change it, and return when its task runs; ServiceError with the worker's words."""
        self._ask("PUT", f"/connectors/{name}/config", dict(connector))

        def runs() -> bool:
            states = [task["state"] for task in self.status(name).get("tasks", [])]
            return states == ["RUNNING"] or "FAILED" in states

        if not wait_until(runs) or self.status(name)["tasks"][0]["state"] == "FAILED":
            raise ServiceError(f"connector {name} does not run: {self.status(name)}")

    def delete(self, name: str) -> None:
        """Remove a connector. What it left in the database stays: a slot, a publication."""
        self._ask("DELETE", f"/connectors/{name}")

    def status(self, name: str) -> dict[str, Any]:
        """What the worker says of a connector and its tasks; empty while it knows of none."""
        try:
            return dict(self._ask("GET", f"/connectors/{name}/status"))
        except ServiceError:
            return {}

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=60) as answer:
                text = answer.read()
        except HTTPError as error:
            with error:
                raise ServiceError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}") from error
        return json.loads(text) if text else None

    def _answers(self) -> bool:
        try:
            self._ask("GET", "/connectors")
            return True
        except (URLError, ConnectionError, TimeoutError, ServiceError):
            return False


def postgres_connector(postgres: Postgres, prefix: str, tables: str, **more: str) -> dict[str, str]:
    """A connector of the tables that match `tables` (`public\\.orders,…`), into topics `<prefix>.<schema>.<table>`."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        **place(postgres),
        "database.user": postgres.user,
        "database.password": postgres.password,
        "database.dbname": postgres.database,
        "plugin.name": "pgoutput",
        "slot.name": prefix,
        "publication.name": prefix,
        "publication.autocreate.mode": "filtered",
        "topic.prefix": prefix,
        "table.include.list": tables,
        **_TOPICS,
        **{key.replace("_", "."): value for key, value in more.items()},
    }


def mysql_connector(mysql: MySQL, prefix: str, tables: str, kafka: Kafka, **more: str) -> dict[str, str]:
    """A connector of the tables that match `tables` (`shop\\.orders,…`), into topics `<prefix>.<database>.<table>`."""
    return {
        "connector.class": mysql.CONNECTOR,
        "tasks.max": "1",
        **place(mysql),
        "database.user": mysql.user,
        "database.password": mysql.password,
        "database.server.id": "4711",
        "database.include.list": mysql.database,
        "topic.prefix": prefix,
        "table.include.list": tables,
        "schema.history.internal.kafka.bootstrap.servers": place_of_kafka(kafka),
        "schema.history.internal.kafka.topic": f"{prefix}.history",
        **_TOPICS,
        **{key.replace("_", "."): value for key, value in more.items()},
    }


def place(server: Postgres | MySQL) -> dict[str, str]:
    """Where Connect finds a database: containers find each other at addresses of their own."""
    host, _, port = (server.inside if has("connect") else f"{server.host}:{server.port}").partition(":")
    return {"database.hostname": host, "database.port": port}


def place_of_kafka(kafka: Kafka) -> str:
    """Likewise the broker."""
    return kafka.inside if has("connect") else kafka.bootstrap_servers


_TOPICS = {
    "topic.creation.default.partitions": "2",
    "topic.creation.default.replication.factor": "1",
    "poll.interval.ms": "50",
    # Its timer would wake each 5 s only.
    "offset.flush.interval.ms": "1000",
}


def json_converter(*, schemas: bool) -> dict[str, str]:
    """Messages as JSON, with their schemas or without."""
    settings: dict[str, str] = {}
    for side in ("key", "value"):
        settings[f"{side}.converter"] = JSON
        settings[f"{side}.converter.schemas.enable"] = str(schemas).lower()
        # A NULL is a NULL, also in a column with a default.
        settings[f"{side}.converter.replace.null.with.default"] = "false"
    return settings


def avro_converter(registry_url: str) -> dict[str, str]:
    """Messages as Avro in Confluent's wire format.

    :param registry_url: where Apicurio's own API is (`…/apis/registry/v2`); with user and password if it wants them.
    """
    settings: dict[str, str] = {}
    for side in ("key", "value"):
        settings[f"{side}.converter"] = AVRO
        settings |= {
            f"{side}.converter.apicurio.{key}": value
            for key, value in {
                "registry.url": registry_url,
                "registry.auto-register": "true",
                "registry.find-latest": "true",
                "registry.as-confluent": "true",
                "registry.id-handler": "io.apicurio.registry.serde.Legacy4ByteIdHandler",
                "registry.headers.enabled": "false",
                "registry.use-id": "contentId",
            }.items()
        }
    return settings


_SETTINGS = {
    **{f"{kind}.storage.replication.factor": "1" for kind in ("config", "offset", "status")},
    "offset.storage.partitions": "1",
    "status.storage.partitions": "1",
    "scheduled.rebalance.max.delay.ms": "0",
    # the shortest that the broker allows: until then a new worker waits for one that was killed
    "session.timeout.ms": "6000",
    "heartbeat.interval.ms": "2000",
}


def _link_avro_converter(plugin: Path) -> None:
    plugin.mkdir()
    for jar in jars(HERE / "ivy-avro-converter.xml"):
        (plugin / jar.name).symlink_to(jar)
    # Its own jar does not declare it, and `service_load` finds what is declared.
    with ZipFile(plugin / "declaration.jar", "w") as archive:
        archive.writestr("META-INF/services/org.apache.kafka.connect.storage.Converter", AVRO)


def _local_settings(bootstrap_servers: str, port: int, plugins: Path) -> dict[str, str]:
    topics = {f"{kind}.storage.topic": f"connect-{kind}s" for kind in ("config", "offset")}
    return {
        "bootstrap.servers": bootstrap_servers,
        "listeners": f"http://127.0.0.1:{port}",
        "rest.advertised.host.name": "127.0.0.1",
        "group.id": "connect",
        **topics,
        "status.storage.topic": "connect-status",
        "key.converter": JSON,
        "value.converter": JSON,
        "plugin.path": str(plugins),
        # The others load every class of every plugin: 10 s more.
        "plugin.discovery": "service_load",
    }
