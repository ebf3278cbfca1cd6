"""Keys of the configuration that earlier versions had."""

REMOVED = {
    "tables.group": "Each table is committed by itself. Leave the key out",
}
"""Key, without the numbers of entries -> what to do instead."""
