"""The whole stack on 127.0.0.1: two databases, Debezium, Kafka, a registry, an S3 store and a REST catalog.

What the sink talks to wants to know who it is: Kafka by TLS and SCRAM, the registry by TLS, user and password, the
catalog by OAuth2, and the store by keys, which the catalog vends.
"""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.stack.certificate import Certificate, self_signed
from tests.stack.connect import Connect
from tests.stack.kafka import LocalKafka
from tests.stack.mariadb import MariaDB
from tests.stack.postgres import Postgres
from tests.stack.proxy import BasicAuth, OAuth2
from tests.stack.registry import Registry
from tests.stack.rest_catalog import RestCatalog
from tests.stack.s3 import S3


class Stack:
    """All of it. `registry_door` and `catalog_door` stand in front of `registry` and `catalog`.

    :param folder: for the servers' files and logs; it ends with the stack.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate: Certificate = self_signed(folder)
        self.postgres = Postgres(_made(folder / "postgres"))
        self.mariadb = MariaDB(_made(folder / "mariadb"))
        self.kafka = LocalKafka(_made(folder / "kafka"), self.certificate)
        self.registry = Registry(_made(folder / "registry"))
        self.connect = Connect(_made(folder / "connect"), self.kafka)
        self.s3 = S3(_made(folder / "s3"))
        self.catalog = RestCatalog(_made(folder / "catalog"), self.s3)
        self.registry_door = BasicAuth(self.registry.address, "rowdelta", "secret-of-registry", self.certificate.server)
        keys = {"s3.access-key-id": self.s3.KEY, "s3.secret-access-key": self.s3.SECRET}
        self.catalog_door = OAuth2(self.catalog.uri, "rowdelta", "secret-of-catalog", keys)


@contextmanager
def running_stack(told: Callable[[str], None] = lambda text: None) -> Iterator[Stack]:
    """A started stack: all servers at once. They are stopped when the block ends, in the middle of their start too.

    :param told: is told what has started.
    """
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="rowdelta-stack-"))
        stack = Stack(Path(folder))

        def start(name: str) -> None:
            server = getattr(stack, name)
            ends.callback(server.stop)
            server.start()
            told(name)

        def kafka_and_connect() -> None:
            start("kafka")
            start("connect")

        def store_and_catalog() -> None:
            start("s3")
            start("catalog")

        single = [lambda name=name: start(name) for name in ("postgres", "mariadb", "registry")]
        with ThreadPoolExecutor() as threads:
            started = [threads.submit(each) for each in (kafka_and_connect, store_and_catalog, *single)]
        for each in started:
            each.result()
        ends.enter_context(stack.registry_door)
        ends.enter_context(stack.catalog_door)
        yield stack


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
