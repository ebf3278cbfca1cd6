"""Servers in containers, with the images and settings of docker-compose.yml.

A service class takes a `Container` instead of a `Process` where `has(…)` says so. `ROWDELTA_TEST_STACK` forces it:
`local` asks no Docker engine, and with `docker` it is an error when there is none, or an image can't be had.
"""

import atexit
import gc
import os
import secrets
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import docker  # type: ignore[import-untyped]
import yaml
from docker.errors import APIError, DockerException, ImageNotFound, NotFound  # type: ignore[import-untyped]
from docker.types import Mount  # type: ignore[import-untyped]
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from tests.stack.process import STOP_SECONDS, Runner, ServiceError

VARIABLE = "ROWDELTA_TEST_STACK"
_SERVICES = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
_COMMAND_SECONDS = 3600
"""How long a command in a container may print nothing."""


def has(service: str) -> bool:
    """Whether a service of the compose file runs in a container."""
    return not lacks(service)


@cache
def lacks(service: str) -> str:
    """Why it doesn't; empty if it does, and all that it depends on does too.

    :raises ServiceError: it must, and can't.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "docker", "local"):
        raise ServiceError(f"{VARIABLE} is '{choice}'; write docker or local")
    if choice == "local":
        return f"{VARIABLE} is local"
    described = _SERVICES[service]
    lack = _lacks_engine() or _lacks_image(described["image"])
    if lack and choice == "docker":
        raise ServiceError(f"{VARIABLE} is docker: {lack}")
    return lack or next(filter(None, map(lacks, described.get("depends_on", {}))), "")


@cache
def _lacks_engine() -> str:
    """Why no Docker engine answers; empty if one does."""
    with warnings.catch_warnings():
        # Where nobody answers, docker-py leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with closing(docker.from_env(timeout=5)) as client:
                client.ping()
            return ""
        except DockerException as error:
            return f"no Docker engine answers: {error}"
        finally:
            gc.collect()


def _lacks_image(image: str) -> str:
    """Why the engine can't have the image; empty if it has it now."""
    with closing(docker.from_env()) as client:
        try:
            try:
                client.images.get(image)
            except ImageNotFound:
                client.images.pull(image)
            return ""
        except DockerException as error:
            return f"there is no {image}: {error}"


@cache
def _network() -> Network:
    """In which the containers of this process find each other by their names."""
    network = Network().create()
    atexit.register(network.remove)
    return network


class Container(Runner):
    """A server in a container, which keeps its files while it is stopped. It serves when `ready` says so and the
    compose file's health check agrees.

    What the compose file mounts from this repository is not in it, and its named volumes are the container's own.
    `environment` and `command` may be changed before the first start. `inside` is host and port for other containers.

    :param port: of 127.0.0.1, for the service's own.
    """

    def __init__(self, service: str, port: int, ready: Callable[[], bool]) -> None:
        super().__init__(service, lambda: ready() and self._is_healthy())
        described = _SERVICES[service]
        self.name = f"rowdelta-{service}-{secrets.token_hex(4)}"
        self.environment = {key: _text(value) for key, value in described.get("environment", {}).items()}
        self.command = list(map(_text, described.get("command", [])))
        self.user: str | None = described.get("user")
        (published,) = described["ports"]
        own = published.rpartition(":")[2]
        self.inside = f"{self.name}:{own}"
        self._described = described
        self._ports = {own: port}
        volumes = [volume.split(":") for volume in described.get("volumes", [])]
        self._mounts = [Mount(target, None) for source, target, *_ in volumes if not source.startswith(".")]
        self._network = _network()  # now: servers start in threads, and each would make one
        self._container: DockerContainer | None = None
        self._is_started = False

    def publish(self, port: int, to: int) -> None:
        """One more port of the container as this one of 127.0.0.1."""
        self._ports[str(port)] = to

    def mount(self, path: Path, target: str | None = None) -> None:
        """Let it have a folder or file of this machine, by default at the same path."""
        self._mounts.append(Mount(target or str(path), str(path), type="bind"))

    def run(self, *command: str) -> None:
        """Run a program in it to its end; ServiceError with what the program printed when it fails."""
        code, printed = self._wrapped.exec_run(command)
        if code != 0:
            raise ServiceError(f"{command[0]} failed in {self.name}\n{printed.decode(errors='replace')}")

    def stop(self) -> None:
        if self._is_started:
            self._is_started = False
            self._wrapped.stop(timeout=STOP_SECONDS)

    def kill(self) -> None:
        if self._is_started:
            self._is_started = False
            with suppress(APIError):  # it has ended by itself
                self._wrapped.kill()
            self._wrapped.wait()

    def pause(self) -> None:
        self._wrapped.pause()

    def resume(self) -> None:
        self._wrapped.unpause()

    @property
    def exit_code(self) -> int | None:
        if not self._is_started:
            return None
        self._wrapped.reload()
        state = self._wrapped.attrs["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def close(self) -> None:
        """Stop the server for good, and remove the container with its volumes."""
        self._is_started = False
        if self._container is not None:
            with suppress(NotFound):  # closed before
                self._container.stop()

    @property
    def is_started(self) -> bool:
        return self._is_started

    @property
    def _wrapped(self) -> Any:
        assert self._container is not None, "not started"
        return self._container.get_wrapped_container()

    def _launch(self) -> None:
        if self._container is None:
            self._container = DockerContainer(
                self._described["image"],
                docker_client_kw={"timeout": _COMMAND_SECONDS},
                env=self.environment,
                name=self.name,
                network=self._network,
                # as in the compose file's network: the health check may ask for it
                hostname=self._name,
                entrypoint=list(map(_text, self._described.get("entrypoint", []))) or None,
                user=self.user,
                mounts=self._mounts,
            )
            if self.command:
                self._container.with_command(self.command)
            # with_bind_ports() would publish them on every interface
            self._container.ports.update({port: ("127.0.0.1", to) for port, to in self._ports.items()})
            self._container.start()
        else:
            self._wrapped.start()
        self._is_started = True

    def _printed(self) -> str:
        return str(self._wrapped.logs().decode(errors="replace"))

    def _is_healthy(self) -> bool:
        how, *command = self._described["healthcheck"]["test"]
        assert how == "CMD"
        with suppress(APIError):  # it has just ended
            return bool(self._wrapped.exec_run(command).exit_code == 0)
        return False


def _text(value: str) -> str:
    """As Compose reads it: `$$` is a `$`."""
    return value.replace("$$", "$")
