"""Everything that runs: configuration, sources, the micro-batch, commits, and the `rowdelta` command.

The path of a change, module by module:

    sink.cli             rowdelta run sink.yaml
    sink.config          the YAML file, as a typed model
    sink.spark.session   the Spark session with its catalogs and packages
    sink.table.patterns    which topic or directory feeds which table
    sink.run.pipeline    starts the streaming queries, looks for new tables, waits
    sink.run.supervisor  opens the job's tables and applies changes in parallel; sets failed tables aside
    sink.sources         Kafka or files: the raw rows of a micro-batch, and the position they reach
    changelog.*          raw rows decoded into changelog rows, on Arrow in Spark tasks
    sink.table.microbatch  one table, one micro-batch: what it continues, what is committed, what follows a refusal
    sink.spark.writing   the Spark job of a micro-batch: decode, shuffle by key, write
    sink.spark.tasks     runs a delta writer inside a Spark task
    sink.targets         what a table is to the rest, and how each table format commits
"""
