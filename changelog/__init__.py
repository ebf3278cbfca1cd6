"""What a change is, and how the wire formats spell it.

`changelog.rows` defines the row kinds and the *changelog row*. Every wire format is decoded into changelog rows, and
`deltawriters` takes them. These modules make changelog rows of messages:

    changes      the interfaces: a `Format` takes raw records and gives `Changes` and `Rejected`
    formats/     a module for each wire format, by name; another package may add its own
    parse/       bodies of messages to columns: JSON, Avro, and the registry's schemas
    values/      values of messages to values of columns, exactly
    decoding     `ChangelogDecoder` puts these modules together, for Spark tasks

This package does no I/O, except that `parse/schema_registry` asks the schema registry. Column types are Spark's
(`pyspark.sql.types`), which need no JVM. All modules work on Arrow arrays, and `changelog.rows` imports no Spark.
"""
