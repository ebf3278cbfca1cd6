"""A Java server as a child process: started, waited for, stopped, started again."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

START_SECONDS = 60
STOP_SECONDS = 5
LOG_TAIL_CHARACTERS = 4000


class ServiceError(RuntimeError):
    """A service did not do what was asked of it; the message ends with the tail of its log."""


def free_ports(count: int) -> list[int]:
    """`count` different ports of 127.0.0.1 on which nobody listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def wait_until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
    """Ask `condition` again and again; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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


class Process:
    """A server with the command line `command`, which adds what it prints to the file `log`.

    `ready` asks the server whether it serves yet; it returns False, and does not raise, while nobody answers.
    """

    def __init__(self, command: Sequence[str], log: Path, ready: Callable[[], bool]) -> None:
        self._command = command
        self._log = log
        self._ready = ready
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return when it serves; ServiceError when it ends or stays silent instead."""
        assert self._child is None, "already started"
        with self._log.open("ab") as log:
            child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._child = child
        answered = wait_until(lambda: child.poll() is not None or self._ready())
        if answered and child.poll() is None:
            return
        outcome = f"ended with code {child.returncode}" if answered else f"did not serve within {START_SECONDS} s"
        self.stop()
        tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise ServiceError(f"{self._log.stem} {outcome}\n{tail}")

    def stop(self) -> None:
        """Ask the server to end, and kill it when it does not within a few seconds. Does nothing when it is stopped."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
