"""`rowdelta reconcile`."""

import argparse

from sink.console.command import Commands, add_tables, command, load, positive
from sink.printing import printable, printable_row

_LIMIT, _TIMEOUT = 20, 600

_RECONCILE = """\
Compares tables with the database of source.database, as rowdelta verify does, and corrects what differs: rows that the
table lacks are inserted, rows that the source doesn't have are removed, and others are replaced. Equal rows aren't
written. The sink may run meanwhile, and the source may change: what has changed since is left as the sink applied it.

  rowdelta reconcile sink.yaml --dry-run               # what differs
  rowdelta reconcile sink.yaml --table orders

exit codes:
  1   a table still differs
  75  a table couldn't be compared, or keys changed all the time: run again
  2, 4  a table can't be compared or corrected as things are: see what is printed
"""


def add(commands: Commands) -> None:
    added = command(commands, "reconcile", _reconcile, "correct rows that differ from the database", _RECONCILE)
    add_tables(added)
    added.add_argument("--dry-run", action="store_true", help="only compare, and show what differs")
    added.add_argument(
        "--limit", type=positive, default=_LIMIT, help="show at most so many keys of a table (default: 20)"
    )
    added.add_argument(
        "--timeout", type=positive, default=_TIMEOUT, metavar="SECONDS",
        help="wait at most so long for connector and sink in each round (default: 600)",
    )  # fmt: skip
    added.add_argument("--json", action="store_true", help="one JSON object a table, for machines")


def _reconcile(args: argparse.Namespace) -> int:
    return correct(args, args.limit, args.timeout, dry_run=args.dry_run, as_json=args.json)


def correct(
    args: argparse.Namespace,
    limit: int = _LIMIT,
    timeout: int = _TIMEOUT,
    *,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Correct the tables that `args` name.

    :param args: those of `config` and `--table`.
    """
    config = load(args)
    from sink.commands import verify
    from sink.commands.beside_runs import delivering
    from sink.commands.reconcile import reconcile
    from sink.spark import session

    spark = session.start(verify.with_drivers(config), short=True)
    outcomes = []
    work = verify.verify if dry_run else reconcile
    with session.stopping(spark), delivering(spark, config):
        for outcome in work(spark, config, args.table, limit, timeout):
            outcomes.append(outcome)
            for line in [verify.as_json(outcome)] if as_json else verify.lines(outcome):
                print(printable_row(line) if as_json else printable(line), flush=True)
    return verify.exit_code(outcomes)
