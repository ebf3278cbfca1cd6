"""The programs of tasks: what Spark's Python workers run."""
