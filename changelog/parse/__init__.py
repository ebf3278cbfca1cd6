"""Bodies of messages to columns: JSON, Avro, and the schemas that a registry has."""
