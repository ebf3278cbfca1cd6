"""Wire formats by name: our own formats, and formats of other packages.

A package adds a format by an entry point of the group `rowdelta.formats`. The entry point names a class, best one
derived from `changelog.changes.Format`:

    [project.entry-points."rowdelta.formats"]
    my-format = "my_package.my_format:MyFormat"
"""

from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from changelog.changes import Format

GROUP = "rowdelta.formats"

OURS = {
    "avro": "changelog.formats.avro:Avro",
    "canal-json": "changelog.formats.canal_json:CanalJson",
    "debezium-avro": "changelog.formats.debezium_avro:DebeziumAvro",
    "debezium-json": "changelog.formats.debezium_json:DebeziumJson",
    "dms-json": "changelog.formats.dms_json:DmsJson",
    "maxwell-json": "changelog.formats.maxwell_json:MaxwellJson",
    "ogg-json": "changelog.formats.ogg_json:OggJson",
    "row-kind": "changelog.formats.row_kind:RowKindRows",
}
_OF_THE_SINK = {"database-rows": "changelog.formats.database_rows:DatabaseRows"}
"""What nobody can choose."""


def names() -> list[str]:
    """Names of all installed formats, sorted."""
    return sorted({*OURS, *(entry.name for entry in entry_points(group=GROUP))})


def find(name: str) -> type[Format]:
    """The format's class, or what makes the format like one.

    :raises KeyError: there is no such format.
    """
    if place := OURS.get(name) or _OF_THE_SINK.get(name):
        module, _, attribute = place.partition(":")
        found: type[Format] = getattr(import_module(module), attribute)
        return found
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            loaded = entry.load()
            # any class will do, or a function that makes the format: what it doesn't say is as in `Format`
            made: Any = partial(loaded)
            vars(made).update({n: getattr(loaded, n, default) for n, default in vars(Format).items() if n.isupper()})
            return cast("type[Format]", made)
    raise KeyError(name)
