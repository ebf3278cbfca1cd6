"""A Kafka broker of one node: a container where Docker runs, else a local process from Maven's packages."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewTopic

from tests.stack.container import Container, has
from tests.stack.jars import HERE, jars
from tests.stack.process import Process, Service, ServiceError, finish, free_ports, java, running, wait_until
from tests.stack.tls import Tls

# Not random: some random ids begin with "-", which the format tool reads as an option.
CLUSTER_ID = "rowdeltaTestClusterIdA"
_SETTINGS = {
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
}
"""Of a small broker for tests, beside its listeners and folders."""
_DOOR_PORT = 9094
_KEYSTORE = "/mnt/server.pem"


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

    def broker_settings(self, keystore: str) -> dict[str, str]:
        """Beside those of the broker, whose listeners `DOOR` is added to. `keystore` has the key and certificate."""
        return {
            "sasl.enabled.mechanisms": self.MECHANISM,
            "listener.name.door.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "listener.name.door.ssl.keystore.type": "PEM",
            "listener.name.door.ssl.keystore.location": keystore,
        }


class Kafka(Service):
    """A Kafka broker on 127.0.0.1 which keeps its port and its topics while it is stopped.

    `bootstrap_servers` is a listener that wants nothing; `door` is the other one, where there is one. `inside` is for
    other containers.

    :param certificate: for a listener with TLS and SCRAM, beside the plain one.
    """

    def __init__(self, certificate: Tls | None = None) -> None:
        self._port, self._controller_port, door_port = free_ports(3)
        self.bootstrap_servers = self.inside = f"127.0.0.1:{self._port}"
        self.door = None if certificate is None else Door(door_port, "rowdelta", "secret-of-kafka", certificate)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic and wait until each partition has a leader; KafkaException when the topic exists."""
        admin = self._admin()
        admin.create_topics([NewTopic(name, num_partitions=partitions, replication_factor=1)])[name].result(timeout=30)

        def has_leaders() -> bool:
            found = admin.list_topics(name, timeout=5).topics[name].partitions
            return len(found) == partitions and all(partition.leader >= 0 for partition in found.values())

        if not wait_until(has_leaders):
            raise ServiceError(f"topic {name} got no leader")

    def add_user(self, user: str, password: str) -> None:
        """A user for SCRAM, or another password for this one."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        added = UserScramCredentialUpsertion(user, info, password.encode())
        admin = self._admin()  # without a name it would be gone before it answers
        admin.alter_user_scram_credentials([added])[user].result(timeout=30)

    def _answers(self) -> bool:
        try:
            return bool(self._admin().list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def _admin(self) -> AdminClient:
        # log_level 0: it is no news that nobody listens while the broker starts.
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})


def container_or_process(folder: Path, certificate: Tls | None = None) -> Kafka:
    """A broker; if it is a process, it keeps its files in `folder`."""
    return ContainerKafka(certificate) if has("kafka") else LocalKafka(folder, certificate)


def running_kafka() -> AbstractContextManager[Kafka]:
    """A started broker: a container where Docker has the image, else a process. Its topics end with the block."""
    return running(container_or_process, "kafka")


class LocalKafka(Kafka):
    """A broker which keeps its settings, topics and log in `folder`.

    :param first: the broker of whose cluster it becomes the second one. The first one alone decides who leads.
    """

    def __init__(self, folder: Path, certificate: Tls | None = None, first: "LocalKafka | None" = None) -> None:
        super().__init__(certificate)
        port = self._port
        self._classpath = jars(HERE / "ivy-kafka.xml")
        self._folder = folder
        self._settings = folder / "server.properties"
        settings = _local_settings(port, self._controller_port, str(folder / "data"))
        if first is not None:
            settings |= {
                "process.roles": "broker",
                "node.id": "2",
                "controller.quorum.voters": f"1@127.0.0.1:{first._controller_port}",
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
            }
        if self.door is not None:
            settings |= self.door.broker_settings(self.door.certificate.path("server.pem"))
            for key in ("listeners", "advertised.listeners"):
                settings[key] += f",DOOR://{self.door.bootstrap_servers}"
            settings["listener.security.protocol.map"] += ",DOOR:SASL_SSL"
        self._settings.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = java(self._classpath, "kafka.Kafka", str(self._settings))
        self._runner = Process(command, folder / "kafka.log", self._answers)

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
    """The compose file's broker."""

    def __init__(self, certificate: Tls | None = None) -> None:
        super().__init__(certificate)
        container = Container("kafka", self._port, self._answers)
        self.inside = f"{container.name}:19092"
        environment = container.environment
        environment["KAFKA_ADVERTISED_LISTENERS"] = f"INSIDE://{self.inside},HOST://{self.bootstrap_servers}"
        settings = _SETTINGS
        if self.door is not None:
            environment["KAFKA_LISTENERS"] += f",DOOR://:{_DOOR_PORT}"
            environment["KAFKA_ADVERTISED_LISTENERS"] += f",DOOR://{self.door.bootstrap_servers}"
            environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"] += ",DOOR:SASL_SSL"
            container.publish(_DOOR_PORT, self.door.port)
            container.mount(Path(self.door.certificate.path("server.pem")), _KEYSTORE)
            settings = settings | self.door.broker_settings(_KEYSTORE)
        environment |= {_variable(key): value for key, value in settings.items()}
        self._runner = container

    def start(self) -> None:
        super().start()
        if self.door is not None:
            self.add_user(self.door.user, self.door.password)


def _variable(key: str) -> str:
    """The image's name for a setting."""
    return "KAFKA_" + key.upper().replace("_", "__").replace("-", "___").replace(".", "_")


def _local_settings(port: int, controller_port: int, data: str) -> dict[str, str]:
    """Settings of a broker that is its own controller, and keeps its topics in the folder `data`."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": data,
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        **_SETTINGS,
    }
