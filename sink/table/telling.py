"""What a run tells of a micro-batch that is committed: a line of the log, and events."""

import json
import logging
import time

from changelog.amounts import amount, sized
from deltawriters import FileContent
from sink.table.observer import Committed, Files, Index, RewriteDone, live_files
from sink.table.written import Written
from sink.targets.seam import Table
from sink.targets.values import ChangeSet, Copied

log = logging.getLogger("rowdelta")


def log_committed(
    table: str, work: str, written: Written, request: ChangeSet, commit_seconds: float, *, copies: bool
) -> None:
    """:param work: what was committed, such as `batch 7`.
    :param commit_seconds: from the end of the tasks to the end of the commit.
    :param copies: whether the table has `deletes: copy-on-write`.
    """
    index, files = request.index, request.position.get("applied")
    part = "" if files is None else f", first {amount(files, 'file')}"
    log.info(
        "%s %s%s: %s%s | write %d ms, commit %d ms, peak %s%s",
        *(table, work, part),
        written.shown(copies=copies),
        "" if index is None or index.copied is None else f" | {index.copied.shown}",
        written.seconds * 1000,
        commit_seconds * 1000,
        sized(written.peak_memory),
        f" | {json.dumps(request.position)}" if log.isEnabledFor(logging.DEBUG) else "",
    )
    if written.untold:
        log.warning(
            "%s %s: %d rows were set and then left for another key, and the messages don't tell which row left. "
            "If the source checks keys at the end of a statement, rows may be missing. Let it log whole rows before a "
            "change (Postgres: REPLICA IDENTITY FULL)",
            *(table, work, written.untold),
        )


def committed(
    table: Table, batch_id: int | None, written: Written, request: ChangeSet, index_size: tuple[int, int] | None
) -> Committed:
    """The event of a micro-batch.

    :param table: as it is after the commit.
    :param index_size: entries and bytes of the key index, if it is known.
    """
    index = request.index
    files = {content: Files(*amount) for content, amount in written.contents.items()}
    if index is not None and index.files:  # which came after the tasks' files
        content = (FileContent.DATA if index.replaced else FileContent.POSITION_DELETES).value
        of_tasks = files.get(content, Files(0, 0))
        files[content] = Files(of_tasks.count + len(index.files), of_tasks.bytes + index.bytes)
    return Committed(
        table.name,
        batch_id,
        table.snapshot_id(),
        request.position,
        written.counts,
        files,
        live_files(table),
        None if index_size is None else Index(*index_size),
        written.probe_seconds,
        written.peak_memory,
        time.monotonic() - written.begun.started,
    )


def copied(table: str, done: Copied) -> RewriteDone:
    """The event of files that a commit replaced."""
    return RewriteDone(
        table,
        "copy-on-write",
        done.touched,
        done.written,
        done.bytes_read,
        done.scan_seconds,
        done.rewrite_seconds,
        rows=done.rows,
        bytes_written=done.bytes_written,
    )
