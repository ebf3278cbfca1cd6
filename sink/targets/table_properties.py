"""Rules: how the sink treats a table's properties. It follows a property, leaves it to the format's own library, warns
that it doesn't follow it, or refuses the table. Each format has rules of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from sink.errors import TableError

Treatment = Literal["followed", "Iceberg's", "Delta's", "other engines'", "warning", "refused"]


@dataclass(frozen=True)
class Rule:
    """How the sink treats a property.

    :param treatment: what kind of rule it is.
    :param does: what the sink does, in words.
    :param unless: values, in lower case, that are no reason to warn or to refuse.
    :param append_may: whether a table may have it to which the sink only appends, although others are refused.
    :param copy_may: likewise a table with `deletes: copy-on-write`.
    """

    treatment: Treatment
    does: str
    unless: tuple[str, ...] = ()
    append_may: bool = False
    copy_may: bool = False


@dataclass(frozen=True)
class PropertyRules:
    """The rules of one format.

    :param by_name: name of a property -> rule. A name that ends with `*` fits all properties with this beginning. If
        several names fit a property, the longest one is used.
    :param ignores_case: whether the format takes names in any case.
    """

    by_name: Mapping[str, Rule]
    ignores_case: bool = False

    def rule(self, name: str) -> Rule | None:
        """The rule for a property. None if the format has no such property."""
        fitting = [known for known in self.by_name if self._fits(known, name)]
        return self.by_name[max(fitting, key=len)] if fitting else None

    def _fits(self, known: str, name: str) -> bool:
        if self.ignores_case:
            known, name = known.lower(), name.lower()
        return name == known or (known.endswith("*") and name.startswith(known[:-1]))

    def refusal(
        self, properties: Mapping[str, str], *, appends: bool = False, copies: bool = False
    ) -> tuple[str, str] | None:
        """The first property with which the sink can't write the table, and why.

        :param appends: whether the sink only appends to the table.
        :param copies: whether it deletes rows copy-on-write.
        """
        for name, value in properties.items():
            found = self.rule(name)
            if found is None or found.treatment != "refused" or value.lower() in found.unless:
                continue
            if not (appends and found.append_may) and not (copies and found.copy_may):
                return name, found.does
        return None

    def check(self, table: str, properties: Mapping[str, str], *, appends: bool = False, copies: bool = False) -> None:
        """Check the properties of a table that exists.

        :param appends: see `refusal`, and for `copies`.
        :raises TableError: the sink doesn't follow one of them, and must not ignore it.
        """
        refused = self.refusal(properties, appends=appends, copies=copies)
        if refused is not None:
            name, why = refused
            raise TableError(
                f"{table} has the property {name}, which rowdelta does not follow: {why}. Remove the property, or "
                "write to another table."
            )

    def ignored(self, properties: Mapping[str, str]) -> Iterator[str]:
        """A sentence for each property that the sink does not follow."""
        for name, value in properties.items():
            found = self.rule(name)
            if found is not None and found.treatment == "warning" and value.lower() not in found.unless:
                yield f"the property {name} ({value}) is not followed: {found.does}"
