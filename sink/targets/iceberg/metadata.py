"""Reads tables from the JSON of their metadata (Iceberg spec, Table Metadata Fields), without a JVM.

It reads catalogs that give the same answers to every client: `hadoop` on local disks, `jdbc` with SQLite, and `rest`.
For all others, and if anything is unusual, `NeedsSparkError` says that Iceberg's Java library must read the table.
"""

import gzip
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sink.config import Config, PartitionField, TableSection
from sink.config.local_paths import local_path
from sink.errors import NeedsSparkError
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.state import IcebergState, stored, written_properties

if TYPE_CHECKING:
    from pyspark.sql import types as T

    from changelog.spec import ColumnSpec
    from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots
    from sink.targets.iceberg.rest_client import RestClient
    from sink.targets.iceberg.writers import IcebergTableSpec

Metadata = Mapping[str, Any]
_Properties = Mapping[str, str]

_METADATA_TABLES = (
    "entries", "files", "data_files", "delete_files", "history", "metadata_log_entries", "snapshots", "refs",
    "manifests", "partitions", "all_data_files", "all_delete_files", "all_files", "all_manifests", "all_entries",
    "position_deletes",
)  # fmt: skip
"""What Iceberg's library may take the last part of a name for."""
_REST_PROPERTIES = re.compile(
    r"type|uri|warehouse|prefix|credential|token|scope|audience|resource|oauth2-server-uri|header\..+"
    r"|cache-enabled|table-(default|override)\..+|io-impl|(s3|client|gcs|adls)\..+"
)
"""Properties that mean the same to PyIceberg, and properties that have no influence on a table's metadata."""
_OTHER_CLIENT = re.compile(r"catalog-impl|io-impl|hadoop\..+|encryption\..+")
"""Properties of catalogs on file systems that could make Iceberg's library read other files."""
_METADATA_FILE = re.compile(r"v(\d+)(?:\.gz)?\.metadata\.json(?:\.gz)?")
_GZIP = b"\x1f\x8b"
_SECONDS = 5.0


class MetadataTable(IcebergState):
    """A table, read from its metadata.

    :param name: `catalog.namespace.table`.
    """

    def __init__(self, name: str, metadata: Metadata) -> None:
        self.name = name
        self._metadata = metadata
        self._properties: Mapping[str, str] = metadata.get("properties", {})
        self._snapshots = {int(snapshot["snapshot-id"]): snapshot for snapshot in metadata.get("snapshots", ())}

    @cached_property
    def spec(self) -> "IcebergTableSpec":
        from sink.targets.iceberg.writers import IcebergTableSpec

        metadata = self._metadata
        if "schemas" not in metadata or "partition-specs" not in metadata:
            raise NeedsSparkError("metadata of an old version")
        specs = sorted(metadata["partition-specs"], key=lambda spec: int(spec["spec-id"]))
        return IcebergTableSpec(
            location=metadata["location"],
            format_version=int(metadata["format-version"]),
            schema=json.dumps(self._schema),
            specs=tuple(json.dumps(spec) for spec in specs),
            current_spec_id=int(metadata["default-spec-id"]),
            properties=written_properties(self._properties),
        )

    @property
    def _schema(self) -> Mapping[str, Any]:
        current = self._metadata["current-schema-id"]
        found: Mapping[str, Any] = next(s for s in self._metadata["schemas"] if s["schema-id"] == current)
        return found

    def property(self, name: str) -> str | None:
        return self._properties.get(name)

    def stored(self, part: str) -> Mapping[str, str]:
        return stored(self._properties, part)

    def snapshot_id(self) -> int | None:
        current = self._metadata.get("current-snapshot-id")
        return None if current in (None, -1) else int(current)

    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        found = None if snapshot_id is None else self._snapshots.get(snapshot_id)
        return None if found is None else Snapshot.of_json(found)

    def snapshots(self) -> Sequence[Snapshot]:
        return [Snapshot.of_json(snapshot) for snapshot in self._snapshots.values()]

    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        current: int | None = snapshot_id
        while current is not None and current in self._snapshots:
            if current == ancestor_id:
                return True
            current = self._snapshots[current].get("parent-snapshot-id")
        return False

    def expired_snapshots(self) -> "ExpiredSnapshots":
        raise NeedsSparkError(f"{self.name}: what has expired is looked for in files of any kind of storage")

    def columns(self) -> tuple["ColumnSpec", ...]:
        from changelog.spec import ColumnSpec
        from sink.spark import type_names

        return tuple(
            ColumnSpec(
                field["name"],
                type_names.of_iceberg(field["type"]),
                required=field["required"],
                is_uuid=field["type"] == "uuid",
                width=type_names.width_of_iceberg(str(field["type"])),
            )
            for field in self._schema["fields"]
        )

    def sort_order(self) -> Metadata:
        current = self._metadata.get("default-sort-order-id", 0)
        orders = (order for order in self._metadata.get("sort-orders", ()) if order["order-id"] == current)
        return next(orders, {"fields": ()})


