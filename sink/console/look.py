"""`rowdelta check`, `status`, `history` and `show`: they change nothing."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sink.console.command import Commands, as_table, command, inspect, positive
from sink.printing import printable, printable_row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink.config import Config


def add_check(commands: Commands) -> None:
    command(
        commands, "check", _check, "validate the configuration, reach source and catalogs, show the plan",
        "Validates the configuration, reaches the source and the catalogs, and shows the plan. Doesn't connect to "
        "the databases of the section verify. Changes nothing.",
    )  # fmt: skip


def add_status(commands: Commands) -> None:
    command(
        commands, "status", _status, "show each table's snapshot, position and lag",
        "Shows per table the last snapshot, the stored source position and how far it is behind. Changes nothing.",
    )  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    from sink.commands import inspection

    return inspect(args, inspection.check, short=True)


def _status(args: argparse.Namespace) -> int:
    from sink.commands import inspection

    return inspect(args, inspection.status, short=True)


def add_history(commands: Commands) -> None:
    history = command(commands, "history", _history, "list a table's commits",
                  "Lists a table's commits, newest first: when, by whom, from which source position to which, how many "
                  "changes of each kind, and the files. Changes nothing.")  # fmt: skip
    show = command(commands, "show", _show, "print rows of a table, also as they were",
               "Prints rows of a table as they are, or were at a time, in a snapshot, or at a source position. Which "
               "snapshot that is goes to stderr. Changes nothing.")  # fmt: skip
    for each in (history, show):
        each.add_argument(
            "table", metavar="TABLE",
            help="catalog.namespace.table; or, if no pattern made it, the end of this or its source",
        )  # fmt: skip
        each.add_argument("--limit", type=positive, default=20, help="at most so many (default: 20)")
        each.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    show.add_argument(
        "--key", metavar="COLUMN=VALUE", action="append", default=[],
        help="only rows with this value; may be given for several columns. Without a column it is the key's",
    )  # fmt: skip
    show.add_argument(
        "--valid-at", metavar="TIME",
        help="of a table with history, the versions that held at this time, such as 2026-01-31T12:00:00Z",
    )  # fmt: skip
    when = show.add_mutually_exclusive_group()
    when.add_argument("--as-of", metavar="TIME", type=_time, help="ISO 8601, such as 2026-01-31T12:00:00; UTC")
    when.add_argument("--version", metavar="ID", type=int, help="a snapshot or version; rowdelta history lists them")
    when.add_argument(
        "--at-position", metavar="JSON", type=_position,
        help="the newest snapshot that is not past this source position, such as '{\"0\": 42}': no message of "
        "partition 0 from offset 42 on has been applied. Partitions that aren't named may be anywhere",
    )  # fmt: skip


def _time(text: str) -> int:
    from sink.commands.time_travel import parse_time

    try:
        return parse_time(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a time such as 2026-01-31T12:00:00") from None


def _position(text: str) -> object:
    import json

    try:
        position = json.loads(text)
    except ValueError:
        position = None
    if not isinstance(position, dict):
        raise argparse.ArgumentTypeError(f'got {text!r}, expected JSON such as {{"0": 42}}')
    return position


def _history(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.commands import time_travel

        found = time_travel.history(spark, config, time_travel.target(config, args.table))
        return found.lines(args.limit, as_json=args.json)

    return inspect(args, look, short=True)


def _show(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.commands import time_travel

        when = time_travel.When(args.as_of, args.version, args.at_position)
        table = time_travel.target(config, args.table)
        found = time_travel.show(spark, config, table, when, args.key, args.limit, args.valid_at)
        print(printable(found.heading), file=sys.stderr)
        if args.json:
            yield from found.rows
        elif found.cells:
            yield from as_table(found.columns, found.cells)
        else:
            yield "no such row" if args.key else "no rows"

    return inspect(args, look, short=True, shown=printable_row if args.json else printable)
