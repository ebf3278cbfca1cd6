"""A Kafka broker of one node: a container where Docker runs, else a local process from Maven's packages."""

import gc
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker  # type: ignore[import-untyped]
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from testcontainers.core.container import DockerContainer

from tests.stack.jars import HERE, jars
from tests.stack.process import (
    LOG_TAIL_CHARACTERS,
    START_SECONDS,
    STOP_SECONDS,
    Process,
    Service,
    ServiceError,
    finish,
    free_ports,
    java,
    wait_until,
)
from tests.stack.tls import Tls

IMAGE = "apache/kafka:4.3.1"
# Not random: some random ids begin with "-", which the format tool reads as an option.
CLUSTER_ID = "rowdeltaTestClusterIdA"


@dataclass(frozen=True)
class Door:
    """A listener of the broker that wants TLS, and user and password by SCRAM."""

    port: int
    user: str
    password: str
    certificate: Tls

    MECHANISM = "SCRAM-SHA-512"

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def java_options(self) -> dict[str, str]:
        """What a Java client needs beside the address."""
        login = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": self.MECHANISM,
            "sasl.jaas.config": f'{login} required username="{self.user}" password="{self.password}";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.certificate.path("ca.pem"),
        }

    def broker_settings(self) -> dict[str, str]:
        """Beside those of `broker_settings`, whose listeners it is added to."""
        return {
            "sasl.enabled.mechanisms": self.MECHANISM,
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "listener.name.sasl_ssl.ssl.keystore.type": "PEM",
            "listener.name.sasl_ssl.ssl.keystore.location": self.certificate.path("server.pem"),
        }


class Kafka(ABC):
    """A Kafka broker on 127.0.0.1 which keeps its port and its topics while it is stopped.

    `bootstrap_servers` is a listener that wants nothing; `door` is the other one, where there is one.
    """

    def __init__(self, port: int, door: Door | None = None) -> None:
        self.bootstrap_servers = f"127.0.0.1:{port}"
        self.door = door

    @abstractmethod
    def start(self) -> None:
        """Start, or start again on the same port with the same topics; returns when the broker serves."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the broker; does nothing when it is stopped."""

    def close(self) -> None:
        """Stop the broker for good, and give back what it used."""
        self.stop()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic and wait until each partition has a leader; KafkaException when the topic exists."""
        admin = self._admin()
        admin.create_topics([NewTopic(name, num_partitions=partitions, replication_factor=1)])[name].result(timeout=30)

        def has_leaders() -> bool:
            found = admin.list_topics(name, timeout=5).topics[name].partitions
            return len(found) == partitions and all(partition.leader >= 0 for partition in found.values())

        if not wait_until(has_leaders):
            raise ServiceError(f"topic {name} got no leader")

    def _answers(self) -> bool:
        try:
            return bool(self._admin().list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def _admin(self) -> AdminClient:
        # log_level 0: it is no news that nobody listens while the broker starts.
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})


@contextmanager
def running_kafka() -> Iterator[Kafka]:
    """A started broker: a container where Docker has the image, else a process. Its topics end with the block."""
    with tempfile.TemporaryDirectory(prefix="rowdelta-kafka-") as folder:
        broker = ContainerKafka() if docker_has_the_image() else LocalKafka(Path(folder))
        try:
            broker.start()
            yield broker
        finally:
            broker.close()


def docker_has_the_image() -> bool:
    """Whether a Docker engine answers, and has the broker's image or can pull it."""
    with warnings.catch_warnings():
        # Where nobody answers, docker-py leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with closing(docker.from_env(timeout=5)) as client:
                client.ping()
            with closing(docker.from_env()) as client:
                try:
                    client.images.get(IMAGE)
                except docker.errors.ImageNotFound:
                    client.images.pull(IMAGE)
            return True
        except docker.errors.DockerException:
            return False
        finally:
            gc.collect()


class LocalKafka(Service, Kafka):
    """A broker which keeps its settings, topics and log in `folder`.

    :param certificate: for a listener with TLS and SCRAM, beside the plain one.
    :param first: the broker of whose cluster it becomes the second one. The first one alone decides who leads.
    """

    def __init__(self, folder: Path, certificate: Tls | None = None, first: "LocalKafka | None" = None) -> None:
        port, self._controller_port, door_port = free_ports(3)
        door = None if certificate is None else Door(door_port, "rowdelta", "secret-of-kafka", certificate)
        super().__init__(port, door)
        self._classpath = jars(HERE / "ivy-kafka.xml")
        self._folder = folder
        self._settings = folder / "server.properties"
        settings = broker_settings("127.0.0.1", port, self._controller_port, str(folder / "data"))
        if first is not None:
            settings |= {
                "process.roles": "broker",
                "node.id": "2",
                "controller.quorum.voters": f"1@127.0.0.1:{first._controller_port}",
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
            }
        if door is not None:
            settings |= door.broker_settings()
            for key in ("listeners", "advertised.listeners"):
                settings[key] += f",SASL_SSL://{door.bootstrap_servers}"
            settings["listener.security.protocol.map"] += ",SASL_SSL:SASL_SSL"
        self._settings.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = java(self._classpath, "kafka.Kafka", str(self._settings))
        self._process = Process(command, folder / "kafka.log", self._answers)

    def start(self) -> None:
        if not (self._folder / "data").exists():
            self._format()
        super().start()

    def _format(self) -> None:
        arguments = ["format", "-t", CLUSTER_ID, "-c", str(self._settings)]
        if self.door is not None:
            secret = f"name={self.door.user},password={self.door.password}"
            arguments += ["--add-scram", f"{self.door.MECHANISM}=[{secret}]"]
        command = java(self._classpath, "kafka.tools.StorageTool", *arguments)
        finish(command, "Kafka's storage could not be formatted")


class ContainerKafka(Kafka):
    """A broker in a container, with the port published on 127.0.0.1."""

    def __init__(self) -> None:
        port, controller_port = free_ports(2)
        super().__init__(port)
        # The same port inside: the broker finds itself at the address which it gives to its clients.
        settings = broker_settings("0.0.0.0", port, controller_port, "/var/lib/kafka/data")
        environment = {f"KAFKA_{key.upper().replace('.', '_')}": value for key, value in settings.items()}
        self._container = DockerContainer(IMAGE, env={**environment, "CLUSTER_ID": CLUSTER_ID})
        # with_bind_ports() would publish the port on every interface.
        self._container.ports[str(port)] = ("127.0.0.1", port)  # type: ignore[assignment]
        self._created = False

    def start(self) -> None:
        if self._created:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._created = True
        if not wait_until(self._answers):
            log = b"".join(self._container.get_logs()).decode(errors="replace")
            raise ServiceError(f"Kafka did not serve within {START_SECONDS} s\n{log[-LOG_TAIL_CHARACTERS:]}")

    def stop(self) -> None:
        self._container.get_wrapped_container().stop(timeout=STOP_SECONDS)

    def close(self) -> None:
        self._container.stop()


def broker_settings(host: str, port: int, controller_port: int, data: str) -> dict[str, str]:
    """Settings of a broker that is its own controller, and keeps its topics in the folder `data`.

    It listens on the interface `host`, and tells its clients to come to 127.0.0.1.
    """
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": data,
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
