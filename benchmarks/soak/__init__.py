"""`make soak`: ten thousand micro-batches into an Iceberg v2, an Iceberg v3 and a Delta table, with kills in between.

    changes    the changes by seed, and what the tables must hold after them
    job        the sink as a process of its own: configuration, start, kill, what it tells
    run        feeds the job, kills it, takes samples, and compares the tables with the source
    report     docs/soak.md and its plots, from the samples

All tables get the same changes in one job. A table is compared at twenty points and at the end, by readers that share
no code with the sink: PyIceberg and delta-rs.
"""
