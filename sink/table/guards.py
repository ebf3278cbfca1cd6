"""What stops a table before anything is committed: plain functions of what is stored, configured and written."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from changelog.amounts import amount
from sink.errors import DataError, TableError
from sink.table.written import Written

SAME_OFFSETS = "same-offsets"
"""Last part of a property that the user sets, as `old=new`: two topics, or ids of topics, with the same messages at the
same offsets; or hashes of the paths of two directories with the same files.
"""

_MOST_UNDECODED = 10
"""If a format fails on up to this many records, in succession or as a large part of a micro-batch, these are bad
records. If it fails on more, the format is broken: it would turn a whole topic into dead letters.
"""


def check_topic(
    table: str, property_: str, same: str | None, *, stored: tuple[str, str], read: tuple[str, str | None]
) -> None:
    """A position is true of one topic only.

    :param property_: full name of `SAME_OFFSETS`; and `same` is its value.
    :param stored: the topic of the table's position, and the topic's id; each empty if it isn't known.
    :param read: the same of what is read now.
    :raises TableError: the position is one in another topic.
    """
    (topic, number), (new_topic, new_number) = stored, read
    if topic and topic != new_topic:
        old, new = topic, new_topic
        reason = f"its position is one in topic {topic}, and the configuration says {new_topic}"
    elif number and new_number and number != new_number:
        old, new = number, new_number
        reason = (
            f"topic {new_topic} was created again since it was read: its id was {number} when the table's position was "
            f"stored, and is {new_number} now"
        )
    else:
        return
    if same != f"{old}={new}":
        raise TableError(
            f"{table}: {reason}. Offsets of {old} say nothing of {new}, and messages would be left out. "
            f"To read {new_topic} from the start, use rowdelta reset (see docs/operations.md, Reset). If it "
            f"has the same messages at the same offsets, set the table's property {property_} to {old}={new}."
        )


def check_directory(
    table: str, property_: str, same: str | None, *, position: Mapping[str, Any], directory: str, identity: str | None
) -> None:
    """A position is true of one directory only.

    :param property_: full name of `SAME_OFFSETS`; and `same` is its value.
    :param identity: of the directory that is read now (`Source.identity`).
    :raises TableError: the position is one in another directory.
    """
    old = position.get("directory")
    if old is not None and old != identity and same != f"{old}={identity}":
        raise TableError(
            f"{table}: its position is one in another directory, and the configuration says {directory}. "
            "Files that are older than the position would be left out. To read the directory from the start, use "
            "rowdelta reset (see docs/operations.md, Reset). If it has the same files with the same modification "
            f"times, set the table's property {property_} to {old}={identity}."
        )


def check_bad_records(table: str, written: Written, *, fails: bool) -> None:
    """Call this if no dead-letter table takes bad records.

    :param fails: `on_bad_record: fail`; else a replay.
    :raises DataError: there are some.
    """
    if not written.bad:
        return
    why, way_out = "on_bad_record is fail", "Correct the source, or set on_bad_record: dead-letter"
    if not fails:
        why = "a replay applies all changes of a key or none"
        way_out = "Nothing was applied. Load the missing rows, or replay other dead letters (--reason)"
    raise DataError(
        f"{table}: {amount(written.bad, 'bad record')}, and {why}. {'; '.join(written.samples)}. {way_out}."
    )


def check_format(table: str, written: Written, undecoded: int) -> None:
    """:param undecoded: how many successive records the format had failed on before.
    :raises DataError: the format fails on so many records that it is at fault, rather than they.
    """
    undecoded = written.undecoded_since(undecoded)
    alike = written.failing_alike(_MOST_UNDECODED)
    if undecoded <= _MOST_UNDECODED and alike is None:
        return
    failed = f"on all of the last {undecoded:,} records"
    if undecoded <= _MOST_UNDECODED and alike is not None:
        failed = f"with {alike} on {written.undecoded[alike]:,} of the {written.read:,} records of a micro-batch"
    raise DataError(
        f"{table}: the format failed {failed}, so it seems to be at fault, not they: {'; '.join(written.samples)}. "
        "Nothing of this micro-batch was applied. Correct the format, or the package that it comes from, and run "
        "again. If the records are wrong, have the format reject them (changelog.changes.Rejected)."
    )


def check_snapshots(
    table: str, written: Written, streamed: Collection[int], mode: str, shown: Callable[[int], str]
) -> None:
    """:param streamed: partitions that have delivered rows of the stream of changes before.
    :param shown: a partition's name.
    :raises DataError: the source was snapshot again, which would duplicate rows.
    """
    again = (written.snapshot_partitions & set(streamed)) | written.repeated_partitions
    if again:
        raise DataError(
            f"{table}: the source was snapshot again (op r after other changes, in partition {shown(min(again))}). In "
            f"mode {mode} that would duplicate rows. Use mode: upsert, or another topic for the new snapshot (see "
            "docs/delivery.md, Modes)."
        )
