"""An S3 store in memory."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.stack.process import Process, free_ports


class S3:
    """A store on 127.0.0.1 that takes any keys, and forgets everything when it stops. Its bucket is `BUCKET`."""

    BUCKET = "lake"

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = Process(command, folder / "s3.log", self._answers)

    def start(self) -> None:
        self._process.start()
        with urlopen(Request(f"{self.endpoint}/{self.BUCKET}", method="PUT"), timeout=30):
            pass

    def stop(self) -> None:
        self._process.stop()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.endpoint}/moto-api/", timeout=5):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def running_s3() -> Iterator[S3]:
    """A started store."""
    with tempfile.TemporaryDirectory(prefix="rowdelta-s3-") as folder:
        store = S3(Path(folder))
        try:
            store.start()
            yield store
        finally:
            store.stop()
