"""`rowdelta verify`."""

import argparse

from sink.console.command import Commands, add_tables, command, load, positive
from sink.printing import printable, printable_row

_VERIFY = """\
Compares tables with their sources, at one position, and changes nothing. The section verify of the configuration says
with what a table is compared: a database, or any table that Spark reads.

  verify: {url: "jdbc:postgresql://db:5432/shop", user: reader, password: "${PASSWORD}"}

  rowdelta verify sink.yaml                              # all tables
  rowdelta verify sink.yaml --table orders --limit 100   # one, and more of its differences
  rowdelta verify sink.yaml --json                       # one JSON object a table

how:
  It reads a snapshot of the source, waits until the sink has passed it, and compares the table as it is then: by counts
  and checksums of ranges of keys, then key by key in the ranges that differ. Keys that change meanwhile are compared in
  further rounds. So the sink may run, and the source may change.

what it needs:
  A user who may read the tables. In Postgres, pg_monitor (to see how far Debezium is) makes it faster and surer; in
  MySQL and MariaDB, PROCESS. The sink must run, or have applied what the topic has.

exit codes:
  1   a table differs from its source
  75  none differs, but one couldn't be compared, or all its keys changed all the time: run again
  2, 4  none differs, but one can't be compared as things are: see what is printed
"""


def add(commands: Commands) -> None:
    added = command(commands, "verify", _verify, "compare tables with their sources", _VERIFY)
    add_tables(added)
    added.add_argument("--limit", type=positive, default=20, help="show at most so many keys of a table (default: 20)")
    added.add_argument(
        "--timeout", type=positive, default=600, metavar="SECONDS",
        help="in each of at most 6 rounds a table, wait at most so long for connector and sink to get as far as the "
        "source (default: 600)",
    )  # fmt: skip
    added.add_argument("--json", action="store_true", help="one JSON object a table, for machines")


def _verify(args: argparse.Namespace) -> int:
    config = load(args)
    from sink.commands import verify
    from sink.commands.beside_runs import delivering
    from sink.spark import session

    spark = session.start(verify.with_drivers(config), short=True)
    outcomes = []
    with session.stopping(spark), delivering(spark, config):
        for outcome in verify.verify(spark, config, args.table, args.limit, args.timeout):
            outcomes.append(outcome)
            for line in [verify.as_json(outcome)] if args.json else verify.lines(outcome):
                print(printable_row(line) if args.json else printable(line), flush=True)
    return verify.exit_code(outcomes)
