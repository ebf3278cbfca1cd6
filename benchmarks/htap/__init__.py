"""Tables that are changed and read at the same time, for an hour or a day. `python -m benchmarks.htap` runs it."""
