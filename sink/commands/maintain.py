"""`rowdelta maintain`: rewrites what is dear to read and removes what nobody needs, once and without a budget."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from changelog.amounts import amount, sized
from sink.commands.beside_runs import open_beside_runs
from sink.config import Config
from sink.config.maintenance import age
from sink.deadletters.upkeep import CHECKPOINT_SECONDS, open_upkeep
from sink.errors import RowdeltaError, TemporaryError, summary
from sink.printing import one_line
from sink.redaction import masked
from sink.run.maintenance import limits_of, options_of
from sink.run.pipeline import open_source
from sink.table.microbatch import TableSink
from sink.table.patterns import chosen_tables, find_tables
from sink.table.rewrite_plan import RewriteOptions, chosen
from sink.targets.own_state import expiring
from sink.targets.upkeep_values import Compacted, CompactionLimits

_MOST_FAILURES = 5


@dataclass
class Maintained:
    """What was done for a table, or would be (`dry_run`). Its counts are those of Iceberg's `RewriteDataFiles.Result`.

    :param failed_groups: groups of files that weren't rewritten, because others changed them meanwhile, or by an error
        that the log has. The other groups were.
    :param merged_delete_files: position delete files that were merged into fewer (Iceberg v2).
    :param converted_equality_deletes: equality delete files whose deletes are by position now.
    :param dangling_delete_files: delete files that applied to no data file any more.
    :param expired_files: files that only old snapshots had. Not known of a dry run.
    :param expiring_snapshots: of a dry run, snapshots that would be removed.
    :param orphans: paths of files that no snapshot has.
    :param skipped: why files weren't rewritten at all; empty if they were looked at.
    :param not_converted: why equality deletes weren't converted, if nothing else was asked for; empty if they were
        looked for.
    """

    table: str
    dry_run: bool
    rewritten_data_files: int = 0
    added_data_files: int = 0
    rewritten_bytes: int = 0
    failed_groups: int = 0
    merged_delete_files: int = 0
    converted_equality_deletes: int = 0
    dangling_delete_files: int = 0
    expired_files: int = 0
    expiring_snapshots: int = 0
    orphans: list[str] = field(default_factory=list)
    skipped: str = ""
    not_converted: str = ""
    error: RowdeltaError | None = None


def maintain(
    spark: SparkSession,
    config: Config,
    names: Sequence[str],
    *,
    dry_run: bool,
    only_convert: bool = False,
    where: str | None = None,
) -> Iterator[Maintained]:
    """Look after tables, one after the other. One that fails doesn't stop the others: its result has the error.

    :param names: targets, or ends of their names. Without any it is all tables.
    :param dry_run: only find out what would be done.
    :param only_convert: only say by position what equality deletes say.
    :param where: a condition in Spark SQL. Only files that may have such rows are rewritten. The dead-letter table is
        left out then, as it is if tables are named.
    :raises ConfigError: there is no such table.
    """
    source = open_source(spark, config, {})
    for resolved in chosen_tables(find_tables(config, source), names):
        result = Maintained(resolved.section.target, dry_run)
        try:
            sink = open_beside_runs(spark, config, resolved, source)
            _maintain(sink, result, where, only_convert=only_convert)
        except RowdeltaError as error:
            result.error = error
        except (PySparkException, Py4JError) as error:
            result.error = TemporaryError(f"{result.table}: maintenance failed: {summary(error)}")
        yield result
    if not names and not only_convert and where is None and config.sink.on_bad_record == "dead-letter":
        yield from _dead_letters(spark, config, dry_run=dry_run)


def _dead_letters(spark: SparkSession, config: Config, *, dry_run: bool) -> Iterator[Maintained]:
    """The dead-letter table, if there is one."""
    result = Maintained(config.dead_letter_table, dry_run)
    try:
        found = open_upkeep(spark, config)
        if found is None:
            return
        _note_compacted(result, found.compact(dry_run=dry_run))
        if dry_run:
            result.expiring_snapshots = found.expiring()
        else:
            result.expired_files = found.expire()
        result.orphans = list(found.clean(dry_run=dry_run))
        if not dry_run:
            found.tend()
    except RowdeltaError as error:
        result.error = error
    yield result


def _maintain(sink: TableSink, result: Maintained, where: str | None, *, only_convert: bool) -> None:
    settings = sink.upkeep.settings
    options = options_of(settings, least_gain=1)
    if only_convert:
        result.not_converted = sink.upkeep.stale_deletes.not_converted
    if sink.position is None:
        result.skipped = "the sink hasn't committed anything to it yet"
    elif not sink.has_key_index:
        if settings.rewrite.sort is not None:
            result.skipped = "what rewrites tables of mode: append isn't told an order (sort)"
        elif not only_convert:
            _compact(sink, result, replace(limits_of(settings, least_gain=1), where=where))
    else:
        count = sink.upkeep.stale_deletes.convertible if result.dry_run else sink.upkeep.convert_equality_deletes
        result.converted_equality_deletes = count()
        if not only_convert:
            only = None if where is None else sink.table.upkeep().files_where(where)
            (_find if result.dry_run else _rewrite)(sink, result, options, only)
    if only_convert:
        return
    expire, orphans = settings.expire, settings.orphans
    if expire is not None:
        older_than = age(expire.older_than)
        keep = sink.upkeep.oldest_needed(older_than, expire.retain_last)
        if keep is not None and result.dry_run:
            result.expiring_snapshots = expiring(sink.table, expire)
        elif keep is not None:
            result.expired_files = sink.upkeep.newest_table().upkeep().expire(older_than, expire.retain_last, keep)
    if orphans is not None:
        result.orphans = sink.upkeep.remove_orphans(age(orphans.older_than), dry_run=result.dry_run)
        if not result.dry_run:
            sink.upkeep.note_cleaning()
    result.dangling_delete_files = (
        len(sink.upkeep.stale_deletes.dangling()) if result.dry_run else sink.upkeep.drop_dangling_deletes()
    )
    if not result.dry_run:
        sink.table.upkeep().tend()
        sink.table.upkeep().finish_tending(CHECKPOINT_SECONDS)


def _compact(sink: TableSink, result: Maintained, limits: CompactionLimits) -> None:
    _note_compacted(result, sink.upkeep.newest_table().upkeep().compact(limits, dry_run=result.dry_run))


def _note_compacted(result: Maintained, done: tuple[Compacted, int] | None) -> None:
    if done is not None:
        compacted, result.failed_groups = done
        result.rewritten_data_files, result.added_data_files = compacted.touched, compacted.written
        result.rewritten_bytes = compacted.bytes


def _find(sink: TableSink, result: Maintained, options: RewriteOptions, only: Collection[str] | None) -> None:
    """What `_rewrite` would do."""
    parts = sink.table.upkeep().rewritables()
    size = options.target_file_size or sink.table.spec.target_file_size
    files = [file for part in parts for file in part if only is None or file.file.path in only]
    for group in chosen(files, options, size, sink.table.upkeep().scan_costs):
        result.rewritten_data_files += len(group.files)
        result.merged_delete_files += len(group.deletes)
        result.rewritten_bytes += group.size_in_bytes


def _rewrite(sink: TableSink, result: Maintained, options: RewriteOptions, only: Collection[str] | None) -> None:
    """Group by group, each with its own commit: what is done stays done, and a group that fails stops no other. If
    several fail one after the other, something else is wrong, such as a store that is down.
    """
    failed, in_a_row = set[str](), 0
    while (begun := sink.upkeep.begin_rewrite(options, only=only, but=failed)) is not None:
        is_written = sink.upkeep.write_rewrite(begun)
        done = sink.upkeep.end_rewrite(begun, written=is_written)
        in_a_row = 0 if done is not None else in_a_row + 1
        if in_a_row == _MOST_FAILURES:
            result.failed_groups += len(begun.groups)
            return
        if done is None:
            if len(begun.groups) == 1 and begun.index_lost is None:  # else they come again
                result.failed_groups += 1
                failed |= begun.paths
        elif begun.chosen.merges_deletes:
            result.merged_delete_files += done.touched
            result.rewritten_bytes += done.bytes
        else:
            result.rewritten_data_files += done.touched
            result.added_data_files += done.written
            result.rewritten_bytes += done.bytes


def exit_code(result: Maintained) -> int:
    if result.error is not None:
        return result.error.exit_code
    return TemporaryError.exit_code if result.failed_groups else 0


def lines(result: Maintained) -> Iterator[str]:
    """A result for people."""
    return map(one_line, _lines(result))


def _lines(result: Maintained) -> Iterator[str]:
    if result.error is not None:
        yield f"{result.table}: FAILED: {result.error}"
        return
    done = list(_done(result))
    yield f"{result.table}{(': would do' if result.dry_run else '') if done else ': nothing to do'}"
    yield from done


def _done(result: Maintained) -> Iterator[str]:
    size, rewritten = sized(result.rewritten_bytes), amount(result.rewritten_data_files, "data file")
    if result.skipped:
        yield f"  not rewritten: {result.skipped}"
    elif result.not_converted:
        yield f"  not converted: {result.not_converted}"
    elif result.rewritten_data_files and result.dry_run:
        yield f"  rewrite      {rewritten}, {size}"
    elif result.rewritten_data_files:
        yield f"  rewritten    {rewritten} into {result.added_data_files:,}, {size}"
    if result.merged_delete_files:
        merged = amount(result.merged_delete_files, "position delete file")
        yield f"  {'merge ' if result.dry_run else 'merged'}       {merged}"
    if result.failed_groups:
        yield f"  failed       {amount(result.failed_groups, 'group')} of files: run again; the log says why"
    if result.converted_equality_deletes:
        converted = amount(result.converted_equality_deletes, "equality delete file")
        yield f"  {'convert  ' if result.dry_run else 'converted'}    {converted} into deletes by position"
    if result.dangling_delete_files:
        files = amount(result.dangling_delete_files, "delete file")
        yield f"  {'drop   ' if result.dry_run else 'dropped'}      {files}, applied to nothing"
    if result.expiring_snapshots:
        snapshots = amount(result.expiring_snapshots, "snapshot")
        yield f"  expire       {snapshots} or fewer, with the files that only these have"
    if result.expired_files:
        yield f"  expired      {amount(result.expired_files, 'file')} of old snapshots deleted"
    if result.orphans:
        yield f"  orphans      {amount(len(result.orphans), 'file')} {'to delete' if result.dry_run else 'deleted'}"
        yield from (f"    {path}" for path in result.orphans[:20])
        if len(result.orphans) > 20:
            yield f"    and {len(result.orphans) - 20:,} more (--json lists all)"


def as_json(result: Maintained) -> str:
    """A result for machines."""
    values = asdict(result)
    return json.dumps({**values, "error": None if result.error is None else masked(str(result.error))})
