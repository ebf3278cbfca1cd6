"""An Iceberg table's state: where the sink's position is, also after a rollback, and whether the sink can write it.

These rules know no Java: `sink.targets.iceberg.java_table` reads the metadata for them.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from changelog.amounts import amounts
from deltawriters.ordering import RowOrder
from sink.errors import TableError
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.table_properties import FEATURES, PROPERTIES
from sink.targets.locations import check_location
from sink.targets.seam import TableView
from sink.targets.values import NO_FLOATS, FileCounts, LastCommit, StoredPosition

if TYPE_CHECKING:
    from sink.config import TableSection
    from sink.sources.source import Position
    from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots
    from sink.targets.iceberg.writers import IcebergTableSpec


_OWN = "rowdelta."
"""Begins the names of the properties that the sink sets."""


def stored(properties: Mapping[str, str], part: str) -> dict[str, str]:
    """The values of properties `<prefix>.<part>`, by prefix (`rowdelta.…`)."""
    split = ((name.rpartition("."), value) for name, value in properties.items())
    return {prefix: value for (prefix, _, last), value in split if last == part and prefix.startswith("rowdelta.")}


def written_properties(properties: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The properties by which the table is written, sorted: all but those that the sink sets."""
    return tuple(sorted((name, value) for name, value in properties.items() if not name.startswith(_OWN)))


@dataclass(frozen=True)
class Layout:
    """What files are written for."""

    schema_id: int
    spec_id: int
    format_version: int


