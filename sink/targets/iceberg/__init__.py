"""Apache Iceberg as a target, by Iceberg's Java library and, without a JVM, by the metadata's JSON."""
