"""Ctrl-C and SIGTERM while no micro-batch needs to be finished. The process ends soon, and so does its JVM."""

import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from sink.spark.jvm_output import JvmOutput

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
JVM_SECONDS = 5.0
"""Time for the JVM's shutdown hooks, which remove its temporary files. Nothing important depends on them."""
_CLEANUP_SECONDS = 10.0
"""Time for everything else. A thread that waits for a server, for example, can't be interrupted."""
_MUTE_SECONDS = 1.0
"""Time for a JVM that may be too busy to answer."""


class InterruptedBySignalError(KeyboardInterrupt):
    """A signal asked the process to end. The current work stops, unfinished, where it is."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; every table is as its last commit left it")
        self.exit_code = 128 + number


@contextmanager
def raised() -> Iterator[None]:
    """Let signals raise `InterruptedBySignalError` in the main thread. After the first signal, others are ignored until
    everything is cleaned up. If that takes too long, the process ends without it.

    Python handles signals only in the main thread. In other threads this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers = list[threading.Timer]()

    def handle(number: int, _: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        error = InterruptedBySignalError(number)
        timer = threading.Timer(_CLEANUP_SECONDS, _end_at_once, [error])
        timer.daemon = True
        timer.start()
        timers.append(timer)
        jvms.terminate()  # before the exception, so that no thread waits for the JVM meanwhile
        raise error

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        jvms.end()
        raise
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_at_once(error: InterruptedBySignalError) -> None:
    jvms.kill()
    print(f"rowdelta: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def _mute_threads_of_the_jvm() -> None:
    """The JVM's threads that meet parts already stopped print no stacks. What goes through the log is still seen.

    A thread of its own asks the JVM, since a signal may have come in the middle of another call of this one.
    """
    pyspark = sys.modules.get("pyspark")
    gateway = None if pyspark is None else pyspark.SparkContext._gateway
    if gateway is None:
        return

    def mute() -> None:
        with suppress(Exception):  # the JVM may end meanwhile, which is what is wanted
            java = gateway.jvm.java
            java.lang.System.setErr(java.io.PrintStream(java.io.OutputStream.nullOutputStream()))

    thread = threading.Thread(target=mute, name="rowdelta-mute", daemon=True)
    thread.start()
    thread.join(_MUTE_SECONDS)


def _say_nothing(server: socketserver.BaseServer, request: Any, client_address: Any) -> None:
    pass


class _Jvms:
    """The JVMs that this process started. Under `spark-submit` there are none: there the JVM started this process."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ending = False

    @contextmanager
    def noted(self, output: JvmOutput) -> Iterator[None]:
        """Remember the JVM that PySpark starts inside this context.

        :param output: takes what it prints.

        PySpark doesn't give access to the JVM's process before the JVM answers. If PySpark's start is interrupted, it
        removes its temporary folder; the JVM then fails to write there, and stays for ever.
        """
        gateway: Any = import_module("pyspark.java_gateway")
        original = gateway.Popen

        def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            with output.taken() as descriptor:
                options |= {"stdout": descriptor, "stderr": descriptor}
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
        """Ask the JVMs to end, whatever they are doing. Calls that wait for a JVM fail."""
        if not self.ending and any(process.poll() is None for process in self._processes):
            _mute_threads_of_the_jvm()
        self.ending = True
        # of PySpark's server for accumulators, whose connection ends: it would print a stack
        socketserver.BaseServer.handle_error = _say_nothing  # type: ignore[method-assign, assignment]
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self, seconds: float = JVM_SECONDS) -> None:
        """Make sure that the JVMs have ended."""
        self.terminate()
        for process in self._processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


jvms = _Jvms()
