"""Apache Iceberg as a target, by Iceberg's Java library."""
