"""A schema registry with Confluent's API (Apicurio): a process keeps its schemas in memory, a container in Kafka."""

from contextlib import AbstractContextManager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.stack.container import Container, has
from tests.stack.jars import HERE, jars
from tests.stack.kafka import ContainerKafka, Kafka
from tests.stack.process import Process, Service, free_ports, java, running


class Registry(Service):
    """A registry on 127.0.0.1.

    `url` is what confluent-kafka's client takes, `own_url` what Apicurio's converter in Kafka Connect does.
    Both are below `address`.

    :param kafka: where a container keeps its schemas; without one it has a broker of its own.
    """

    PATH = "/apis/ccompat/v7"

    def __init__(self, folder: Path, kafka: Kafka | None = None) -> None:
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self.url = self.address + self.PATH
        self.own_url = f"{self.address}/apis/registry/v2"
        self._own_kafka: Kafka | None = None
        self._runner = self._container(port, kafka) if has("registry") else self._local(port, folder)

    def _container(self, port: int, kafka: Kafka | None) -> Container:
        if not isinstance(kafka, ContainerKafka):
            kafka = self._own_kafka = ContainerKafka()
        container = Container("registry", port, self._answers)
        container.environment["KAFKA_BOOTSTRAP_SERVERS"] = kafka.inside
        if has("connect"):
            self.own_url = f"http://{container.inside}/apis/registry/v2"
        return container

    def start(self) -> None:
        if self._own_kafka is not None and not self._own_kafka.is_started:
            self._own_kafka.start()
        super().start()

    def close(self) -> None:
        super().close()
        if self._own_kafka is not None:
            self._own_kafka.close()

    def _local(self, port: int, folder: Path) -> Process:
        # its manifest names the libraries beside it
        (server,) = jars(HERE / "ivy-registry.xml")
        program, *arguments = java([server], "io.quarkus.runner.GeneratedMain")
        settings = ["-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={port}"]
        return Process([program, *settings, *arguments], folder / "registry.log", self._answers)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/subjects", timeout=5):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False


def running_registry() -> AbstractContextManager[Registry]:
    """A started registry; its schemas are gone when the block ends."""
    return running(Registry, "registry")
