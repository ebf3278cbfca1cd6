"""A container keeps the promises of a process. The subject is the compose file's store."""

import socket
from collections.abc import Iterator
from contextlib import closing
from select import POLLIN, poll
from urllib.error import URLError
from urllib.request import urlopen

import docker  # type: ignore[import-untyped]
import pytest

from tests.stack import container as containers
from tests.stack.container import VARIABLE, Container, lacks
from tests.stack.process import ServiceError, free_ports, listens, wait_until

FILE = "/data/lake/kept"


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def container(port: int) -> Iterator[Container]:
    if lack := lacks("s3"):
        pytest.skip(f"needs Docker, which CI doesn't have: {lack}")

    def answers() -> bool:
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return True
        except (URLError, ConnectionError, TimeoutError):
            return False

    server = Container("s3", port, answers)
    yield server
    server.close()


def test_a_container_dies_and_stops_and_comes_back_with_its_files(container: Container, port: int) -> None:
    assert not container.is_started
    container.start()
    container.run("touch", FILE)
    for end in (container.kill, container.stop):
        assert listens(port)
        end()
        assert not listens(port)
        assert not container.is_started
        end()  # again, which does nothing
        container.start()
        container.run("test", "-f", FILE)
    with pytest.raises(ServiceError, match=r"ls failed in rowdelta-s3-.*\n.*/nowhere"):
        container.run("ls", "/nowhere")


def test_a_container_hangs(container: Container, port: int) -> None:
    container.start()
    container.pause()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answers = poll()
        answers.register(connection.fileno(), POLLIN)
        assert not answers.poll(300)
        container.resume()
        assert answers.poll(30_000)
    container.pause()
    container.stop()
    assert not listens(port)


def test_a_container_ends_by_itself(container: Container, port: int) -> None:
    container.command = ["echo what it said; exit 3"]
    with pytest.raises(ServiceError, match=r"s3 ended with code 3\nwhat it said"):
        container.start()
    container.close()
    container.close()
    with closing(docker.from_env()) as client:
        assert container.name not in [each.name for each in client.containers.list(all=True)]


def test_a_running_container_ends(container: Container) -> None:
    container.start()
    assert container.exit_code is None
    container.run("sh", "-c", "kill 1")
    assert wait_until(lambda: container.exit_code == 0)
    container.stop()
    container.start()
    assert container.exit_code is None


def test_other_machines_cannot_reach_a_container(container: Container, port: int) -> None:
    container.start()
    with closing(docker.from_env()) as client:
        published = client.containers.get(container.name).ports
    assert published == {"7070/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    for each in (containers.lacks, containers._lacks_engine):
        each.cache_clear()
    yield
    for each in (containers.lacks, containers._lacks_engine):
        each.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("choice", ["local", ""])
def test_without_docker_there_are_processes(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setenv(VARIABLE, choice)
    assert lacks("connect").startswith("ROWDELTA_TEST_STACK is local" if choice else "no Docker engine answers")


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("choice", "told"), [("docker", "is docker: no Docker engine answers"), ("podman", "'podman'")]
)
def test_who_wants_docker_is_told_that_there_is_none(monkeypatch: pytest.MonkeyPatch, choice: str, told: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setenv(VARIABLE, choice)
    with pytest.raises(ServiceError, match=told):
        lacks("kafka")
