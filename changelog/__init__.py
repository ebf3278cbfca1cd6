"""What a change is, and how the wire formats spell it.

`changelog.rows` defines the row kinds and the *changelog row*: the one shape that every wire format is decoded into and
that `deltawriters` consumes. Each wire format is a module of its own (`changelog.debezium_json`, `changelog.row_kind`).

This package does no I/O and knows no table format. `changelog.rows` imports neither Spark nor PyArrow, so that
`deltawriters` can use it without a JVM; the format modules build Spark expressions.
"""
