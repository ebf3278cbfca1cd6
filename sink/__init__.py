"""Everything that runs: configuration, sources, the micro-batch, commits, and the `rowdelta` command.

The path of a change, module by module:

    sink.cli          rowdelta run sink.yaml
    sink.config       the YAML file, as a typed model
    sink.session      the Spark session with its catalogs and packages
    sink.patterns     which topic or directory feeds which table
    sink.pipeline     starts the streaming queries, looks for new tables, waits
    sink.supervisor   opens the job's tables and applies changes in parallel; sets failed tables aside
    sink.sources      Kafka or files: the raw rows of a micro-batch, and the position they reach
    changelog.*       raw rows decoded into changelog rows, on Arrow in Spark tasks
    sink.microbatch   one table, one micro-batch: decode, shuffle by key, write, commit
    sink.task         runs a delta writer inside a Spark task
    sink.commit       one row delta per micro-batch, with the source position, atomically
"""
