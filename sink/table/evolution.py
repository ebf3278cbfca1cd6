"""Changes a table's schema as its messages need it."""

import json
import logging
from collections.abc import Hashable, Mapping
from typing import Any

from changelog.shown_values import shown
from sink.config import Config
from sink.table.plan import declared_types, evolved_columns, maybe_decimals, new_defaults, shown_changes
from sink.table.table_plan import TablePlan
from sink.targets.seam import Table

log = logging.getLogger("rowdelta")


def evolve_schema(
    config: Config, plan: TablePlan, table: Table, observed: Mapping[str, str], written_for: Hashable
) -> bool:
    """Change the table's schema, once, for all that messages have.

    :param observed: fields of messages, with their types.
    :param written_for: the layout that the plan is of. If others have altered the table since, nothing is changed.
    :return: whether the plan is no longer right.
    :raises DataError: see `evolved_columns`.
    :raises TableError: see `evolved_columns`.
    """
    can = config.capabilities(plan.section.target)
    changes = evolved_columns(plan, observed, can) if observed else {}
    if not changes:
        return False
    new = {name: dtype.simpleString() if dtype else "" for name, dtype in changes.items()}
    log.info("%s: the source's schema changed: %s", table.name, shown_changes(new))
    for warning in maybe_decimals(config, declared_types(plan.section, observed)):
        log.warning("%s: %s", table.name, warning)
    defaults = new_defaults(plan, observed, changes)
    table.refresh()
    if table.layout == written_for:
        _tell_defaults(config, table, defaults, table.evolve(changes, defaults))
    return True


def _tell_defaults(config: Config, table: Table, defaults: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Say what the source has in rows from before, where the table has such rows."""
    if table.is_empty():
        return
    if kept:
        log.info("%s: earlier rows have %s, as in the source", table.name, _named(config, kept))
    lost = {name: value for name, value in defaults.items() if name not in kept}
    if lost:
        log.warning(
            "%s: rows from before have null in new columns where the source has the default (%s). Only Iceberg's "
            "format version 3 gives earlier rows a value, and none of type decimal. Set it by hand (UPDATE %s SET "
            "… WHERE … IS NULL), or let the connector read the source's rows again (a snapshot)",
            *(table.name, _named(config, lost), table.name),
        )


def _named(config: Config, values: Mapping[str, Any]) -> str:
    """Defaults of columns for people."""
    is_shown = config.sink.show_values
    texts = {name: json.dumps(each) if is_shown else shown(each, visible=False) for name, each in values.items()}
    return ", ".join(f"{name} = {text}" for name, text in texts.items())
