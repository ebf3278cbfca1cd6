"""Which of the source's tables an entry takes. By default it is the one that a message names first: in the sample from
which columns or key were inferred, or else in the first micro-batch. The table's property
`rowdelta.<sink id>.source-tables` remembers it, and whether the topic has messages of others too:

    {"names": ["shop.orders"], "mixed": false}
"""

import json
from dataclasses import dataclass, replace

from changelog.spec import ChangelogSpec
from sink.config import Config, TableSection
from sink.targets.own_state import property_prefix
from sink.targets.seam import TableView


@dataclass(frozen=True)
class SourceTables:
    """:param names: patterns of the tables whose messages are taken (`changelog.source_tables`).
    :param is_mixed: the topic has messages of other tables too.
    """

    names: tuple[str, ...] = ()
    is_mixed: bool = False

    @classmethod
    def known(cls, config: Config, section: TableSection, table: TableView | None) -> "SourceTables":
        """What the configuration says, or else the table. Empty if neither does."""
        text = None if table is None else table.property(source_tables_property(config))
        stored = cls() if text is None else cls.from_json(text)
        is_mixed = stored.is_mixed or section.other_tables == "ignore"
        return cls(tuple(section.source_tables) or stored.names, is_mixed)

    @classmethod
    def from_json(cls, text: str) -> "SourceTables":
        stored = json.loads(text)
        return cls(tuple(stored["names"]), stored["mixed"])

    def to_json(self) -> str:
        return json.dumps({"names": self.names, "mixed": self.is_mixed})

    def of(self, spec: ChangelogSpec) -> ChangelogSpec:
        """How changes are decoded that an entry takes."""
        return replace(spec, source_tables=self.names, is_mixed=self.is_mixed)


SOURCE_TABLES = "source-tables"
"""Last part of the property."""


def source_tables_property(config: Config) -> str:
    return f"{property_prefix(config)}.{SOURCE_TABLES}"