class IcebergState(TableView):
    """An Iceberg table as it was when it was read."""

    snapshot_word = "snapshot"

    @property
    @abstractmethod
    def spec(self) -> "IcebergTableSpec": ...

    @abstractmethod
    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        """The snapshot with this id; None if it isn't known (any more)."""

    @abstractmethod
    def snapshots(self) -> Sequence[Snapshot]:
        """All snapshots that the table still has."""

    @abstractmethod
    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        """Whether a snapshot is the same as another one, or one of its known ancestors."""

    @abstractmethod
    def expired_snapshots(self) -> "ExpiredSnapshots":
        """What can still be found out about snapshots that have expired."""

    @abstractmethod
    def sort_order(self) -> Mapping[str, Any]:
        """Its sort order, as Iceberg stores it (spec, Sorting)."""

    def row_order(self) -> RowOrder | None:
        fields = self.sort_order()["fields"]
        columns = [self._sorted_column(field) for field in fields]
        if not columns or None in columns:
            return None
        names = [name for name in columns if name is not None]
        return RowOrder(
            tuple(names),
            frozenset(name for name, field in zip(names, fields, strict=True) if field["direction"] == "desc"),
            frozenset(name for name, field in zip(names, fields, strict=True) if field["null-order"] == "nulls-last"),
        )

    def _sorted_column(self, field: Mapping[str, Any]) -> str | None:
        """The column of a sort field. None if it is computed, or inside of another one."""
        top = {column.field_id: column.name for column in self.spec.iceberg_schema.fields}
        return top.get(field["source-id"]) if field["transform"] == "identity" else None

    def older_of(self, first: int, second: int) -> int:
        if self.snapshot(first) is None:
            return second
        return first if self.snapshot(second) is None or self.is_ancestor(first, second) else second

    def current_snapshot(self) -> Snapshot | None:
        return self.snapshot(self.snapshot_id())

    def last_commit(self) -> LastCommit | None:
        current = self.current_snapshot()
        if current is None:
            return None
        named = {"data file": "data-files", "delete file": "delete-files", "equality delete": "equality-deletes"}
        totals = {noun: int(current.summary.get(f"total-{name}") or 0) for noun, name in named.items()}
        counts = amounts(totals, "no data files")
        return LastCommit(current.snapshot_id, current.timestamp_ms, counts, _live(current.summary))

    def identifiers(self) -> tuple[str, ...]:
        check_types(self)
        schema = self.spec.iceberg_schema
        names = schema.identifier_field_names()
        columns = (schema.find_column_name(field.field_id) for field in schema.fields)
        return tuple(name for name in columns if name in names)

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        PROPERTIES.check(self.name, self.spec.properties_by_name, appends=appends, copies=copies)
        check_types(self)
        check_location(self.name, self.spec.properties_by_name.get("write.data.path", self.spec.location))

    def check_fits(self, section: "TableSection") -> None:
        self._check_key(section)
        self._check_partitioning(section)
        if self.spec.format_version < 2:
            raise TableError(f"{self.name} has format version 1, which has no row-level deletes. Upgrade it to 2 or 3.")
        if self.spec.format_version > 3:
            raise TableError(
                f"{self.name} has format version {self.spec.format_version}, which this release doesn't know. Write to "
                "a table of version 2 or 3."
            )

    def not_followed(self) -> Iterator[str]:
        yield from PROPERTIES.ignored(self.spec.properties_by_name)
        if self.sort_order()["fields"] and self.row_order() is None:
            does = FEATURES["sort order with a transform, or a field of a struct"].does
            yield f"the table's sort order is not followed: {does}"
        for column in self.spec.iceberg_schema.fields:
            if column.write_default is not None:
                does = FEATURES["write default of a column"].does
                yield f"the write default of column {column.name} is not followed: {does}"

    def _check_key(self, section: "TableSection") -> None:
        schema = self.spec.iceberg_schema
        identifiers = schema.identifier_field_names()
        if section.mode == "append":
            return
        if identifiers and identifiers != set(section.key):
            raise TableError(
                f"{section.target} has the identifier fields {', '.join(sorted(identifiers))}, but key is "
                f"{', '.join(section.key)}. They must be the same: correct key, or see docs/change-a-table.md, The key."
            )
        for name in section.key:
            if str(schema.find_type(name)) in ("float", "double"):
                raise TableError(
                    f"{section.target}: key column {name} is floating-point, which Iceberg doesn't allow in a key."
                )
            if str(schema.find_type(name)).startswith("fixed"):
                # Iceberg's Java reader reuses the array of a fixed value, so only the last key of an equality delete
                # file takes effect
                raise TableError(
                    f"{section.target}: key column {name} is {schema.find_type(name)}. For this type Iceberg 1.11 "
                    "applies only one equality delete of each file. Use binary, string or uuid."
                )

    def _check_partitioning(self, section: "TableSection") -> None:
        from pyiceberg.transforms import IdentityTransform

        schema, fields = self.spec.iceberg_schema, self.spec.current_spec.fields
        for field in fields:
            dtype = str(schema.find_type(field.source_id))
            if isinstance(field.transform, IdentityTransform) and dtype in ("float", "double"):
                raise TableError(
                    f"{section.target} is partitioned by {schema.find_column_name(field.source_id)}, which is "
                    f"floating-point. {NO_FLOATS}"
                )
        actual = [(str(f.transform), schema.find_column_name(f.source_id)) for f in fields]
        wanted = [
            (f.transform if f.parameter is None else f"{f.transform}[{f.parameter}]", f.column)
            for f in section.partition_fields
        ]
        if sorted(actual) != sorted(wanted) if section.partition_by else not {*wanted} <= {*actual}:
            shown = ", ".join(_in_sql(*field) for field in actual) or "not partitioned"
            changes = [("DROP", field) for field in actual if field not in wanted]
            changes += [("ADD", field) for field in wanted if field not in actual]
            change = "; ".join(
                f"ALTER TABLE {section.target} {verb} PARTITION FIELD {_in_sql(*field)}" for verb, field in changes
            )
            raise TableError(
                f"{section.target} exists, and its partitioning ({shown}) differs from partition_by. Correct "
                f"partition_by, leave it out, or change the table in SQL: {change} (docs/change-a-table.md says what "
                "becomes of the files that it has)."
            )

    def position(self, prefix: str, *, newest_if_in_doubt: bool = False) -> StoredPosition | None:
        """The sink's position in the current snapshot.

        The property has the newest position. After a rollback it is ahead of the data. Then the nearest ancestor
        snapshot that this sink committed has the right position. If the property's own snapshot is unknown, there may
        or may not have been a rollback: ancestors expire, and so do snapshots that were rolled back.

        :param newest_if_in_doubt: take the newest position if the snapshots that are known don't tell. It may be ahead
            of the data.
        :raises TableError: the table was rolled back, or replaced, and no known snapshot has a position; or everything
            that could tell is gone.
        """
        text = self.property(f"{prefix}.position")
        if text is None:
            return None
        stored = json.loads(text)
        self._take_back(prefix, stored["operation"], None)
        current, committed = self.current_snapshot(), stored.get("snapshot-id")
        result = StoredPosition(stored["position"], stored["operation"], committed, stored.get("index"), committed)
        if committed is None or (current is not None and current.snapshot_id == committed):
            return result  # nearly always
        if current is None and newest_if_in_doubt:
            return None  # as after `CREATE OR REPLACE TABLE`, which keeps properties
        seen = self._assumed.get((prefix, stored["operation"])) if newest_if_in_doubt else None
        if current is not None and any(self.is_ancestor(i, current.snapshot_id) for i in (committed, seen) if i):
            return self._with_newer_index(result, prefix, current.snapshot_id)
        found = self._position_in(current, prefix, stored, newest_if_in_doubt=newest_if_in_doubt)
        if found is not None:
            self._take_back(prefix, stored["operation"], found.state)
            return found
        assert current is not None
        if newest_if_in_doubt:
            self._assumed[prefix, stored["operation"]] = current.snapshot_id
        return self._with_newer_index(result, prefix, current.snapshot_id)

    @cached_property
    def _assumed(self) -> dict[tuple[str, str], int]:
        """A snapshot that is assumed to have the newest position, by prefix and operation. The operation's own one has
        expired then, so without this each call would follow the whole history.
        """
        return {}

    @abstractmethod
    def _take_back(self, prefix: str, newest: str, state: Mapping[str, str] | None) -> None:
        """Remember which properties of the position (`OF_POSITION`) hold after a rollback, for `property`.

        :param newest: the operation that stored the newest position.
        :param state: what is true now; None if the table's properties are to be believed.
        """

    def position_in(self, snapshot_id: int, prefix: str) -> "Position | None":
        """The sink's position in a known snapshot, whether or not the sink committed it. None if it is unknown."""
        stored = json.loads(self.property(f"{prefix}.position") or "{}")
        if stored.get("snapshot-id") is None:
            return None
        try:
            found = self._position_in(self.snapshot(snapshot_id), prefix, stored)
        except TableError:
            return None
        position: Position = stored["position"] if found is None else found.position
        return position

    def _position_in(
        self,
        snapshot: Snapshot | None,
        prefix: str,
        stored: Mapping[str, Any],
        *,
        newest_if_in_doubt: bool = False,
    ) -> StoredPosition | None:
        """Follow a snapshot's ancestors to the nearest one that the sink committed. None if this is the commit that has
        the newest position, `stored`.

        :raises TableError: see `position`.
        """
        committed, sequence_number = stored.get("snapshot-id"), self._sequence_number(prefix, stored)
        trusted = newest_if_in_doubt or self.property(f"{prefix}.not-rolled-back") == str(committed)
        may_have_expired = is_behind = False
        expired = None
        while snapshot is not None:
            if snapshot.snapshot_id == committed:
                return None
            summary = snapshot.summary.get(f"{prefix}.position")
            if summary is not None:
                older = json.loads(summary)
                number = snapshot.snapshot_id
                index, state = older.get("index"), older.get("state")
                return StoredPosition(older["position"], older["operation"], number, index, number, state)
            parent = snapshot.parent_id
            if parent == committed:
                return None
            # Sequence numbers rise from parent to child. So if the commit were an ancestor of a snapshot that has the
            # next number after it, or a lower one, it would have to be the parent.
            is_behind = is_behind or (sequence_number > 0 and snapshot.sequence_number <= sequence_number + 1)
            known = self.snapshot(parent)
            if known is None and parent is not None and not trusted:
                expired = expired or self.expired_snapshots()
                known = expired.parent(snapshot)
            may_have_expired = parent is not None and known is None
            snapshot = known
        if may_have_expired and not is_behind:
            if trusted or (sequence_number and expired is not None and expired.has_files_of(sequence_number)):
                return None
            raise TableError(
                f"{self.name}: the snapshot of this sink's last commit has expired, and so has everything that could "
                "tell whether the table was rolled back before that commit. If it was not, set the table property "
                f"'{prefix}.not-rolled-back' to '{committed}', and start again. If it was, use rowdelta reset to read "
                "the source again from the start (see docs/operations.md, Reset)."
            )
        if newest_if_in_doubt:
            return None
        raise TableError(
            f"{self.name} was rolled back to a snapshot before this sink's first commit that is still known. To read "
            "the source again from the start, use rowdelta reset (see docs/operations.md, Reset)."
        )

    def _sequence_number(self, prefix: str, stored: Mapping[str, Any]) -> int:
        """Sequence number of the snapshot that has the position `stored`, or 0 if it isn't known. See
        `IcebergCommitter.settle`.
        """
        text = self.property(f"{prefix}.sequence-number")
        noted = json.loads(text) if text is not None else {}
        if noted.get("operation") == stored["operation"]:
            return int(noted["sequence-number"])
        return int(stored.get("sequence-number", 0))

    def _with_newer_index(self, stored: StoredPosition, prefix: str, current: int) -> StoredPosition:
        """The position, with a rewrite's index version if a rewrite came after the commit."""
        text = self.property(f"{prefix}.index")
        newer = json.loads(text) if text is not None else {}
        if newer.get("operation") != stored.operation:
            return stored
        number = int(newer["snapshot-id"])
        if current != number and not self.is_ancestor(number, current):
            return stored
        return replace(stored, index=newer["index"], index_snapshot_id=number)


