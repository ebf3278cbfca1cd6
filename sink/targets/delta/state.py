"""A Delta table's state, by its log: what is live, and where the sink's position is, also after a RESTORE.

The sink's own state is a metadata domain, `rowdelta.<sink id>`. Its configuration is a JSON object of texts, by the
last part of a property's name. So the position is in the same commit as the data, survives checkpoints, and two commits
that write one domain conflict (PROTOCOL.md, "Domain Metadata").

RESTORE takes back the files, and neither domains nor `txn` (delta-io/delta#1813). So `position` looks for a RESTORE in
the log since the commit that stored the position.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.amounts import amounts
from changelog.spec import ColumnSpec
from sink.errors import TableError
from sink.targets.delta.actions import CLONE, Commit, made_and_taken_back
from sink.targets.delta.live_files import LiveFiles, full
from sink.targets.delta.log import DeltaLog, Snapshot
from sink.targets.delta.table_properties import PROPERTIES, check_columns, check_protocol, check_required
from sink.targets.delta.tags import POSITION, VECTOR, WRITER
from sink.targets.delta.writers import DeltaTableSpec
from sink.targets.locations import check_location
from sink.targets.seam import Table
from sink.targets.values import OF_POSITION, FileCounts, LastCommit, StoredPosition

if TYPE_CHECKING:
    from sink.config import TableSection


_OWN = "rowdelta."
_ROW_TRACKING = "rowTracking"
_FIRST = 20
"""A commit has so many others before it at most since it was begun, unless there is a crowd."""
_MOST_KNOWN = 1000
"""So many commits of the sink are remembered with their versions."""


@dataclass(frozen=True)
class Layout:
    """What files are written for. Delta itself refuses a commit after any change of it; this says so earlier."""

    table_id: str
    schema: str
    partition_columns: tuple[str, ...]
    properties: tuple[tuple[str, str], ...]
    features: frozenset[str]


class DeltaState(Table):
    """One Delta table as its log has it. Its snapshot ids are versions.

    :param name: catalog.namespace.table.
    :param frame: reads the table's rows in a session.
    :param io_properties: properties with which tasks reach the table's files.
    """

    snapshot_word = "version"

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        log: DeltaLog,
        frame: Callable[[SparkSession], DataFrame],
        io_properties: Mapping[str, str],
    ) -> None:
        self.spark = spark
        self.name = name
        self.log = log
        self.rows_in = frame
        self._io_properties = tuple(io_properties.items())
        self._live = LiveFiles(log)
        self._spec: tuple[Layout, DeltaTableSpec] | None = None
        # operation -> its version, and the version up to which no RESTORE followed it
        self._made_by: dict[str, tuple[int, int]] = {}
        # sink -> its newest operation, if a RESTORE followed it, and what belongs to the position that holds now
        self._restored: dict[str, tuple[str, dict[str, str]]] = {}
        self._snapshot: Snapshot = log.refresh()

    def refresh(self) -> None:
        self._snapshot = self.log.refresh()

    @property
    def table_id(self) -> str:
        return self._snapshot.metadata.table_id

    @property
    def layout(self) -> Layout:
        metadata = self._snapshot.metadata
        written = {name: value for name, value in metadata.configuration.items() if not name.startswith(_OWN)}
        features = self._snapshot.protocol.reader_features | self._snapshot.protocol.writer_features
        properties = tuple(sorted(written.items()))
        return Layout(self.table_id, metadata.schema, metadata.partition_columns, properties, features)

    @property
    def spec(self) -> DeltaTableSpec:
        layout = self.layout
        if self._spec is None or self._spec[0] != layout:
            self._spec = (
                layout,
                DeltaTableSpec(
                    location=self.log.path,
                    schema=layout.schema,
                    partition_columns=layout.partition_columns,
                    properties=layout.properties,
                    supports_vectors="deletionVectors" in self._snapshot.protocol.writer_features,
                    io_properties=self._io_properties,
                ),
            )
        return self._spec[1]

    @property
    def live(self) -> Mapping[str, Mapping[str, Any]]:
        """The content of each live file's `add`, by decoded path."""
        return self._live.at(self._snapshot.version)

    def full_path(self, path: str) -> str:
        """The full path of a data file, as tasks name it."""
        return full(self.log.path, path)

    def property(self, name: str) -> str | None:
        domain, _, key = name.rpartition(".")
        if name.startswith(_OWN):
            own = self.own_state(domain).get(key)
            if own is not None:
                return own
        return self._snapshot.metadata.configuration.get(name)

    def own_state(self, prefix: str) -> dict[str, str]:
        """The sink's state in this table: property's last part -> value."""
        text = self._snapshot.domains.get(prefix)
        found: dict[str, str] = {} if text is None else json.loads(text)
        operation, earlier = self._restored.get(prefix, (None, {}))
        if operation is not None and operation == json.loads(found.get("position", "{}")).get("operation"):
            found = {key: value for key, value in found.items() if key not in OF_POSITION} | earlier
        return found

    def stored(self, part: str) -> Mapping[str, str]:
        states = {name: self.own_state(name) for name in self._snapshot.domains if name.startswith(_OWN)}
        return {name: state[part] for name, state in states.items() if part in state}

    def snapshot_id(self) -> int:
        return self._snapshot.version

    def last_commit(self) -> LastCommit:
        live = self.live
        with_vectors = sum("deletionVector" in add for add in live.values())
        counts = amounts({"data file": len(live), "deletion vector": with_vectors}, "no data files")
        files = FileCounts(len(live), with_vectors)
        return LastCommit(self._snapshot.version, self._snapshot.timestamp_ms, counts, files)

    def next_txn(self, prefix: str) -> int:
        """The version of the sink's next `txn` action."""
        return self._snapshot.transactions.get(prefix, 0) + 1

    def took(self, commit: Commit) -> None:
        """Take over a commit of the sink's own, so that it needn't be read."""
        if _ROW_TRACKING not in self._snapshot.protocol.writer_features:
            self._live.apply(commit)  # else Delta has given new files row ids, which only the log tells
        # a commit of ours restores nothing, so what was known of earlier ones stays right
        self._made_by = {
            operation: (made, commit.version if checked == commit.version - 1 else checked)
            for operation, (made, checked) in list(self._made_by.items())[-_MOST_KNOWN:]
        }
        if commit.operation_id is not None:
            self._made_by[commit.operation_id] = commit.version, commit.version
        self._live.forget_before(commit.version - 1)  # nobody asks for more than the last commit's base
        self._snapshot = self.log.committed(commit.version)

    def is_empty(self) -> bool:
        return not self.live

    def columns(self) -> tuple[ColumnSpec, ...]:
        struct = T.StructType.fromJson(json.loads(self._snapshot.metadata.schema))
        return tuple(ColumnSpec(field.name, field.dataType, required=not field.nullable) for field in struct)

    def identifiers(self) -> tuple[str, ...]:
        return ()  # Delta has no such thing; primary keys of a catalog are not in the log

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        protocol, metadata = self._snapshot.protocol, self._snapshot.metadata
        found = {
            "minReaderVersion": protocol.reader_version,
            "minWriterVersion": protocol.writer_version,
            "readerFeatures": sorted(protocol.reader_features),
            "writerFeatures": sorted(protocol.writer_features),
        }
        check_protocol(self.name, found)
        check_location(self.name, self.log.path)
        PROPERTIES.check(self.name, metadata.configuration, appends=appends, copies=copies)
        check_columns(self.name, metadata.schema)
        check_required(self.name, found, metadata.configuration, appends=appends, copies=copies)

    def check_fits(self, section: "TableSection") -> None:
        partitioned = self._snapshot.metadata.partition_columns
        wanted = [field.column for field in section.partition_fields]
        if list(partitioned) != wanted if section.partition_by else not {*wanted} <= {*partitioned}:
            raise TableError(
                f"{self.name} exists, and its partitioning ({', '.join(partitioned) or 'not partitioned'}) differs "
                "from partition_by. Correct partition_by, or leave it out: Delta Lake can't change it, only build the "
                "table anew (docs/change-a-table.md)."
            )
        clustered = self.clustering()
        if section.cluster_by and clustered != section.cluster_by:
            raise TableError(
                f"{self.name} exists, and its clustering ({', '.join(clustered) or 'not clustered'}) differs from "
                "cluster_by. Correct cluster_by, leave it out, or change the table (ALTER TABLE … CLUSTER BY)."
            )
        for column in self.columns():
            if column.name in partitioned and isinstance(column.type, T.BinaryType):
                raise TableError(
                    f"{self.name} is partitioned by {column.name}, which is binary. Delta writes its values as text, "
                    "and not all bytes are text. Partition by another column."
                )
            if column.name in section.key and isinstance(column.type, T.FloatType | T.DoubleType):
                raise TableError(
                    f"{self.name}: key column {column.name} is floating-point, and NaN and -0.0 tell no rows apart. "
                    "Use decimal or string."
                )

    def clustering(self) -> list[str]:
        """The columns by which the table is clustered (PROTOCOL.md, "Clustered Table")."""
        text = self._snapshot.domains.get("delta.clustering")
        physical = [".".join(path) for path in json.loads(text)["clusteringColumns"]] if text is not None else []
        names = {column.physical_name: column.name for column in self.spec.columns}
        return [names.get(name, name) for name in physical]

    def not_followed(self) -> Iterator[str]:
        yield from PROPERTIES.ignored(self._snapshot.metadata.configuration)

    def position(self, prefix: str, *, newest_if_in_doubt: bool = False) -> StoredPosition | None:
        text = self.property(f"{prefix}.position")
        if text is None:
            return None
        found = self._position_at(self._snapshot, prefix, newest_if_in_doubt=newest_if_in_doubt)
        if found is None:
            return None
        position, state = found
        newest = json.loads(text)["operation"]
        self._restored.pop(prefix, None)
        if position.operation != newest:
            self._restored[prefix] = newest, {key: value for key, value in state.items() if key in OF_POSITION}
        return position

    def _position_at(
        self, snapshot: Snapshot, prefix: str, *, newest_if_in_doubt: bool
    ) -> tuple[StoredPosition, dict[str, str]] | None:
        """The position in a snapshot, and the sink's state that was stored with it."""
        state: dict[str, str] = json.loads(snapshot.domains.get(prefix, "{}"))
        if "position" not in state:
            if newest_if_in_doubt:
                return None
            raise TableError(
                f"{self.name} was restored to version {snapshot.version}, before this sink's first commit. To read the "
                "source again from the start, use rowdelta reset (see docs/operations.md, Reset)."
            )
        stored = json.loads(state["position"])
        same_table = stored.get("table", snapshot.metadata.table_id) == self._snapshot.metadata.table_id
        after, until = int(stored["after"]), snapshot.version
        committed, restored = self._since(stored["operation"], after, until, gives_up=newest_if_in_doubt)
        if not same_table or (restored is not None and restored.info.get("operation") == CLONE):
            if newest_if_in_doubt:
                return None
            raise TableError(
                f"{self.name} was replaced by another table since this sink's last commit (CREATE OR REPLACE TABLE, or "
                "CLONE). To read the source again from the start, use rowdelta reset (see docs/operations.md, "
                "Reset)."
            )
        trusted = newest_if_in_doubt or self.property(f"{prefix}.not-rolled-back") == stored["operation"]
        if restored is not None:
            try:
                earlier = self.log.snapshot_at(self.restored_version(restored))
            except TableError:  # the log has no longer what that version is made of
                if newest_if_in_doubt:
                    return None
                raise
            return self._position_at(earlier, prefix, newest_if_in_doubt=newest_if_in_doubt)
        if committed is None and not trusted and not self._has_files_of(stored["operation"], snapshot):
            raise TableError(
                f"{self.name}: the log no longer has the version of this sink's last commit, so nothing tells whether "
                "the table was restored to an earlier version since. If it was not, set the table property "
                f"'{prefix}.not-rolled-back' to '{stored['operation']}', and start again. If it was, use "
                "rowdelta reset to read the source again from the start (see docs/operations.md, Reset)."
            )
        index, last = stored.get("index"), committed
        newer = json.loads(state.get("index", "{}"))
        if newer.get("operation") == stored["operation"]:
            index = newer["index"]
            last = self._since(newer["commit"], int(newer["after"]), until, gives_up=newest_if_in_doubt)[0]
        position = StoredPosition(
            stored["position"], stored["operation"], committed, index if last is not None else None, last
        )
        return position, state

    def _since(self, operation: str, after: int, until: int, *, gives_up: bool) -> tuple[int | None, Commit | None]:
        """The version that an operation made after the version `after`, and the last RESTORE or CLONE that followed it
        up to the version `until`.

        :param gives_up: if there are thousands of commits, only the first ones are read, and nothing is said about a
            RESTORE.
        """
        known, checked = self._made_by.get(operation, (None, after))
        if known is not None and checked >= until:
            return known, None
        commits: Sequence[Commit] | None = self._live.commits_since(checked)
        if commits is None and gives_up:
            return self._made_soon(operation, after, until) if known is None else known, None
        if commits is None:
            commits = self.log.commits(checked + 1, until, with_actions=False)
        if commits is None:  # log clean-up has deleted some, and one of them may have been a RESTORE
            return None, None
        made, restored = made_and_taken_back((c for c in commits if c.version <= until), operation)
        made = known if made is None else made
        if made is not None and restored is None:
            self._made_by[operation] = made, until
        return made, restored

    def _made_soon(self, operation: str, after: int, until: int) -> int | None:
        """The version that an operation made, if it is one of the first after the version `after`."""
        commits = self.log.commits(after + 1, min(until, after + _FIRST), with_actions=False) or ()
        made, _ = made_and_taken_back(commits, operation)
        if made is not None:
            self._made_by[operation] = made, made
        return made

    def _has_files_of(self, operation: str, snapshot: Snapshot) -> bool:
        """Whether a file is live that the sink's commit added, or to which rows were moved after it. Then the table
        wasn't taken back to before it.
        """
        tags = (add.get("tags") or {} for add in self.live.values())
        return snapshot.version == self._snapshot.version and any(
            operation in (found.get(WRITER), found.get(VECTOR), found.get(POSITION)) for found in tags
        )

    def restored_version(self, commit: Commit) -> int:
        """The version to which a RESTORE took the table."""
        parameters = commit.info.get("operationParameters", {})
        version = parameters.get("version")
        if version not in (None, "null"):
            return int(version)
        found = self._version_restored_at(commit, parameters.get("timestamp"))
        if found is None:
            raise TableError(
                f"{self.name}: version {commit.version} of the log is a RESTORE that doesn't say to which version. Say "
                "it: RESTORE TABLE … TO VERSION AS OF the same one. Or use rowdelta reset to read the source "
                "again from the start (see docs/operations.md, Reset)."
            )
        return found

    def _version_restored_at(self, commit: Commit, moment: str | None) -> int | None:
        """The version that a RESTORE to a time took. The time is a text without a zone, so the version is taken only if
        the table had the same files and vectors then as after the RESTORE.
        """
        at = self.spark.range(1).select(F.unix_millis(F.try_to_timestamp(F.lit(moment)))).collect()[0][0]
        found = None if at is None else self.log.version_at(int(at))
        if found is None or found >= commit.version:
            return None
        return found if self._files_at(found) == self._files_at(commit.version) else None

    def _files_at(self, version: int) -> set[tuple[str, str]]:
        """Path and vector of each file that was live."""
        adds = self.log.live_files(version)
        return {(add["path"], json.dumps(add.get("deletionVector"), sort_keys=True)) for add in adds}

    def _commits_since(self, base: int) -> list[Commit] | None:
        """Commits after a version up to the one that is known here. The log may have newer ones already."""
        commits = self._live.commits_since(base)
        return None if commits is None else [commit for commit in commits if commit.version <= self._snapshot.version]
