"""A server as a child process: started, waited for, stopped, started again; killed and paused.

`Container` in `container.py` has the same verbs; a `Service` is either.
"""

import os
import pwd
import random
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

START_SECONDS = 120
STOP_SECONDS = 5
LOG_TAIL_CHARACTERS = 4000
_PORTS = (20_000, 32_000)


class ServiceError(RuntimeError):
    """A service did not do what was asked of it; the message ends with the tail of its log."""


def free_ports(count: int) -> list[int]:
    """`count` different ports of 127.0.0.1 on which nobody listens now.

    They are below those that systems give to clients: until a server listens, a connection of another process could
    take such a one.
    """
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind(("127.0.0.1", random.randint(*_PORTS)))
                found.append(int(candidate.getsockname()[1]))
        return found


def wait_until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
    """Ask `condition` again and again; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listens(port: int) -> bool:
    """Whether a server takes connections at this port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def finish(command: Sequence[str], failure: str, **options: Any) -> None:
    """Run a program to its end.

    :param failure: what to say if it fails; what the program printed follows.
    :param options: of `subprocess.run`.
    :raises ServiceError: it failed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise ServiceError(f"{failure}\n{done.stdout}")


def java_command() -> str:
    """The `java` to run."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


def java(classpath: Sequence[Path], main_class: str, *arguments: str) -> list[str]:
    """The command line of a small JVM that starts fast rather than runs fast."""
    return [
        java_command(),
        "-Xmx512m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-classpath",
        os.pathsep.join(map(str, classpath)),
        main_class,
        *arguments,
    ]


class Runner(ABC):
    """What starts a server, waits for it and ends it.

    :param ready: asks the server whether it serves yet; it returns False, and does not raise, while nobody answers.
    :param start_seconds: how long it may take until it serves.
    """

    def __init__(self, name: str, ready: Callable[[], bool], start_seconds: float = START_SECONDS) -> None:
        self._name = name
        self._ready = ready
        self._start_seconds = start_seconds

    def start(self) -> None:
        """Start the server and return when it serves; ServiceError when it ends or stays silent instead."""
        was_started = self.is_started
        assert not was_started, "already started"
        self._launch()
        answered = wait_until(
            lambda: not self.is_started or self.exit_code is not None or self._ready(), self._start_seconds
        )
        code = self.exit_code
        if not self.is_started:
            raise ServiceError(f"{self._name} was stopped while it started")
        if answered and code is None:
            return
        outcome = f"ended with code {code}" if answered else f"did not serve within {self._start_seconds} s"
        self.stop()
        raise ServiceError(f"{self._name} {outcome}\n{self._printed()[-LOG_TAIL_CHARACTERS:]}")

    @abstractmethod
    def stop(self) -> None:
        """Ask the server to end, and kill it when it does not within a few seconds. Does nothing when it is stopped."""

    @abstractmethod
    def kill(self) -> None:
        """End the server and its children at once, as a loss of power would. Does nothing when it is stopped."""

    @abstractmethod
    def pause(self) -> None:
        """Let the server and its children hang: connections stay open, and nobody answers."""

    @abstractmethod
    def resume(self) -> None:
        """Let a paused server go on."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """With which it ended by itself; None while it runs, and when it is stopped."""

    def close(self) -> None:
        """Stop the server for good."""
        self.stop()

    @property
    @abstractmethod
    def is_started(self) -> bool:
        """False when nobody has started it, and when it was stopped; it may have ended by itself."""

    @abstractmethod
    def _launch(self) -> None: ...

    @abstractmethod
    def _printed(self) -> str: ...


class Process(Runner):
    """A server with the command line `command`, which adds what it prints to the file `log`.

    :param user: the operating system's user as whom it runs; None for that of this process.
    :param environment: its variables; None for those of this process.
    :param stop_signal: what asks the server to end.
    :param stop_seconds: how long it may take to end before it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        *,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        start_seconds: float = START_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        super().__init__(log.stem, ready, start_seconds)
        self._command = command
        self._log = log
        self._user = user
        self._environment = environment
        self._stop_signal = stop_signal
        self._stop_seconds = stop_seconds
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_started(self) -> bool:
        return self._child is not None

    def _launch(self) -> None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                **as_user(self._user),
            )

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        child = self._child
        if child is None:
            return
        child.send_signal(self._stop_signal)
        child.send_signal(signal.SIGCONT)  # a paused one would not hear it
        try:
            child.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        self._child = None

    def kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        for pid in with_descendants(child.pid):
            _send(pid, signal.SIGKILL)
        child.wait()

    @property
    def exit_code(self) -> int | None:
        child = self._child
        return None if child is None else child.poll()

    def pause(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._child is not None, "not started"
        for pid in with_descendants(self._child.pid):
            _send(pid, number)


class Service:
    """What is a `Process` or a `Container` at heart: something at an address, which is the same after each start."""

    _runner: Runner

    @property
    def is_started(self) -> bool:
        return self._runner.is_started

    def start(self) -> None:
        """Start, or start again at the same address with what it had; returns when it serves."""
        self._runner.start()

    def stop(self) -> None:
        """Ask it to end. Does nothing when it is stopped."""
        self._runner.stop()

    def kill(self) -> None:
        """End it at once, as a loss of power would."""
        self._runner.kill()

    def pause(self) -> None:
        """Let it hang: connections stay open, and nobody answers."""
        self._runner.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._runner.resume()

    def close(self) -> None:
        """Stop it for good, and give back what it used."""
        self._runner.close()


class _Closable(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


_Server = TypeVar("_Server", bound=_Closable)


@contextmanager
def running(made: Callable[[Path], _Server], name: str) -> Iterator[_Server]:
    """A started server. What it kept is gone when the block ends.

    :param made: makes it, with a folder for its files.
    :param name: of the folder.
    """
    with tempfile.TemporaryDirectory(prefix=f"rowdelta-{name}-") as folder:
        server = made(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.close()


def as_user(user: str | None) -> dict[str, Any]:
    """Arguments with which `subprocess` runs a program as this user; none for the user of this process."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def with_descendants(pid: int) -> list[int]:
    """A process and those that came of it, as Linux lists them; only itself elsewhere."""
    found = [pid]
    for each in found:
        with suppress(OSError):  # it may end under the look
            for children in Path("/proc", str(each), "task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, children.read_text().split())
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
