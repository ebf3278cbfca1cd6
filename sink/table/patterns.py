"""Decides which sources feed which table. A plain entry of `tables:` is one table; a pattern is one table for each
match.

An entry is a pattern if its target refers to a group (`lake.shop.$1`). Then `source` is a regular expression. It must
match the whole name of a topic, or of a directory in the folder before the last `/`. With `source: {pattern: …}` and
the plain name of a target, all topics that match feed this table. If several entries match a source, those with the
source's plain name get it, else the first pattern.

With `source: {topic: …, table: …}` the expression is one for the names of the source's tables in a topic, as its
messages say them. Then the same goes for these tables.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from changelog.source_tables import matched, takes
from sink.config import Config, TableSection
from sink.config.table_parts import TableSource
from sink.errors import ConfigError
from sink.sources.source import Source

NO_TABLE = "no table yet: no topic, directory or message fits the entries of tables"


@dataclass(frozen=True)
class ResolvedTable:
    """One table and the source, or sources, that it mirrors.

    :param section: the configured entry, with real names for source and target instead of patterns.
    :param path: the entry's place in the configuration, for messages: `tables[3]`.
    :param match: of the source's name, if the entry is a pattern.
    :param error: the reason why the source can't have a table. `section.target` may then still have references.
    """

    section: TableSection
    path: str
    match: re.Match[str] | None = None
    error: ConfigError | None = None

    @property
    def from_pattern(self) -> bool:
        return self.match is not None


def resolve_tables(
    config: Config, names: Iterable[str], named: Mapping[str, Collection[str]] | None = None
) -> list[ResolvedTable]:
    """The tables of a configuration, in its order.

    :param names: names of the topics or directories that exist. Only patterns need them.
    :param named: topic -> the source's tables that its messages name. Likewise.
    """
    resolved: list[ResolvedTable] = []
    taken = {topic for table in config.tables if not table.has_pattern for topic in table.topics}
    names = sorted(names)
    for number, table in enumerate(config.tables):
        path = f"tables[{number}]"
        if table.feed.table is not None:
            resolved += _named_in_messages(config, number, named or {})
            continue
        if not table.has_pattern:
            resolved.append(ResolvedTable(table, path))
            continue
        pattern = source_pattern(table, is_path=config.source.type == "files")
        matches = [match for name in names if name not in taken and (match := pattern.fullmatch(name))]
        taken.update(match.string for match in matches)
        if table.is_pattern:
            resolved += [_expanded(table, path, match, {"feed": TableSource(topic=match.string)}) for match in matches]
        elif matches:
            resolved.append(ResolvedTable(_fed_by(table, [match.string for match in matches]), path))
    return _refuse_shared_targets(resolved, config.dead_letter_table)


def find_tables(config: Config, source: Source, *, remember: bool = False) -> list[ResolvedTable]:
    """The tables of a configuration, including those that its patterns find in the source.

    :param remember: the next search need not look at the same messages again. Only a run writes this down.
    :raises ConfigError: there is no topic whose messages a pattern is for.
    :raises TemporaryError: the source did not answer.
    """
    names = source.names() if any(table.has_pattern for table in config.tables) else ()
    shared = {topic for table in config.tables if table.feed.table is not None for topic in table.topics}
    return resolve_tables(config, names, source.search(sorted(shared), remember=remember) if shared else None)


def source_pattern(table: TableSection, *, is_path: bool) -> re.Pattern[str]:
    """The regular expression for the names of a pattern's sources. In a path, only the last part is a pattern."""
    if not is_path:
        return re.compile(table.source)
    parent, slash, pattern = table.source.rpartition("/")
    return re.compile(re.escape(parent + slash) + f"(?:{pattern})")


def _fed_by(table: TableSection, topics: Sequence[str]) -> TableSection:
    """The entry of a pattern with one target, with the names of its topics."""
    return table.model_copy(update={"feed": table.feed.model_copy(update={"topic": list(topics)})})


def _named_in_messages(config: Config, number: int, named: Mapping[str, Collection[str]]) -> list[ResolvedTable]:
    """The tables of a pattern over the source's tables: those that no plain entry and no earlier pattern takes."""
    entry, taken = config.tables[number], list[str | re.Pattern[str]]()
    for place, other in enumerate(config.tables):
        is_before = place != number and (other.feed.table is None or place < number)
        if is_before and set(other.topics) & set(entry.topics):
            taken += names_taken(other)
    pattern = re.compile(str(entry.feed.table))
    names = sorted({name for topic in entry.topics for name in named.get(topic, ()) if not takes(taken, name)})
    matches = {name: match for name in names if (match := matched(pattern, name)) is not None}
    path = f"tables[{number}]"
    return [_expanded(entry, path, match, {"source_tables": [name]}) for name, match in matches.items()]


def names_taken(table: TableSection) -> list[str | re.Pattern[str]]:
    """Which of the source's tables an entry takes, as patterns for `changelog.source_tables.takes`."""
    return [re.compile(table.feed.table)] if table.feed.table is not None else [*table.source_tables]


def _expanded(table: TableSection, path: str, match: re.Match[str], source: Mapping[str, Any]) -> ResolvedTable:
    """:param source: the fields that say what the match is in the source."""
    key = table.keys.get(match.string, table.keys.get(match.string.rpartition("/")[2], table.key))
    named = table.model_copy(update={**source, "key": key, "keys": {}})
    try:
        target = table.expand(table.target, match)
    except ValueError as error:
        refusal = ConfigError(f"{path}: {error}. Correct the pattern, or name the table.")
        return ResolvedTable(named, path, match, refusal)
    return ResolvedTable(named.model_copy(update={"target": target}), path, match)


def _refuse_shared_targets(resolved: list[ResolvedTable], dead_letters: str) -> list[ResolvedTable]:
    """Give an error to all sources with the same target. A table has one position, so two sources can't share it, and
    nothing says which of them is right. Upper and lower case count as the same: to many catalogs they are.
    """
    sources: dict[str, list[str]] = {}
    for table in resolved:
        if table.error is None:
            sources.setdefault(table.section.target.lower(), []).append(table.section.origin)

    def checked(table: ResolvedTable) -> ResolvedTable:
        section = table.section
        if table.error is not None:
            return table
        shared = sources[section.target.lower()]
        if section.target.lower() == dead_letters.lower():
            reason = f"{section.id} is the dead-letter table"
        elif len(shared) > 1:
            reason = f"{' and '.join(shared[:3])} would share the table {section.target}"
        else:
            return table
        return replace(table, error=ConfigError(f"{table.path}: {reason}. Correct source or target."))

    return [checked(table) for table in resolved]


def chosen_tables(resolved: Sequence[ResolvedTable], names: Sequence[str]) -> list[ResolvedTable]:
    """The tables that `--table` names.

    :param names: targets, ends of targets, or sources. Without any it is all tables.
    :raises ConfigError: a name fits no table, or several.
    """
    if not names:
        return list(resolved)
    chosen = []
    for name in names:
        found = [
            table
            for table in resolved
            if table.section.target == name
            or table.section.target.endswith(f".{name}")
            or name in (table.section.source, *table.section.topics, *table.section.source_tables)
        ]
        if len(found) != 1:
            known = ", ".join(table.section.target for table in resolved[:10])
            what = "fits several tables" if found else "is no table of this configuration"
            raise ConfigError(f"{name} {what}. The targets: {known}.")
        chosen += found
    return chosen
