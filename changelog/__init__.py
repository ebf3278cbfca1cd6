"""What a change is, and how the wire formats spell it.

`changelog.rows` defines the row kinds and the *changelog row*: the one shape that every wire format is decoded into and
that `deltawriters` consumes. On the way from a message to it:

    changes      the interfaces: a `Format` takes raw records and gives `Changes` and `Rejected`
    formats      formats by name, each a module of its own (`debezium_json`, `canal_json`, …) or another package's
    values       values of messages to values of columns, exactly
    decoding     `ChangelogDecoder`: all of it together, for Spark tasks

This package does no I/O but asking the schema registry (`schema_registry`), and knows no table format. `changelog.rows`
imports neither Spark nor PyArrow; all but `row_kind_columns` works on Arrow arrays and needs no JVM: that is for
Parquet files that `row_kind_parquet` leaves to Spark.
"""
