"""Counts the deletes by position that apply to nothing, from a table's manifests."""

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, read_manifest_list

from sink.targets.iceberg.position_deletes import FILE_PATH_ID

_MOST_FILES = 20_000
"""Of a table with more files this isn't found out: it takes seconds."""


def dangling_positions(io: FileIO, manifest_list: str) -> int:
    """How many rows are deleted by files that apply to no data file (Iceberg spec, Scan Planning): the only one that
    they are about is gone, or all of their partition are newer.

    :raises Exception: the files can't be read.
    """
    manifests = list(read_manifest_list(io.new_input(manifest_list)))
    if sum((m.added_files_count or 0) + (m.existing_files_count or 0) for m in manifests) > _MOST_FILES:
        return 0
    oldest, paths, deletes = dict[tuple[int, str], int](), set[str](), list[tuple[tuple[int, str], int, DataFile]]()
    for manifest in manifests:
        for entry in manifest.fetch_manifest_entry(io):
            file, number = entry.data_file, entry.sequence_number or 0
            place = manifest.partition_spec_id, repr(file.partition)
            if manifest.content == ManifestContent.DATA:
                paths.add(file.file_path)
                oldest[place] = min(number, oldest.get(place, number))
            elif file.content == DataFileContent.POSITION_DELETES:
                deletes.append((place, number, file))
    dangling = 0
    for place, number, file in deletes:
        only = _only_data_file(file)
        if (only is not None and only not in paths) or (only is None and oldest.get(place, number + 1) > number):
            dangling += file.record_count
    return dangling


def _only_data_file(file: DataFile) -> str | None:
    """The only data file that a delete file is about, if its bounds say so."""
    lower, upper = (bounds.get(FILE_PATH_ID) for bounds in (file.lower_bounds or {}, file.upper_bounds or {}))
    return lower.decode() if lower is not None and lower == upper else None
