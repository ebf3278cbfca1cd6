"""`make bench-peers`: rowdelta, Spark's `MERGE INTO` and Flink's Iceberg sink, on the same changelogs, in one run.

    cases        the peers, the changelogs and the scales, as data
    changelogs   the files of a changelog, and what the table must hold at each mark
    writers      the processes that write: one for each peer, asked in lines of text
    spark_writer rowdelta or `MERGE INTO`, as such a process
    FlinkUpserts Flink's Iceberg sink, as such a process: a small Java program on Flink's mini cluster
    readers      the process that reads all tables, by Spark and DuckDB
    report       docs/benchmarks.md and its plots, from what was measured

`python -m benchmarks.peers` measures and appends its figures to `benchmarks/results/peers.jsonl`, one line for each
case. `python -m benchmarks.peers.report` makes the page from the lines that are there.
"""
