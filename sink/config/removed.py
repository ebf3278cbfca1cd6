"""Keys of the configuration that earlier versions had."""

REMOVED = {
    "tables.compact_every": "The sink rewrites files beside the stream. For more of that raise maintenance.budget",
    "tables.group": "Each table is committed by itself. Leave the key out",
}
"""Key, without the numbers of entries -> what to do instead."""
