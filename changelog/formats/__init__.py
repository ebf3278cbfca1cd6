"""Wire formats by name: our own formats, and formats of other packages.

A package adds a format by an entry point of the group `rowdelta.formats`. The entry point names a class that has the
attributes of `changelog.changes.FormatType`:

    [project.entry-points."rowdelta.formats"]
    my-format = "my_package.my_format:MyFormat"
"""

from importlib import import_module
from importlib.metadata import entry_points

from changelog.changes import FormatType

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


def names() -> list[str]:
    """Names of all installed formats, sorted."""
    return sorted({*OURS, *(entry.name for entry in entry_points(group=GROUP))})


def states_key(name: str) -> bool:
    """Whether the format's messages can say which fields are the key.

    :raises KeyError: there is no such format.
    """
    return bool(getattr(find(name), "STATES_KEY", False))


def names_table(name: str) -> bool:
    """Whether the format's messages say which table of the source they are about.

    :raises KeyError: there is no such format.
    """
    return bool(getattr(find(name), "NAMES_TABLE", False))


def may_lack_values(name: str) -> bool:
    """Whether the format's updates may lack values (`changelog.changes.Changes.unavailable`).

    :raises KeyError: there is no such format.
    """
    return bool(getattr(find(name), "MAY_LACK_VALUES", False))


def find(name: str) -> FormatType:
    """The format's class.

    :raises KeyError: there is no such format.
    """
    if name in OURS:
        module, _, attribute = OURS[name].partition(":")
        found: FormatType = getattr(import_module(module), attribute)
        return found
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            loaded: FormatType = entry.load()
            return loaded
    raise KeyError(name)