class MetadataTables:
    """The tables of a configuration's catalogs."""

    spark = None

    def __init__(self, config: Config) -> None:
        self._catalogs = config.catalogs
        self._clients: dict[str, RestClient] = {}
        self._lock = Lock()

    def load(self, name: str) -> MetadataTable | None:
        """The table, or None if there is none.

        :raises NeedsSparkError: the catalog is of another kind, or doesn't answer as expected.
        """
        catalog, *namespace, table = name.split(".")
        properties = self._catalogs[catalog]
        readers: dict[str, Callable[[str, _Properties, Sequence[str], str], Metadata | None]] = {
            "hadoop": _of_folder,
            "jdbc": _of_sqlite,
            "rest": self._of_rest,
        }
        kind = properties.get("type", "").lower()
        if kind not in readers:
            raise NeedsSparkError(f"catalog {catalog}")
        try:
            metadata = readers[kind](catalog, properties, namespace, table)
            found = None if metadata is None else MetadataTable(name, metadata)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, sqlite3.Error) as error:
            raise NeedsSparkError(f"{name}: {error}") from error
        if found is None and table in _METADATA_TABLES:
            raise NeedsSparkError(name)
        return found

    def check_new(self, section: "TableSection", columns: "T.StructType", path: str) -> None:
        """:raises NeedsSparkError: Iceberg's library might refuse it."""
        if section.partition_by:
            _check_partitioning(columns, section.partition_fields)

    def _of_rest(self, catalog: str, properties: _Properties, namespace: Sequence[str], table: str) -> Metadata | None:
        """Read the server's answer itself, because PyIceberg's own types leave out some parts of it."""
        from pyiceberg.catalog.rest import Endpoints

        try:
            client = self._client(catalog, properties)
            place = client._split_identifier_for_path((*namespace, table))
            response = client._session.get(client.url(Endpoints.load_table, **place))
        except Exception as error:  # of a client's own kinds, which a 404 or an unknown address raises too
            raise NeedsSparkError(f"catalog {catalog}: {error}") from error
        content: dict[str, Any] = response.json()
        if response.status_code == 404:
            if content["error"]["type"] in ("NoSuchTableException", "NoSuchNamespaceException"):
                return None
            raise NeedsSparkError(f"catalog {catalog}: {content['error']['type']}")
        if response.status_code != 200:
            raise NeedsSparkError(f"catalog {catalog}: {response.status_code}")
        return _metadata(content["metadata"])

    def _client(self, catalog: str, properties: _Properties) -> "RestClient":
        from sink.targets.iceberg.rest_client import RestClient

        unknown = [name for name in properties if not _REST_PROPERTIES.fullmatch(name)]
        if unknown:
            raise NeedsSparkError(f"catalog {catalog}: {unknown[0]}")
        with self._lock:
            if catalog not in self._clients:
                self._clients[catalog] = RestClient(catalog, _SECONDS, **properties)
            return self._clients[catalog]


