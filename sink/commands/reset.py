"""`rowdelta reset`: a table forgets how far its sink has got, so that the next run reads the source from its start."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from changelog.amounts import amount
from sink.config import Config, TableSection
from sink.errors import ConfigError, TableError
from sink.run.pipeline import open_source
from sink.spark.engine import HadoopFolder, SparkEngine
from sink.table.patterns import chosen_tables, find_tables
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import KEPT_BY_RESET, OF_ROWS, property_prefix
from sink.targets.seam import Table
from sink.targets.values import refusal

_INDEX = ("runs", "versions")
"""Folders of a key index."""


@dataclass(frozen=True)
class Reset:
    """What is to be forgotten.

    :param state: what the sink has stored in the table.
    :param kept: names of what stays of it.
    :param index: the folder of its key index, and the files there.
    """

    config: Config
    section: TableSection
    table: Table
    state: dict[str, str]
    kept: Sequence[str]
    index: HadoopFolder
    index_files: Sequence[str]
    empty: bool

    def lines(self) -> Iterator[str]:
        """What it will do, for people."""
        state, source = self.state, self.section.source
        yield f"{self.table.name}: sink {self.config.sink.id!r} forgets"
        position = json.loads(state["position"])["position"] if "position" in state else state.get("start", "none")
        yield f"  position   {position if isinstance(position, str) else json.dumps(position)}"
        if "source" in state:
            yield f"  topic      {', id '.join(filter(None, (state['source'], state.get('topic-id'))))}"
        if self.index_files:
            yield f"  key index  {amount(len(self.index_files), 'file')} in {self.index.location}"
        others = state.keys() - {*self.kept, "position", "start", "source", "topic-id", "index"}
        if others:
            yield f"  also       {', '.join(sorted(others))}"
        last = self.table.last_commit()
        if self.empty:
            yield f"All rows are removed: {'there are none' if last is None else last.counts}."
        elif last is not None:
            yield "Its rows stay, and the source is applied to them. Rows whose deletion it no longer has stay too."
        if self.config.sink.on_bad_record == "dead-letter":
            yield f"Its dead letters stay in {self.config.dead_letter_table}, and none is written there twice."
        if self.config.source.has_topics:
            options = {name.lower(): value for name, value in self.config.source.options.items()}
            start = options.get("startingtimestamp") or options.get("startingoffsets") or "the earliest message"
            yield f"The next run reads topic {source} from {start} on."
        else:
            yield f"The next run reads all files of {source}."

    def apply(self) -> None:
        """Forget it.

        :raises TableError: the sink runs.
        :raises TemporaryError: the catalog doesn't answer.
        """
        prefix = property_prefix(self.config)
        retries = self.table.retries()
        while (refused := refusal(self.table.reset(prefix, self.state, self.kept, empty=self.empty))) is not None:
            retries.wait(refused)
            self.table.refresh()
        self.index.delete(self.index_files)  # last, since a version that is named must be there


def find(spark: SparkSession, config: Config, name: str, *, empty: bool) -> Reset | None:
    """What would be reset. None if there is nothing to forget.

    :param name: the table: its target, the end of it, or its source.
    :param empty: whether its rows are removed too.
    :raises ConfigError: there is no such table, or reading the source again would duplicate its rows.
    :raises TableError: the table doesn't exist, or another sink's rows would be removed.
    """
    source = open_source(spark, config, {})
    (resolved,) = chosen_tables(find_tables(config, source), [name])
    if resolved.error is not None:
        raise resolved.error
    section, prefix = resolved.section, property_prefix(config)
    table = Catalogs(spark, config).existing(section.target)
    if section.mode != "upsert" and not empty and not table.is_empty():
        raise ConfigError(
            f"{table.name} has mode {section.mode}: reading its source again would duplicate its rows. Remove them too "
            "(--empty), or set mode: upsert."
        )
    others = sorted(other.removeprefix("rowdelta.") for other in table.stored("position") if other != prefix)
    if empty and others:
        raise TableError(
            f"{table.name}: sink {others[0]!r} writes to it too, and would not write its rows again. Reset without "
            "--empty, or reset the table with that sink's configuration first."
        )
    state = dict(table.own_state(prefix))
    kept = KEPT_BY_RESET if empty else (*KEPT_BY_RESET, *OF_ROWS)
    if not state.keys() - set(kept) and not (empty and not table.is_empty()):
        return None
    index = SparkEngine(config, table, None).index_folder()
    files = [f"{folder}/{file}" for folder in _INDEX for file in index.names(folder)]
    return Reset(config, section, table, state, kept, index, files, empty)
