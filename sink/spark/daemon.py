"""Spark's daemon of Python workers, with all that the sink's tasks import, and without the pauses of small messages.

Spark has the daemon fork a worker for each task that finds none idle. The workers have what the daemon has imported:
otherwise each would import it again, which takes a second.
"""

import gc
import io
import os
import socket
from collections.abc import Callable
from typing import IO, Any

import pyspark.daemon

# No more than imports: a thread would be missing in the forked workers. Tasks import a target's modules when they
# unpickle a table.
import sink.spark.deletes
import sink.spark.tasks.decode
import sink.spark.tasks.index
import sink.spark.tasks.move
import sink.spark.tasks.shares
import sink.spark.tasks.write
import sink.targets.delta.uniting
import sink.targets.iceberg.uniting  # noqa: F401

_BUFFER_BYTES = 64 * 1024


class AcknowledgingReader(io.RawIOBase):
    """Reads from a TCP connection, and acknowledges at once what it has read.

    The JVM sends a task's input in small parts, and holds one back until the one before is acknowledged (Nagle's
    algorithm). Linux waits 40 ms with that, in case something is to be sent along: longer than a small task works.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._connection.recv_into(buffer)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # the setting doesn't last
        return count


def serve(run: Callable[[IO[bytes], IO[bytes]], None], infile: IO[bytes], outfile: IO[bytes]) -> None:
    """Let a worker serve one task (`run`), without the delays of TCP.

    :param infile: the worker's end of its connection to the JVM, of which nothing is read yet.
    """
    with socket.socket(fileno=os.dup(infile.fileno())) as connection:
        if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_QUICKACK"):  # only Linux has it
            run(infile, outfile)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        run(io.BufferedReader(AcknowledgingReader(connection), _BUFFER_BYTES), outfile)


if __name__ == "__main__":
    main = pyspark.daemon.worker_main
    pyspark.daemon.worker_main = lambda infile, outfile: serve(main, infile, outfile)
    gc.freeze()  # workers collect garbage after each task, and needn't look through all modules for it
    pyspark.daemon.manager()  # type: ignore[no-untyped-call]
