"""Logical types of Kafka Connect and Debezium, by the names that schemas give them.

Sources: `org.apache.kafka.connect.data`, and Debezium's documentation of its connectors' data type mappings.
"""

DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE_SCALE_DECIMAL = "io.debezium.data.VariableScaleDecimal"

DATES = frozenset({"io.debezium.time.Date", "org.apache.kafka.connect.data.Date"})
"""The values are integers: days since 1970-01-01."""

TIMESTAMPS = {
    "io.debezium.time.Timestamp": 10**3,
    "org.apache.kafka.connect.data.Timestamp": 10**3,
    "io.debezium.time.MicroTimestamp": 10**6,
    "io.debezium.time.NanoTimestamp": 10**9,
    "timestamp-millis": 10**3,
    "timestamp-micros": 10**6,
    "timestamp-nanos": 10**9,
}
"""Name -> units in a second. The values are integers: units since 1970-01-01."""

INSTANTS = frozenset({"timestamp-millis", "timestamp-micros", "timestamp-nanos"})
"""Avro's own names of timestamps that are points in time. Kafka Connect's and Debezium's names don't tell."""

TIMES = {
    "io.debezium.time.Time": 10**3,
    "org.apache.kafka.connect.data.Time": 10**3,
    "io.debezium.time.MicroTime": 10**6,
    "io.debezium.time.NanoTime": 10**9,
}
"""Name -> units in a second. The values are integers: units since midnight."""

DURATIONS = frozenset({"io.debezium.time.MicroDuration", "io.debezium.time.NanoDuration"})
"""The values are integers. A month counts as 30.4375 days, so they don't tell an exact interval."""

FINER_THAN_MILLIS = frozenset(name for name, per_second in TIMES.items() if per_second > 10**3)
"""Units that an `int` column must not take, and for which no column grows: its earlier rows have milliseconds."""

ISO_DATE = "io.debezium.time.IsoDate"
ISO_TIMESTAMP = "io.debezium.time.IsoTimestamp"
"""The values are text of dates and timestamps without a zone. The connector still appends a `Z`."""

ZONED_TIMESTAMP = "io.debezium.time.ZonedTimestamp"

GEOMETRIES = frozenset(
    {"io.debezium.data.geometry.Geometry", "io.debezium.data.geometry.Point", "io.debezium.data.geometry.Geography"}
)
"""The values are structs of `wkb` (well-known binary), `srid`, and for points `x` and `y`."""

ENUM_SET = "io.debezium.data.EnumSet"
"""The values are texts of names with commas between them."""

TEXTS = frozenset(
    {
        "io.debezium.time.ZonedTime",
        "io.debezium.time.IsoTime",
        "io.debezium.time.Interval",
        "io.debezium.data.Uuid",
        "io.debezium.data.Json",
        "io.debezium.data.Xml",
        "io.debezium.data.Enum",
        ENUM_SET,
        "io.debezium.data.Ltree",
    }
)
"""The values are strings, which stay as they are."""

BITS = "io.debezium.data.Bits"
YEAR = "io.debezium.time.Year"
