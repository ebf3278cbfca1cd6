"""Compares what a table's messages state of their key, and of the source's tables, with what is known of both."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from changelog.decoding import Stated
from changelog.source_tables import takes
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.errors import TemporaryError
from sink.sources.source import Source
from sink.table.keys import TableKey, accepted_property, compared, may_spread
from sink.table.source_tables import SourceTables
from sink.table.table_plan import TablePlan

log = logging.getLogger("rowdelta")


class StatedByMessages:
    """What is known of one table's key, and of the source's tables that it takes. Messages may add to it.

    :param table: its name.
    :param key: its key, and which keys messages have stated.
    """

    def __init__(self, config: Config, table: str, key: TableKey, source: Source) -> None:
        self.key = key
        self.source_tables: SourceTables | None = None
        """None before messages have named one."""
        self._accepted = accepted_property(config)
        self._table = table
        self._source = source
        self._warning: str | None = None
        self._spread_known = False

    def decoding(self, stated: Stated, plan: TablePlan) -> ChangelogSpec:
        """How the changes are decoded that the table takes. Without `source_tables` it takes the messages of the table
        that is named first. If `is_mixed` is new, the micro-batch must be decoded again.
        """
        spec, named = plan.changelog, {fact: place for fact, place in stated.items() if isinstance(fact, str)}
        if not named:
            return spec
        taken = spec.source_tables or (min(named, key=lambda name: named[name]),)
        is_mixed = spec.is_mixed or not all(takes(taken, name) for name in named)
        if is_mixed != spec.is_mixed:
            others = ", ".join(sorted(name for name in named if not takes(taken, name)))
            what = "left out" if spec.ignores_other_tables else "bad records"
            log.warning(
                "%s: %s has messages of other tables than %s: %s. They are %s; see source_tables",
                *(self._table, plan.section.source, ", ".join(taken), others, what),
            )
        self.source_tables = SourceTables(taken, is_mixed)
        return self.source_tables.of(spec)

    def compare_keys(self, stated: Stated, plan: TablePlan) -> None:
        """Compare the messages' key with the table's. With a wrong key all files are wrong.

        :raises TableError: the messages' key has changed.
        """
        section, keys = plan.section, {fact: place for fact, place in stated.items() if isinstance(fact, tuple)}
        if section.mode == "append" or not keys:
            return
        key = compared(self.key, keys, section, self._accepted)
        if key != self.key:
            self._warn_of(key, plan)
        self.key = key
        if not self._spread_known and may_spread(key, keys, section):
            count = 1
            with suppress(TemporaryError):  # then the next micro-batch asks
                count = self._source.partitions(section)
                self._spread_known = True
            if count > 1:
                log.warning(
                    "%s: messages of one row may be in several of the %d partitions of %s, since its messages have no "
                    "key or a larger one than %s. Nothing says which of them is newer: give the topic one partition, "
                    "or name order_by",
                    *(self._table, count, section.source, ", ".join(key.columns)),
                )

    @property
    def awaits_keys(self) -> bool:
        """Whether the key is configured, and no micro-batch has shown the messages' key yet."""
        return self.key.configured and not self.key.messages

    def note_keys(self, stated: Iterable[tuple[str, ...]], plan: TablePlan) -> None:
        """Warn if messages that no micro-batch has read yet have another key than the configured one."""
        if self.awaits_keys:
            self._warn_of(replace(self.key, messages=tuple(sorted(fields for fields in stated if fields))), plan)

    def _warn_of(self, key: TableKey, plan: TablePlan) -> None:
        """Warn, once, that the messages have another key than the configured one."""
        warning = key.warning(plan.section)
        if warning is not None and warning != self._warning:
            self._warning = warning
            log.warning("%s", warning)