def _of_folder(catalog: str, properties: _Properties, namespace: Sequence[str], table: str) -> Metadata | None:
    """Find the metadata like Iceberg's `HadoopTableOperations`."""
    _check_client(catalog, properties)
    folder = local_path(properties["warehouse"]).joinpath(*namespace, table, "metadata")
    try:
        version = int((folder / "version-hint.text").read_text().strip())
    except FileNotFoundError:
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        version = max((int(found[1]) for name in names if (found := _METADATA_FILE.fullmatch(name))), default=0)
    file = _metadata_file(folder, version)
    if file is None:
        if version == 0:
            return None
        raise NeedsSparkError(f"{folder}: no version {version}")
    while (newer := _metadata_file(folder, version + 1)) is not None:
        file, version = newer, version + 1
    return _read(file)


def _metadata_file(folder: Path, version: int) -> Path | None:
    names = [f"v{version}.metadata.json", f"v{version}.gz.metadata.json", f"v{version}.metadata.json.gz"]
    return next((folder / name for name in names if (folder / name).exists()), None)


def _of_sqlite(catalog: str, properties: _Properties, namespace: Sequence[str], table: str) -> Metadata | None:
    """Find the metadata where Iceberg's `JdbcCatalog` stores it."""
    _check_client(catalog, properties)
    uri = re.fullmatch(r"jdbc:sqlite:([^:?]+)", properties["uri"])
    if uri is None:
        raise NeedsSparkError(f"catalog {catalog}: only a driver of Java's knows its database")
    if not Path(uri[1]).exists() and Path(uri[1]).parent.is_dir():
        return None
    with closing(sqlite3.connect(f"file:{quote(uri[1])}?mode=ro", uri=True, timeout=_SECONDS)) as database:
        database.row_factory = sqlite3.Row
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'iceberg_tables'").fetchone():
            return None
        row = database.execute(
            "SELECT * FROM iceberg_tables WHERE catalog_name = ? AND table_namespace = ? AND table_name = ?",
            (catalog, ".".join(namespace), table),
        ).fetchone()
    if row is None or dict(row).get("iceberg_type") not in (None, "TABLE"):
        return None
    return _read(local_path(row["metadata_location"]))


def _check_client(catalog: str, properties: _Properties) -> None:
    found = [name for name in properties if _OTHER_CLIENT.fullmatch(name)]
    if found:
        raise NeedsSparkError(f"catalog {catalog}: {found[0]}")


def _read(file: Path) -> Metadata:
    content = file.read_bytes()
    return _metadata(json.loads(gzip.decompress(content) if content.startswith(_GZIP) else content))


def _metadata(content: Any) -> Metadata:
    """:raises ValueError: it isn't a table's metadata."""
    if not isinstance(content, dict):
        raise ValueError(f"expected metadata, got {str(content)[:80]}")
    return content


def _check_partitioning(columns: "T.StructType", partition_by: Sequence[PartitionField]) -> None:
    """Accept only what is certainly right.

    :raises NeedsSparkError: Iceberg's library might refuse it.
    """
    types = {field.name: field.dataType.typeName() for field in columns}
    names = []
    for field in partition_by:
        if not re.fullmatch(_PARTITIONED[field.transform], types.get(field.column, "")):
            raise NeedsSparkError(f"{field.transform} of {field.column}")
        suffix = {"identity": "", "truncate": "_trunc"}.get(field.transform, f"_{field.transform}")
        names.append(f"{field.column}{suffix}")
    times = [field.column for field in partition_by if field.transform in _TIMES]
    whole = [field.column for field in partition_by if field.transform == "identity"]
    derived = set(names) - set(whole)
    if len(set(names)) < len(names) or len(set(times)) < len(times) or derived & types.keys():
        raise NeedsSparkError("partition fields that may say the same")


_TIMES = ("year", "month", "day", "hour")
_DATES = r"date|timestamp|timestamp_ntz"
_EXACT = r"byte|short|integer|long|decimal|string|binary"
_PARTITIONED = {
    "identity": rf"boolean|{_EXACT}|{_DATES}",
    "bucket": rf"{_EXACT}|{_DATES}",
    "truncate": _EXACT,
    "year": _DATES,
    "month": _DATES,
    "day": _DATES,
    "hour": r"timestamp|timestamp_ntz",
}
"""Types of Spark's (`typeName`) that a transform takes."""
