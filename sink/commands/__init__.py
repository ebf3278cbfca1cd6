"""What the command line does: each command, and what `check` and `status` see without a JVM."""
