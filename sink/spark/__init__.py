"""The Spark session and its jars, the tasks and what goes between them."""
