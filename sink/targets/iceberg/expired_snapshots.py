"""What can still be found out about snapshots that have expired, through Iceberg's Java library.

Two things outlive a snapshot for a while: the table's previous metadata files, of which Iceberg keeps the names of a
hundred by default, and the files that the snapshot added, with its sequence number.
"""

import json
from bisect import bisect_left
from functools import cached_property

from py4j.java_gateway import JavaObject

from sink.spark.java_errors import JAVA_ERRORS, java_class
from sink.targets.iceberg.bridge import Bridge
from sink.targets.iceberg.errors import table_error
from sink.targets.iceberg.snapshots import Snapshot


class ExpiredSnapshots:
    """Looks for the snapshots that a table no longer has.

    :param table: the table, as it is now.
    """

    def __init__(self, table: Bridge) -> None:
        self._table = table
        self._files: dict[str, dict[int, Snapshot]] = {}
        self._found: dict[int, Snapshot] = {}

    def parent(self, snapshot: Snapshot) -> Snapshot | None:
        """The parent of a snapshot, from a previous metadata file. None if no file that is left has it.

        :raises RowdeltaError: a file can't be read.
        """
        if snapshot.parent_id is None:
            return None
        if snapshot.parent_id not in self._found:
            # the first file that has the snapshot is that of its commit, so it has the parent too, unless the table no
            # longer has the name of that file
            log = self._log
            first = bisect_left(log, True, key=lambda file: snapshot.snapshot_id in self._snapshots(file))
            if first < len(log):
                self._found |= self._snapshots(log[first])
        return self._found.get(snapshot.parent_id)

    def has_files_of(self, sequence_number: int) -> bool:
        """Whether a live file of the current snapshot has this sequence number: the snapshot with the number added it,
        or it was rewritten in that snapshot. No other snapshot of the table has the number.

        :raises RowdeltaError: a file can't be read.
        """
        table, io = self._table, self._table.java.io()
        current = table.java.currentSnapshot()
        try:
            # a manifest's own numbers are bounds of those of its files
            return current is not None and any(
                int(manifest.minSequenceNumber()) <= sequence_number <= int(manifest.sequenceNumber())
                and sequence_number in self._sequence_numbers(manifest)
                for manifest in table.elements(current.allManifests(io))
            )
        except JAVA_ERRORS as error:
            raise table_error(table.name, error) from None

    @cached_property
    def _log(self) -> list[str]:
        """The previous metadata files, oldest first."""
        previous = self._table.java.operations().current().previousFiles()
        return [str(entry.file()) for entry in self._table.elements(previous)]

    def _snapshots(self, file: str) -> dict[int, Snapshot]:
        """All snapshots of a metadata file by id. There are none if the file was deleted."""
        if file not in self._files:
            parser = self._table.iceberg.TableMetadataParser
            try:
                metadata = json.loads(str(parser.toJson(parser.read(self._table.java.io(), file))))
            except JAVA_ERRORS as error:
                if java_class(error) != "NotFoundException":
                    raise table_error(self._table.name, error) from None
                metadata = {}
            found = [Snapshot.of_json(described) for described in metadata.get("snapshots", ())]
            self._files[file] = {snapshot.snapshot_id: snapshot for snapshot in found}
        return self._files[file]

    def _sequence_numbers(self, manifest: JavaObject) -> set[int]:
        """The sequence numbers of a manifest's live files."""
        files, io, table = self._table.iceberg.ManifestFiles, self._table.java.io(), self._table
        read = files.read if str(manifest.content()) == "DATA" else files.readDeleteManifest
        reader = read(manifest, io, table.java_specs)
        try:
            return table.sequence_numbers(reader.select(table.java_list(["file_path"])))
        finally:
            reader.close()
