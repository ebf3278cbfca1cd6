"""`rowdelta maintain`."""

import argparse

from sink.console.command import Commands, add_tables, command, load
from sink.errors import ConfigError
from sink.printing import printable, printable_row

_MAINTAIN = """\
Does once, without a budget, what a run does for its tables beside the stream (section maintenance).

  rowdelta maintain sink.yaml --dry-run
  rowdelta maintain sink.yaml --table orders

what it does:
  converts  equality deletes that others have left into deletes by position (deletes: position)
  rewrites  files that are small, have many deleted rows, or many delete files; each group of files is a commit
  expires   snapshots that are older than maintenance.expire says, except what the sink still needs
  orphans   files in the table's folder that no snapshot has, if they are older than maintenance.orphans says

It may run beside the sink: if both commit at the same time, one of them is refused (exit 4), and nothing is lost. A run
does the same by itself, within maintenance.budget, and its stream goes on meanwhile.

exit codes:
  4, 75  a table could not be looked after; see what is printed
"""


def add(commands: Commands) -> None:
    what = "rewrite what is slow to read, and remove what nobody needs"
    added = command(commands, "maintain", _maintain, what, _MAINTAIN)
    add_tables(added)
    added.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    added.add_argument(
        "--where", metavar="CONDITION",
        help="rewrite only files that may have such rows, such as \"day >= '2026-01-01'\" (Spark SQL)",
    )  # fmt: skip
    added.add_argument(
        "--convert-equality-deletes", action="store_true",
        help="do only this: say by position what others have deleted by value, so that more engines read the table",
    )  # fmt: skip
    added.add_argument("--json", action="store_true", help="one JSON object a table, for machines")


def _maintain(args: argparse.Namespace) -> int:
    if args.convert_equality_deletes and args.where is not None:
        raise ConfigError(
            "--where chooses files to rewrite, and --convert-equality-deletes rewrites none. Leave out one of them."
        )
    config = load(args)
    from sink.commands import maintain
    from sink.spark import session
    from sink.table.patterns import NO_TABLE

    spark = session.start(config, short=True)
    codes = []
    with session.stopping(spark):
        results = maintain.maintain(
            spark,
            config,
            args.table,
            dry_run=args.dry_run,
            only_convert=args.convert_equality_deletes,
            where=args.where,
        )
        for result in results:
            codes.append(maintain.exit_code(result))
            for line in [maintain.as_json(result)] if args.json else maintain.lines(result):
                print(printable_row(line) if args.json else printable(line), flush=True)
    if not codes and not args.json:
        print(NO_TABLE)
    return min((code for code in codes if code), default=0)
