"""What `run` does: opens tables, follows topics, and applies micro-batches."""
