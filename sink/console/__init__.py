"""The command line: what each command takes, its help, and its run. Modules here load little, for `--help`."""
