"""Iceberg's REST catalog fixture, over a SQLite database and a folder or bucket."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.stack.jars import HERE, jars
from tests.stack.process import Process, free_ports, java
from tests.stack.s3 import S3


class RestCatalog:
    """A REST catalog on 127.0.0.1 which keeps its tables in `folder`, also while it is stopped.

    `uri` is what Iceberg's catalog property `uri` takes, `warehouse` the folder under which tables are created.

    :param s3: the store in whose bucket the tables' files are, instead.
    """

    def __init__(self, folder: Path, s3: S3 | None = None) -> None:
        (port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{port}"
        self.warehouse = folder / "warehouse"
        storage = ["io=org.apache.iceberg.hadoop.HadoopFileIO", f"warehouse={self.warehouse.as_uri()}"]
        if s3 is not None:
            storage = ["io=org.apache.iceberg.aws.s3.S3FileIO", f"warehouse=s3://{s3.BUCKET}/iceberg"]
            storage += [f"s3.endpoint={s3.endpoint}", f"s3.region={s3.REGION}"]
            storage += [f"s3.key={s3.KEY}", f"s3.secret={s3.SECRET}"]
        command = java(
            jars(HERE / "ivy-rest-catalog.xml"),
            "org.eclipse.jetty.xml.XmlConfiguration",
            f"port={port}",
            f"database={folder / 'catalog.db'}",
            *storage,
            # After the properties: they are set in the order of the arguments.
            str(HERE / "rest-catalog.xml"),
        )
        self._process = Process(command, folder / "rest-catalog.log", self._answers)

    def start(self) -> None:
        """Start, or start again on the same port with the same tables."""
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/v1/config", timeout=5):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def running_rest_catalog() -> Iterator[RestCatalog]:
    """A started REST catalog; its tables are gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="rowdelta-rest-catalog-") as folder:
        catalog = RestCatalog(Path(folder))
        try:
            catalog.start()
            yield catalog
        finally:
            catalog.stop()
