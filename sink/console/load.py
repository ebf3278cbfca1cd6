"""`rowdelta load`."""

import argparse

from sink.console.command import Commands, add_tables, command, load
from sink.console.reconcile import correct
from sink.printing import printable

_LOAD = """\
Copies tables of a database, much faster than a connector's snapshot, and then applies their changes from the topic
until they are equal. Nothing is locked, and the database may change meanwhile. rowdelta run goes on from there.

  source:
    database: {url: "jdbc:postgresql://db:5432/shop", user: reader, password: "${PASSWORD}", slot: debezium}

  rowdelta load sink.yaml                              # all tables
  rowdelta load sink.yaml --table orders               # one
  rowdelta load sink.yaml --table orders --again       # what it has already, beside the stream

how:
  The connector runs already, with snapshot.mode: no_data. The end of the topic is noted first. Then the table is read
  in parts by its key, several at once, each by one short query, and each is committed. Then the topic is read from
  where it ended. Ctrl-C finishes the parts in progress; running it again goes on from there, also after a crash.
  With source.type: debezium, Debezium's engine runs beside the load, and there is nothing to start.

again:
  Of a table that is loaded, the source is read once more, while rowdelta run may go on: rows that differ are replaced,
  those that the source doesn't have are removed, and equal ones aren't written. It is what rowdelta reconcile does.

what it needs:
  A user who may read the tables. In Postgres, pg_monitor shows how far the connector is; MySQL and MariaDB need the
  privilege PROCESS for it. No rowdelta run of the same sink.id meanwhile, unless --again is given.
"""


def add(commands: Commands) -> None:
    added = command(commands, "load", _load, "copy tables of a database, and catch up", _LOAD)
    add_tables(added)
    added.add_argument("--again", action="store_true", help="correct tables that are loaded, beside the stream")


def _load(args: argparse.Namespace) -> int:
    if args.again:
        return correct(args)
    config = load(args)
    from sink.commands.verify import with_drivers
    from sink.run import running
    from sink.spark import session

    with running.marked(config):
        spark = session.start(with_drivers(config))
        from sink.commands.load import Load
        from sink.run.pipeline import stops_on_signals

        with session.stopping(spark):
            loading = Load(spark, config, args.table)
            with stops_on_signals(spark, loading.stop):
                for line in loading.run():
                    print(printable(line), flush=True)
    return 0
