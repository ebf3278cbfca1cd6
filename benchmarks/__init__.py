"""Benchmarks: the same changelog through rowdelta and through `MERGE INTO`, batch by batch, in one Spark session.

    workload         the changelog, written as Parquet files, and what the table must hold after each micro-batch
    streams          the Spark session, the source stream and the trigger times, shared by every sink under test
    merge_baseline   the usual alternative: `foreachBatch` + `MERGE INTO`
    bench            `make bench`, which puts these together
    versions         what order, soft deletes, conditions and history cost, and history by `MERGE INTO`
    peers            `make bench-peers`: more peers, each in a process of its own, and what readers pay
    soak             `make soak`: thousands of micro-batches, with kills
    memory           a micro-batch larger than memory
    keyindex         the key index alone, without Spark

A driver publishes one micro-batch at a time to the folder that each sink's stream watches. So both sinks apply a batch
to a table in the same state, and under the same load of the machine. The sinks should take turns in going first: two
variants of the same MERGE compared as 0.87 in one order and as 0.98 in the other, over five micro-batches.

    spark = build_session(work / "warehouse")
    dataset = write_dataset(Workload(rows=2_000_000, seed=1), work / "dataset", batches=20, expected_after=(20,))
    create_table(spark, "bench.db.merged")
    load(spark, "bench.db.merged", dataset.initial)
    for batch in range(1, dataset.batches + 1):
        publish(dataset.changes[batch], work / "merged")
        [trigger] = merge_available(spark, "bench.db.merged", work / "merged", work / "merged-checkpoint")
        assert totals(spark.table("bench.db.merged")) == dataset.totals[batch]
    assert checksum(spark.table("bench.db.merged")) == checksum(spark.read.parquet(str(dataset.expected[20])))
"""
