"""A Hive metastore, of the version that PySpark has, over an embedded database (Derby)."""

from contextlib import AbstractContextManager
from pathlib import Path

import pyspark

from tests.stack.jars import HERE
from tests.stack.process import Process, Service, free_ports, java, listens, running


class HiveMetastore(Service):
    """A metastore on 127.0.0.1 which keeps its tables in `folder`, also while it is stopped.

    `uri` is what Iceberg's catalog property `uri` takes, `warehouse` the folder under which tables are created.
    """

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.uri = f"thrift://127.0.0.1:{port}"
        self.warehouse = folder / "warehouse"
        database = folder / "database"
        classpath = sorted(Path(pyspark.__file__).parent.glob("jars/*.jar"))
        program, *options = java(classpath, str(HERE / "HiveMetastore.java"))
        options += [str(port), str(database), self.warehouse.as_uri()]
        own = [f"-Dderby.stream.error.file={folder / 'derby.log'}"]
        self._runner = Process([program, *own, *options], folder / "hive-metastore.log", lambda: listens(port))


def running_hive_metastore() -> AbstractContextManager[HiveMetastore]:
    """A started metastore; its tables are gone when the block ends."""
    return running(HiveMetastore, "hive")
