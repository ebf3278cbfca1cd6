"""What the command line does: each command, with its help."""