def _live(summary: Mapping[str, str]) -> FileCounts | None:
    """Writers may leave the totals out (Iceberg spec, Snapshots: `summary` is optional)."""
    data, deletes = summary.get("total-data-files"), summary.get("total-delete-files")
    return None if data is None or deletes is None else FileCounts(int(data), int(deletes))


def _in_sql(transform: str, column: str | None) -> str:
    """A partition field as Iceberg's SQL has it.

    :param transform: as Iceberg's metadata have it, such as `bucket[8]`.
    """
    name, _, parameter = transform.rstrip("]").partition("[")
    return str(column) if name == "identity" else f"{name}({f'{parameter}, ' if parameter else ''}{column})"


_SIZED = re.compile(r'"(?:type|element|key|value)": "(uuid|fixed\[\d+\])"')


def check_types(table: "IcebergState") -> None:
    """Check the types of the columns of a table that exists.

    :raises TableError: the writers don't know one of them.
    """
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.types import NestedField

    for field in json.loads(table.spec.schema)["fields"]:
        try:
            NestedField.model_validate(field)
        except (ValueError, ValidationError):
            dtype = field["type"] if isinstance(field["type"], str) else json.dumps(field["type"])
            raise TableError(
                f"{table.name} has the column {field['name']} of type {dtype}, which rowdelta's writers don't know. "
                "Drop the column, or write to another table."
            ) from None
        if not isinstance(field["type"], str) and (found := _SIZED.search(json.dumps(field["type"]))):
            raise TableError(
                f"{table.name} has the column {field['name']} with values of type {found[1]} inside, which messages "
                "can't be checked for. Drop the column, or write to another table."
            )
