"""A schema registry with Confluent's API (Apicurio), which keeps its schemas in memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.stack.jars import HERE, jars
from tests.stack.process import Process, free_ports, java


class Registry:
    """A registry on 127.0.0.1.

    `url` is what confluent-kafka's client takes, `own_url` what Apicurio's converter does; both are below `address`.
    """

    PATH = "/apis/ccompat/v7"

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self.url = self.address + self.PATH
        self.own_url = f"{self.address}/apis/registry/v2"
        # its manifest names the libraries beside it
        (server,) = jars(HERE / "ivy-registry.xml")
        program, *arguments = java([server], "io.quarkus.runner.GeneratedMain")
        settings = ["-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={port}"]
        self._process = Process([program, *settings, *arguments], folder / "registry.log", self._answers)

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/subjects", timeout=5):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def running_registry() -> Iterator[Registry]:
    """A started registry; its schemas are gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="rowdelta-registry-") as folder:
        registry = Registry(Path(folder))
        try:
            registry.start()
            yield registry
        finally:
            registry.stop()
