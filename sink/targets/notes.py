"""The keys under which a commit says in the table's history what the sink did by it."""

SINK_ID = "rowdelta.sink-id"
"""Key in what the table's history says of a sink's commit."""
ROWS = "rowdelta.rows"
"""Likewise. Its value is JSON: how many changes of each kind the commit applied."""
WORK = "rowdelta.work"
"""Likewise, if the commit is of no micro-batch: what it is (`sink.sources.source.Work`)."""
MINOR = "rowdelta.minor-compaction"
"""Likewise, of a minor compaction (`sink.table.minor_compaction`). Its value is the compaction's number, from 1 on."""
MERGED_FROM = "rowdelta.merged-from"
"""Likewise. Its value is the snapshot from which the compaction moved rows: later micro-batches came before its commit,
and their files aren't in it.
"""
REWRITE = "rowdelta.rewrite"
"""Likewise, of a rewrite of whole files beside the stream (`sink.table.rewriting`)."""
