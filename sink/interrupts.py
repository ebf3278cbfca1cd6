"""Ctrl-C and SIGTERM while nothing is applied yet, or where there is nothing to finish: the process ends soon, and its
JVM with it.
"""

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_JVM_SECONDS = 5.0
"""For the JVM's own shutdown hooks, which remove its temporary files. Nothing that counts depends on them."""


class InterruptedBySignalError(KeyboardInterrupt):
    """A signal asked the process to end. Whatever is in between two steps is left as it is."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def raised() -> Iterator[None]:
    """Signals raise `InterruptedBySignalError` in the main thread; once one has, others wait until all is cleaned up.

    In another thread signals can't be handled: there nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        jvms.terminate()  # first, so that no thread waits for it while the exception is on its way
        raise InterruptedBySignalError(number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        jvms.end()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Jvms:
    """The JVMs that this process started; under `spark-submit` there are none, it is the JVM's child."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ending = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the JVM that PySpark starts meanwhile.

        PySpark itself tells nobody of it before it answers. If its start is broken off, it misses PySpark's temporary
        folder, fails there, and stays for ever.
        """
        gateway: Any = import_module("pyspark.java_gateway")
        original = gateway.Popen

        def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = original(*arguments, **options)
            self._processes.append(process)
            if self.ending:
                process.kill()
            return process

        gateway.Popen = popen
        try:
            yield
        finally:
            gateway.Popen = original

    def terminate(self) -> None:
        """Have them end, whatever they are doing. Calls that wait for them fail."""
        self.ending = True
        for process in self._processes:
            process.terminate()

    def end(self) -> None:
        """See to it that they have ended."""
        self.terminate()
        for process in self._processes:
            try:
                process.wait(_JVM_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


jvms = _Jvms()
