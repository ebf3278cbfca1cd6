"""Looks after the tables of a running job beside its micro-batches: rewrites files that are dear to read, within a
budget, and removes what nobody needs any more.

One thread does all of it, one table after the other, with one task at a time in a scheduler pool of its own. So a
micro-batch waits for it only while it commits (`Member.turn`), and a job that ends only until its task is cancelled.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from changelog.amounts import amount
from sink import logs
from sink.config import Config
from sink.config.maintenance import MaintenanceSection, age
from sink.deadletters.upkeep import open_upkeep
from sink.errors import RowdeltaError, TableGoneError, summary
from sink.run.supervisor import Member, Supervisor
from sink.spark.beside import cancel, take_pool
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.session import MAINTENANCE_POOL
from sink.table.microbatch import TableSink
from sink.table.observer import RewriteDone
from sink.table.rewrite_plan import RewriteOptions
from sink.targets.upkeep_values import CompactionFailedError, CompactionLimits
from sink.targets.values import CommitUnknownError
from sink.verify.resnapshot import remove_unmentioned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("rowdelta")

_ERRORS = (RowdeltaError, *SPARK_ERRORS, OSError)
"""What may come of the table, its catalog or its store."""

SECONDS = 5.0
"""Between two looks at all tables."""
PAUSE = 60.0
"""Seconds until a table is looked at again in which nothing paid, unless its micro-batches have written much since."""
_MUCH = 1024 * 1024
"""When micro-batches have written so many bytes, a rewrite may pay now, in a small table."""
_SMALL = 16 * 1024 * 1024
"""The budget hardly limits rewrites of fewer bytes: what they take is time."""
_OPENED = 4 * 1024 * 1024
"""Where a scan is planned by others, opening a file counts as so many bytes (`spark.sql.files.openCostInBytes`)."""
LEAST_GAIN = 32 * _OPENED
"""About a second of a scan. A commit, and a snapshot more, is worth it in the largest table too."""
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
_SELDOM = 20
"""What micro-batches wait for takes at most about this part of the time."""
_LOOK_EVERY = 3600.0
"""At most so many seconds are between two looks for old snapshots, for orphans that are due, for rows to purge, and for
deletes that apply to nothing. The last are never looked for more often.
"""


@dataclass
class _Table:
    """What is known of a table since its sink was opened.

    :param wasted: bytes that rewrites have written which were given up.
    :param looked_at: when nothing paid.
    :param look_seconds: that it took to find this out.
    :param written_then: by its micro-batches, in bytes.
    :param convert_from: when equality deletes are looked for again.
    :param purge_from: when rows are looked for again that were marked as deleted long ago.
    :param drop_from: when deletes that apply to nothing are looked for again.
    :param expired_at: when it was last looked whether old snapshots can be removed.
    :param cleaned_at: likewise, orphans. When these were removed, the table itself knows.
    """

    sink: TableSink
    wasted: int = 0
    looked_at: float = float("-inf")
    look_seconds: float = 0.0
    written_then: int = 0
    convert_from: float = float("-inf")
    purge_from: float = float("-inf")
    drop_from: float = float("-inf")
    expired_at: float = float("-inf")
    cleaned_at: float = float("-inf")


class Maintenance:
    """The thread that looks after a job's tables."""

    def __init__(self, spark: "SparkSession", config: Config, supervisor: Supervisor) -> None:
        self._spark = spark
        self._config = config
        self._supervisor = supervisor
        self._ending = threading.Event()
        self._finishing = threading.Event()
        self._finished = threading.Event()
        self._attended_at: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}
        self._known: dict[str, _Table] = {}
        self._letters_at = dict[bool, float]()
        """When the dead-letter table was looked at last, with the window closed and open."""
        self._letters_done = 0
        """How many commits of this run it had when all was done for it."""
        self._thread = threading.Thread(target=self._run, name="rowdelta-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it soon: the task in progress is cancelled, and what it wrote is deleted."""
        self._ending.set()
        self._finishing.set()
        end = time.monotonic() + _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:
            with suppress(*SPARK_ERRORS, OSError):  # the JVM may have gone
                cancel(self._spark)
            self._thread.join(0.5)

    def finish(self, is_stopping: Callable[[], bool]) -> None:
        """Wait until what is due is done once more, or somebody wants to stop. A job calls this that ends when its
        source is exhausted.
        """
        self._finishing.set()
        while not self._finished.wait(_POLL_SECONDS) and self._thread.is_alive() and not is_stopping():
            pass

    def _run(self) -> None:
        with self._in_pool():
            while not self._ending.is_set():
                is_last = self._finishing.wait(SECONDS)
                self._look_around()
                self._look_after_dead_letters()
                if is_last:
                    self._finished.set()
                    return

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        """See `take_pool`."""
        context = self._spark.sparkContext
        take_pool(self._spark)
        try:
            yield
        finally:
            with suppress(*SPARK_ERRORS, OSError):
                for name in ("spark.scheduler.pool", "spark.jobGroup.id"):
                    context.setLocalProperty(name, None)  # type: ignore[arg-type]  # which removes it
                context.removeJobTag(MAINTENANCE_POOL)

    def _look_around(self) -> None:
        members = self._supervisor.working()
        for member in sorted(members, key=lambda each: self._attended_at.get(each.target, 0.0)):
            if self._ending.is_set():
                return
            self._attended_at[member.target] = time.monotonic()
            if time.monotonic() - self._failed_at.get(member.target, float("-inf")) < PAUSE:
                continue
            if not self._attempted(member.target, partial(self._attend, member)):
                self._failed_at[member.target] = time.monotonic()

    def _look_after_dead_letters(self) -> None:
        """It is one table for all, with a commit for each micro-batch that has bad records. Without new ones, nothing
        is due.
        """
        letters, now, settings = self._supervisor.dead_letters, time.monotonic(), self._config.maintenance
        if letters is None or self._ending.is_set():
            return
        commits, is_open = letters.commits, settings.is_open(datetime.now(UTC))
        is_early = now < self._letters_at.get(is_open, float("-inf")) + _LOOK_EVERY and not self._finishing.is_set()
        if commits <= self._letters_done or is_early:
            return
        self._letters_at[is_open] = now
        attend = partial(self._attend_letters, is_open=is_open, compacts=is_open and bool(settings.budget))
        if self._attempted(letters.name, attend) and is_open:
            self._letters_done = commits

    def _attend_letters(self, *, is_open: bool, compacts: bool) -> None:
        upkeep = open_upkeep(self._spark, self._config)
        if upkeep is None:
            return
        steps: list[Callable[[], object]] = [upkeep.compact] if compacts else []
        if is_open:
            steps += [upkeep.expire, partial(upkeep.clean, only_due=True)]
        self._do([*steps, upkeep.tend])

    def _attempted(self, name: str, work: Callable[[], object]) -> bool:
        """Whether the work for a table could be done. If it failed, that is only logged."""
        with logs.about(table=name):
            try:
                work()
            except _ERRORS as error:
                if not self._ending.is_set():
                    log.warning("%s: maintenance failed, tried again later: %s", name, summary(error))
            except Exception:  # a mistake here must not end the stream
                log.exception("%s: maintenance failed; it is tried again later", name)
            else:
                return True
        return False

    def _do(self, steps: Iterable[Callable[[], object]]) -> None:
        """Do one step after the other. One that fails doesn't stop the others."""
        failed: Exception | None = None
        for step in steps:
            if self._ending.is_set():
                return
            try:
                step()
            except (CommitUnknownError, TableGoneError):
                raise  # with the table, or its state, unknown, no further step may delete anything
            except _ERRORS as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _attend(self, member: Member) -> None:
        sink = member.sink
        if sink is None:
            return
        known = self._known.get(member.target)
        if known is None or known.sink is not sink:
            known = self._known[member.target] = _Table(sink)
        # the last one may take until the window closes
        steps = (self._merge, self._drop, self._expire, self._clean, self._purge, self._reconcile, self._move)
        try:
            self._do(partial(step, member, known, sink.upkeep.settings) for step in steps)
        except CommitUnknownError as error:
            self._failed_at[member.target] = time.monotonic()
            error.is_harmless = True  # whatever came of it, the table has the same rows
            self._supervisor.set_aside(member, error)
        except RowdeltaError as error:
            if not error.is_harmless:
                raise
            self._supervisor.set_aside(member, error)  # the table's next micro-batch may be long in coming

    def _merge(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Commit what is merged of a table whose next micro-batch may be long in coming."""
        del settings
        if known.sink.upkeep.has_merged or self._finishing.is_set():
            with self._turn(member, known.sink) as has_turn:
                if has_turn:  # the stream may have begun another one
                    known.sink.upkeep.end_merge(wait=self._finishing.is_set())

    def _move(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Rewrite files, in one of the ways that there are."""
        if not settings.budget or not settings.is_open(datetime.now(UTC)):
            return
        if not known.sink.has_key_index:
            if settings.rewrite.sort is None:  # the format's procedure isn't told an order
                self._compact(member, known, settings)
            return
        self._convert(member, known)
        until = time.monotonic() + PAUSE  # then the other steps, and other tables, have their turn
        while not self._ending.is_set() and settings.is_open(datetime.now(UTC)):
            if time.monotonic() > until and not self._finishing.is_set():
                return
            done = self._rewrite(member, known, settings)
            if done is None:
                return
            if done.bytes < _SMALL:  # these take at most half of the time, for all tables together
                self._finishing.wait(done.scan_seconds + done.rewrite_seconds)

    def _purge(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Remove rows that were marked as deleted long ago. They are found beside micro-batches."""
        sink, now = known.sink, time.monotonic()
        if now < known.purge_from or not settings.is_open(datetime.now(UTC)):
            return
        known.purge_from = now + _LOOK_EVERY
        found = sink.long_deleted()
        if found is None:
            return
        with self._turn(member, sink) as has_turn:
            if has_turn:
                gone = sink.apply_beside("purge", *found).keys("deleted")
                log.info("%s: purged %s", sink.table.name, amount(gone, "deleted row"))

    def _reconcile(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Remove rows that a new snapshot of the source's table didn't have. Readers shouldn't wait for a window."""
        del settings
        remove_unmentioned(self._spark, self._config, known.sink, partial(self._turn, member, known.sink))

    def _drop(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Remove delete files that apply to nothing. Only manifests are written for it, which the budget doesn't
        count.
        """
        sink, now = known.sink, time.monotonic()
        if not settings.budget or not settings.is_open(datetime.now(UTC)) or now < known.drop_from:
            return
        known.drop_from = now + _LOOK_EVERY
        with self._turn(member, sink) as has_turn:
            started = time.monotonic()
            if has_turn:
                sink.upkeep.drop_dangling_deletes()
        # micro-batches have waited for it
        known.drop_from = max(known.drop_from, time.monotonic() + _SELDOM * (time.monotonic() - started))

    def _expire(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Only what must stay is found out in the table's turn: the procedure may take minutes."""
        sink, expire, now = known.sink, settings.expire, time.monotonic()
        if expire is None or not settings.is_open(datetime.now(UTC)):
            return
        older_than = age(expire.older_than)
        if now - known.expired_at < min(_LOOK_EVERY, max(PAUSE, older_than.total_seconds())):
            return
        known.expired_at = now
        with self._turn(member, sink) as has_turn:
            keep = sink.upkeep.oldest_needed(older_than, expire.retain_last) if has_turn else None
        if keep is not None:
            sink.upkeep.newest_table().upkeep().expire(older_than, expire.retain_last, keep)

    def _clean(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Remove files that no state of the table has."""
        sink, orphans, now = known.sink, settings.orphans, time.monotonic()
        if orphans is None or now - known.cleaned_at < _LOOK_EVERY or not settings.is_open(datetime.now(UTC)):
            return
        if not sink.upkeep.is_cleaning_due(age(orphans.every)):
            return
        known.cleaned_at = now
        if not self._ending.is_set():
            sink.upkeep.remove_orphans(age(orphans.older_than))
        with self._turn(member, sink) as has_turn:
            if has_turn:
                sink.upkeep.note_cleaning()

    @contextmanager
    def _turn(self, member: Member, sink: TableSink) -> Iterator[bool]:
        """Wait for the table's turn. Yields whether it is still the same sink's, and works."""
        with member.turn:
            yield member.sink is sink and member.works and not self._ending.is_set()

    def _convert(self, member: Member, known: _Table) -> None:
        """Say by position what others, such as Flink, delete by value. Files with such deletes can't be rewritten."""
        if time.monotonic() < known.convert_from:
            return
        with self._turn(member, known.sink) as has_turn:
            started = time.monotonic()
            known.convert_from = started + PAUSE
            if has_turn:
                known.sink.upkeep.convert_equality_deletes()
        # micro-batches have waited for it
        known.convert_from = max(known.convert_from, time.monotonic() + _SELDOM * (time.monotonic() - started))

    def _compact(self, member: Member, known: _Table, settings: MaintenanceSection) -> None:
        """Rewrite files of a table of which no key index knows the rows, by the format's own procedure: it only grows,
        or deletes by value. Micro-batches and it don't exclude each other.
        """
        sink, credit = known.sink, self._credit(known, settings)
        if not credit:
            return
        known.looked_at, known.written_then = time.monotonic(), sink.written_bytes
        try:
            done = sink.upkeep.newest_table().upkeep().compact(limits_of(settings, LEAST_GAIN, credit))
        except CompactionFailedError as error:
            known.wasted += min(credit, error.most_bytes)  # what it has written isn't known
            raise
        if done is None:
            return
        compacted, failed = done
        with self._turn(member, sink) as has_turn:
            if has_turn:
                sink.upkeep.note_compacted(compacted)
        if failed:
            groups = amount(failed, "group")
            log.warning("%s: %s of files not rewritten, tried again later", sink.table.name, groups)

    def _credit(self, known: _Table, settings: MaintenanceSection) -> int:
        """Bytes that may be rewritten now. 0 if it isn't time to look. At the end of a job it is."""
        since, written = time.monotonic() - known.looked_at, known.sink.written_bytes - known.written_then
        is_early = since < _SELDOM * known.look_seconds or (since < PAUSE and written < _MUCH)
        if is_early and not self._finishing.is_set():
            return 0
        return max(0, known.sink.upkeep.credit(settings.budget) - known.wasted)

    def _rewrite(self, member: Member, known: _Table, settings: MaintenanceSection) -> RewriteDone | None:
        """Rewrite the group of files that pays most, if the budget allows it."""
        sink, written = known.sink, known.sink.written_bytes
        credit = self._credit(known, settings)
        if not credit:
            return None
        with self._turn(member, sink) as has_turn:
            now = time.monotonic()
            begun = sink.upkeep.begin_rewrite(options_of(settings, LEAST_GAIN), credit) if has_turn else None
        if begun is None:
            known.looked_at, known.written_then = now, written
            known.look_seconds = time.monotonic() - now
            return None
        is_written = False
        try:
            is_written = sink.upkeep.write_rewrite(begun)
        finally:
            known.wasted += begun.written_bytes  # until it is committed
            with self._turn(member, sink) as has_turn:
                done = sink.upkeep.end_rewrite(begun, written=is_written and has_turn)
        if done is None:
            known.looked_at, known.written_then = now, written
        else:
            known.wasted -= begun.written_bytes
        return done


def options_of(settings: MaintenanceSection, least_gain: int) -> RewriteOptions:
    """What the configuration says of a table's rewrites.

    :param least_gain: see `RewriteOptions`.
    """
    chosen = settings.rewrite
    return RewriteOptions(
        least_gain=least_gain,
        min_input_files=chosen.min_input_files,
        delete_ratio_threshold=chosen.delete_ratio_threshold,
        target_file_size=chosen.target_file_size_bytes,
        max_file_group_size=chosen.max_file_group_size_bytes,
        max_concurrent_groups=chosen.max_concurrent_file_group_rewrites,
    )


def limits_of(settings: MaintenanceSection, least_gain: int, most_bytes: int | None = None) -> CompactionLimits:
    """The same, for tables without a key index.

    :param least_gain: see `RewriteOptions`. A scan gains at least the time to open files.
    :param most_bytes: see `CompactionLimits`.
    """
    chosen = settings.rewrite
    return CompactionLimits(
        min_input_files=chosen.min_input_files,
        delete_ratio_threshold=chosen.delete_ratio_threshold,
        delete_file_threshold=chosen.delete_file_threshold,
        target_file_size=chosen.target_file_size_bytes,
        max_file_group_size=chosen.max_file_group_size_bytes,
        max_concurrent_groups=chosen.max_concurrent_file_group_rewrites,
        fewest_opened=max(1, least_gain // _OPENED),
        most_bytes=most_bytes,
    )
