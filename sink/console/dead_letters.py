"""`rowdelta dead-letters`."""

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sink.console.command import Commands, as_table, command, inspect, positive
from sink.errors import DataError
from sink.printing import printable, printable_row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink.config import Config
    from sink.deadletters.table import Selection


_DEAD_LETTERS = """\
A record that can't be applied is a dead letter: it is in the table sink.dead_letter_table with its place in the
source, its bytes, an error class and a reason. All tables of the configuration share the dead-letter table.

  rowdelta dead-letters counts sink.yaml                    # what is wrong, and how often
  rowdelta dead-letters list sink.yaml --limit 20           # the newest, with their values
  rowdelta dead-letters list sink.yaml --table lake.shop.orders --class type_mismatch --reason amount --json
  rowdelta dead-letters replay sink.yaml --table lake.shop.orders

after a correction of the configuration, and of the table where needed:
  1. stop the sink, if it runs
  2. rowdelta dead-letters replay sink.yaml
  3. start the sink again
"""


_REPLAY = """\
Decodes the selected dead letters with the current configuration, and brings their keys up to date. Only for Kafka.

what is applied:
  The topic is read again, from the first of these letters to the table's position. For each key in the letters, the
  last change wins. So a replayed record never undoes a newer change: if the key was changed since, the table has the
  newer row; if it was deleted since, it stays deleted. A replayed delete deletes, unless the key came back.

what stays in the dead-letter table:
  still refused    the configuration can't apply them yet
  not passed yet   the table's position is before them; rowdelta run comes first
  gone             the topic no longer has the record (retention, compaction), and perhaps it has also lost newer
                   changes of the key. With --force these are applied as they are stored, together with what the topic
                   still has
  late             the table has newer changes of the key; these letters are for you to look at (to remove: DELETE FROM)

safe:
  The rows are one commit, and the removal of the letters is another one after it. If replay ends in between, replay
  again: the result is the same. The rows' commit doesn't change the sink's position, and is made with the sink's id: if
  a replay and a run work at the same time, one of them is refused (exit 4). Stop the sink first.

exit code 3: letters of the selection are left, other than late ones.
"""


def add(commands: Commands) -> None:
    group = commands.add_parser(
        "dead-letters",
        help="list, count or replay the records that could not be applied",
        description="Shows the records that could not be applied, and applies them after a correction.",
        epilog=_DEAD_LETTERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = group.add_subparsers(metavar="action", required=True)

    def add_action(
        name: str, function: Callable[[argparse.Namespace], int], help_text: str, description: str
    ) -> argparse.ArgumentParser:
        action = command(actions, name, function, help_text, description)
        action.add_argument(
            "--table", metavar="TARGET", help="only letters of this target, as the configuration names it"
        )
        action.add_argument(
            "--class", dest="error_class", metavar="CLASS", help="only this error class, such as null_key"
        )
        action.add_argument("--reason", metavar="TEXT", help="only letters whose reason has this text in it")
        action.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
        return action

    listing = add_action("list", _list_dead_letters, "show them, newest first",
                  "Shows dead letters, newest first. Changes nothing. With --json bytes that are not UTF-8 are in "
                  "base64, as key_base64 and value_base64.")  # fmt: skip
    listing.add_argument("--limit", type=positive, default=50, help="at most so many (default: 50)")
    add_action("counts", _count_dead_letters, "count them by table, error class and reason",
        "Counts dead letters by table, error class and reason, the most frequent first. Changes nothing.")  # fmt: skip
    replaying = add_action("replay", _replay_dead_letters, "apply them after a correction", _REPLAY)
    replaying.add_argument(
        "--force",
        action="store_true",
        help="apply also letters that the topic no longer has, and go on if the configuration refuses records that "
        "were applied when they arrived",
    )


def _selection(args: argparse.Namespace) -> "Selection":
    from sink.deadletters.table import Selection

    return Selection(args.table, args.error_class, args.reason)


def _list_dead_letters(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.deadletters import table as dead_letters

        letters = dead_letters.newest(dead_letters.find(spark, config, _selection(args)), args.limit)
        if args.json:
            yield from (dead_letters.as_json(vars(letter)) for letter in letters)
            return
        columns = ["time", "table", "class", "record", "reason", "value"]
        rows = [
            [f"{x.time:%Y-%m-%d %H:%M:%S}", x.table, x.error_class, x.place, x.reason, dead_letters.excerpt(x.value)]
            for x in letters
        ]
        yield from as_table(columns, rows) if rows else [dead_letters.nothing(spark, config, _selection(args))]

    return inspect(args, look, short=True, shown=printable_row if args.json else printable)


def _count_dead_letters(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.deadletters import table as dead_letters

        counts = list(dead_letters.counts(dead_letters.find(spark, config, _selection(args))))
        if args.json:
            yield from map(dead_letters.as_json, counts)
            return
        columns = ["count", "table", "class", "last", "reason"]
        rows = [
            [f"{x['count']:,}", x["table"], x["error_class"], f"{x['last']:%Y-%m-%d %H:%M:%S}", x["reason"]]
            for x in counts
        ]
        yield from as_table(columns, rows) if rows else [dead_letters.nothing(spark, config, _selection(args))]

    return inspect(args, look, short=True)


def _replay_dead_letters(args: argparse.Namespace) -> int:
    left = 0

    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.commands.replay import replay
        from sink.deadletters import table as dead_letters

        nonlocal left
        found = False
        for outcome in replay(spark, config, _selection(args), args.force):
            found = True
            left += outcome.left
            yield dead_letters.as_json(vars(outcome)) if args.json else str(outcome)
        if not found and not args.json:
            yield dead_letters.nothing(spark, config, _selection(args))

    return inspect(args, look) or (DataError.exit_code if left else 0)
