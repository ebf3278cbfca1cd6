"""`rowdelta reset`."""

import argparse
import sys

from sink.console.command import Commands, command, load
from sink.errors import ConfigError
from sink.printing import printable

_RESET = """\
Lets a table forget how far the sink has got in its source, so that the next run reads the source from its start. Says
what it is about to do, and asks.

  rowdelta reset sink.yaml orders            # the rows stay, and the source is applied to them again
  rowdelta reset sink.yaml orders --empty    # the rows go too, in the same commit

when:
  after a repair of the source, after its topic was created again, or to read another topic into the table

safe:
  It is one commit. A sink that runs on this machine is noticed, and nothing is done; anywhere else, a sink that runs
  can't commit to the table any more (exit 4), and reads it from the start when it is started again. Stop it first.

The rows of a table with mode changelog or append must go too (--empty): they would be there twice.
"""


def add(commands: Commands) -> None:
    added = command(commands, "reset", _reset, "let a table's source be read from its start again", _RESET)
    added.add_argument("table", metavar="TABLE", help="the table's target, the end of it, or its source")
    added.add_argument("--empty", action="store_true", help="remove the table's rows too")
    added.add_argument("--yes", action="store_true", help="don't ask")


def _reset(args: argparse.Namespace) -> int:
    if not args.yes and not sys.stdin.isatty():
        raise ConfigError("reset asks before it changes the table, and here is no terminal to answer. Give --yes.")
    config = load(args)
    from sink.commands import reset
    from sink.run import running
    from sink.spark import session

    with running.idle(config):
        spark = session.start(config, short=True)
        with session.stopping(spark):
            found = reset.find(spark, config, args.table, empty=args.empty)
            if found is None:
                print("nothing to forget: the sink hasn't read anything for this table")
                return 0
            for line in found.lines():
                print(printable(line), flush=True)
            if not args.yes and not _agreed():
                print("nothing was changed")
                return 0
            found.apply()
    print(f"done. Next: rowdelta run {args.config}")
    return 0


def _agreed() -> bool:
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
