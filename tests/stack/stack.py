"""The whole stack on 127.0.0.1: two databases, Debezium, Kafka, a registry, an S3 store and a REST catalog.

What the sink talks to wants to know who it is: Kafka by TLS and SCRAM, the registry by TLS, user and password, the
catalog by OAuth2, and the store by keys, which the catalog vends.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tests.stack import tls
from tests.stack.connect import Connect
from tests.stack.container import has
from tests.stack.kafka import container_or_process
from tests.stack.mariadb import mysql_or_mariadb
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
        self.certificate = tls.made(_made(folder / "tls"))
        self.postgres = Postgres(_made(folder / "postgres"))
        self.mysql = mysql_or_mariadb(_made(folder / "mysql"))
        self.kafka = container_or_process(_made(folder / "kafka"), self.certificate)
        self.registry = Registry(_made(folder / "registry"), self.kafka)
        self.connect = Connect(_made(folder / "connect"), self.kafka)
        self.s3 = S3(_made(folder / "s3"))
        self.catalog = RestCatalog(_made(folder / "catalog"), self.s3)
        server = Path(self.certificate.path("server.pem"))
        self.registry_door = BasicAuth(self.registry.address, "rowdelta", "secret-of-registry", server)
        keys = {"s3.access-key-id": self.s3.KEY, "s3.secret-access-key": self.s3.SECRET}
        self.catalog_door = OAuth2(self.catalog.uri, "rowdelta", "secret-of-catalog", keys)


@contextmanager
def running_stack(told: Callable[[str], None] = lambda text: None) -> Iterator[Stack]:
    """A started stack: all servers at once. They are stopped when the block ends, in the middle of their start too.

    :param told: is told what has started.
    """
    with ExitStack() as ends:
        # In a thread: Ctrl-C can't come between a folder and the note of it.
        with ThreadPoolExecutor() as thread:
            made = thread.submit(tempfile.TemporaryDirectory, prefix="rowdelta-stack-").result()
        stack = Stack(Path(ends.enter_context(made)))
        starting = ends.enter_context(_Starting())
        chains: list[list[_Server]] = [[stack.s3, stack.catalog], [stack.postgres], [stack.mysql]]
        if has("registry"):  # it keeps its schemas in Kafka
            chains.append([stack.kafka, stack.registry, stack.connect])
        else:
            chains += [[stack.kafka, stack.connect], [stack.registry]]
        starting.start(chains, told)
        ends.enter_context(stack.registry_door)
        ends.enter_context(stack.catalog_door)
        yield stack


class _Server(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


class _Starting:
    """Starts servers in threads. Where it ends, all of them are stopped: a Ctrl-C may come while they start."""

    def __init__(self) -> None:
        self._servers: list[_Server] = []
        self._is_over = False
        self._threads = ThreadPoolExecutor()

    def __enter__(self) -> Self:
        return self

    def start(self, chains: Sequence[Sequence[_Server]], told: Callable[[str], None]) -> None:
        """Each chain's servers one after the other, all chains at the same time."""

        def follow(chain: Sequence[_Server]) -> None:
            for server in chain:
                self._servers.append(server)
                if self._is_over:
                    return
                server.start()
                told(type(server).__name__)

        for each in [self._threads.submit(follow, chain) for chain in chains]:
            each.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._stop()
        self._threads.shutdown()
        self._stop()  # those that started meanwhile

    def _stop(self) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda server: server.close(), self._servers))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
