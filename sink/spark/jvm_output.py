"""What Spark's JVM prints. While it starts, that is 10 to 40 lines of the JVM, Ivy and Spark, which nobody needs unless
the start fails. So they are held back, and shown with a failure. Secrets are masked: Ivy prints repositories' URLs.
"""

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from sink.redaction import masked

log = logging.getLogger("rowdelta")

_STDERR = 2
_MOST_LINES = 1000
_DOWNLOAD = re.compile(rb"downloading \S*/([^/\s]+) \.\.\.")
"""A line of Ivy's."""
_END_SECONDS = 2.0
"""Time for the last lines of a JVM that has ended."""


class JvmOutput:
    """Passes on what a JVM prints to stderr, first of all or once the start is over.

    :param is_held: whether lines are held back until then.
    """

    def __init__(self, *, is_held: bool) -> None:
        self._is_held = is_held
        self._lines = deque[bytes](maxlen=_MOST_LINES)
        self._lock = threading.Lock()
        read, self._write = os.pipe()
        self._thread = threading.Thread(
            target=self._pass_on, args=(os.fdopen(read, "rb"),), name="rowdelta-jvm-output", daemon=True
        )
        self._thread.start()

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Yields the file descriptor for a JVM to print to. Afterwards only the JVM has it, so that its end is seen."""
        try:
            yield self._write
        finally:
            os.close(self._write)

    def _pass_on(self, lines: IO[bytes]) -> None:
        with lines:
            for printed in lines:
                line = masked(printed.decode(errors="surrogateescape")).encode(errors="surrogateescape")
                with self._lock:
                    if self._is_held:
                        self._lines.append(line)
                    else:
                        _print(line)
                if found := _DOWNLOAD.search(line):
                    log.info("downloading %s", found[1].decode(errors="replace"))

    def release(self, *, shown: bool) -> None:
        """Pass on from now on what is printed.

        :param shown: whether lines that were held back are shown; the JVM is about to end then.
        """
        if shown:
            self._thread.join(_END_SECONDS)
        with self._lock:
            if shown:
                _print(b"".join(self._lines))
            self._lines.clear()
            self._is_held = False


def _print(text: bytes) -> None:
    with suppress(OSError):  # nobody reads it any more
        os.write(_STDERR, text)
