"""Keys of the configuration that earlier versions had."""

REMOVED = {
    "tables.compact_every": "The sink rewrites files beside the stream. For more of that raise maintenance.budget",
    "maintenance.rewrite.zorder": "Write sort: [...] in the table's maintenance.rewrite instead",
    "tables.group": "Each table is committed by itself. Leave the key out",
    "tables.maintenance.rewrite.zorder": "Write sort: [...] instead: rows are ordered by one column after the other",
}
"""Key, without the numbers of entries -> what to do instead."""
