"""Iceberg's REST catalog fixture, over a SQLite database and a folder or bucket."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.stack.container import Container, has
from tests.stack.jars import HERE, jars
from tests.stack.process import Process, Service, free_ports, java, running
from tests.stack.s3 import S3


class RestCatalog(Service):
    """A REST catalog on 127.0.0.1 which keeps its tables in `folder`, also while it is stopped.

    `uri` is what Iceberg's catalog property `uri` takes, `warehouse` the folder under which tables are created.

    :param s3: the store in whose bucket the tables' files are, instead.
    """

    def __init__(self, folder: Path, s3: S3 | None = None) -> None:
        (port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{port}"
        self.warehouse = folder / "warehouse"
        if has("catalog"):
            self._runner = self._container(port, folder, s3)
        else:
            self._runner = self._local(port, folder, s3)

    def _container(self, port: int, folder: Path, s3: S3 | None) -> Container:
        container = Container("catalog", port, self._answers)
        if s3 is not None:
            container.environment |= {
                "CATALOG_S3_ENDPOINT": s3.endpoint_inside,
                "CATALOG_S3_ACCESS__KEY__ID": s3.KEY,
                "CATALOG_S3_SECRET__ACCESS__KEY": s3.SECRET,
            }
            return container
        container.environment |= {
            "CATALOG_URI": f"jdbc:sqlite:{folder / 'catalog.db'}",
            "CATALOG_WAREHOUSE": self.warehouse.as_uri(),
            "CATALOG_IO__IMPL": "org.apache.iceberg.hadoop.HadoopFileIO",
        }
        # Its folders must be this user's too, whom Hadoop wants to know by name.
        container.user = f"{os.getuid()}:{os.getgid()}"
        users = folder / "passwd"
        users.write_text(f"tests:x:{container.user}::/tmp:/bin/sh\n")
        container.mount(users, "/etc/passwd")
        container.mount(folder)
        return container

    def _local(self, port: int, folder: Path, s3: S3 | None) -> Process:
        storage = ["io=org.apache.iceberg.hadoop.HadoopFileIO", f"warehouse={self.warehouse.as_uri()}"]
        if s3 is not None:
            storage = ["io=org.apache.iceberg.aws.s3.S3FileIO", f"warehouse=s3://{s3.BUCKET}/iceberg"]
            storage += [f"s3.endpoint={s3.endpoint_inside}", f"s3.region={s3.REGION}"]
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
        return Process(command, folder / "rest-catalog.log", self._answers)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/v1/config", timeout=5):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False


def running_rest_catalog() -> AbstractContextManager[RestCatalog]:
    """A started REST catalog; its tables are gone when the block ends."""
    return running(RestCatalog, "rest-catalog")
