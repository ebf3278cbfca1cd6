"""The `rowdelta` command."""

import argparse
import logging
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sink import logs
from sink.errors import ConfigError, DataError, RowdeltaError
from sink.printing import one_line, printable, printable_row

# The functions that use other modules import them. These imports take a second, and until this module's imports are
# done, nobody handles signals.
from sink.spark import interrupts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink.config import Config
    from sink.deadletters.table import Selection
    from sink.run.observer import Observer

log = logging.getLogger("rowdelta")

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

safe:
  The rows are one commit, and the removal of the letters is another one after it. If replay ends in between, replay
  again: the result is the same. The rows' commit doesn't change the sink's position, and is made with the sink's id: if
  a replay and a run work at the same time, one of them is refused (exit 4). Stop the sink first.

exit code 3: letters of the selection are left.
"""

_PACKAGE = """\
Packs the installed packages that tasks import into an archive (about 100 MB), and prints the spark-submit command that
uses it. Workers need Spark and a Python of the same minor version, and neither rowdelta nor any package of Python.

  rowdelta package sink.yaml                        # ./rowdelta-VERSION-cp311-linux_x86_64.tar.gz, and the command
  rowdelta package sink.yaml --output /tmp/rowdelta.tar.gz --force
  rowdelta package sink.yaml > submit.sh            # then: MASTER=spark://host:7077 sh submit.sh

what is in it:
  rowdelta, packages with formats of your own, and all that they require, in the versions of this environment, without
  pyspark, which each Spark has. The same packages give the same bytes. Make it on a machine with the workers' system
  and processor: packages have machine code in them.

how workers use it:
  Spark unpacks it in each executor's folder. bin/python in it starts the machine's own Python with these packages. If
  that Python is not on the PATH: --conf spark.executorEnv.ROWDELTA_PYTHON=/path/to/python3.11

docs/cluster.md has the steps for standalone clusters, YARN, Kubernetes, EMR, Dataproc and Databricks.
"""

_VERIFY = """\
Compares tables with their sources, at one position, and changes nothing. The section verify of the configuration says
with what a table is compared: a database, or any table that Spark reads.

  verify: {url: "jdbc:postgresql://db:5432/shop", user: reader, password: "${PASSWORD}"}

  rowdelta verify sink.yaml                              # all tables
  rowdelta verify sink.yaml --table orders --limit 100   # one, and more of its differences
  rowdelta verify sink.yaml --json                       # one JSON object a table

how:
  It reads a snapshot of the source, waits until the sink has passed it, and compares the table as it is then: by counts
  and checksums of 16,384 ranges of keys, then key by key in the ranges that differ. Keys that change meanwhile are
  compared in further rounds. So the sink may run, and the source may change.

what it needs:
  A user who may read the tables. In Postgres, pg_monitor (to see how far Debezium is) makes it faster and surer; in
  MySQL and MariaDB, PROCESS. The sink must run, or have applied what the topic has.

exit codes:
  1   a table differs from its source
  75  none differs, but one couldn't be compared, or all its keys changed all the time: run again
  2, 4  none differs, but one can't be compared as things are: see what is printed
"""

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

_EPILOG = """\
exit codes:
  0   done, or stopped as asked
  1   an unexpected error: please report it; of demo and verify: table and source differ
  2   the configuration or the command line is wrong
  3   the source's data was refused (bad record, contradiction, re-read in mode changelog)
  4   the target table doesn't fit, is gone, or another run uses the same sink id
  75  a service was unreachable or a job failed: run again, nothing is lost or applied twice
  130 interrupted by Ctrl-C before the first micro-batch, or by a second one: run again
  141 whoever read the output has gone, such as head
  143 interrupted by SIGTERM before the first micro-batch: run again

a first run:
  rowdelta demo                                         # an embedded example, no server needed
  rowdelta init --bootstrap-servers localhost:9092      # writes sink.yaml for your topics; or --files FOLDER
  rowdelta check sink.yaml                              # is it right, are Kafka and the catalog there?
  rowdelta run sink.yaml
  rowdelta verify sink.yaml                             # are the tables equal to the database?
"""

_BUG = (
    "this is a mistake in rowdelta. Each table is as its last commit left it, so you may run again. Please report it, "
    "with the lines above and what rowdelta --version prints."
)
_STDOUT = 1
_OUTPUT_GONE = 128 + signal.SIGPIPE
"""The exit code that a shell gives to a command which SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    logs.start()
    try:
        with interrupts.raised():
            code = int(args.command(args))
            print(end="", flush=True)  # or an error of the output would come when nobody handles it
            return code
    except RowdeltaError as error:
        _report(error)
        return error.exit_code
    except interrupts.InterruptedBySignalError as interrupted:
        _report(interrupted)
        return interrupted.exit_code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_output_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # or Python would complain at its end
            return _OUTPUT_GONE
        if logs.is_json():
            log.exception("an unexpected error; please report it")
        else:
            print(printable(traceback.format_exc().rstrip()), file=sys.stderr)
            if not isinstance(error, OSError):  # such as a full disk
                print(f"rowdelta: {_BUG}", file=sys.stderr)
        return RowdeltaError.exit_code


def _is_output_gone() -> bool:
    """Whether nobody reads the output any more, as after `| head`."""
    poll = select.poll()
    poll.register(_STDOUT, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _report(error: BaseException) -> None:
    """The last words of a command."""
    if logs.is_json():
        log.error("%s", error)
    else:
        print(f"rowdelta: {printable(str(error))}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rowdelta",
        description="Keeps Iceberg and Delta tables equal to the databases whose changelogs you have, exactly once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of rowdelta and Spark, and more")
    commands = parser.add_subparsers(metavar="command", required=True)

    def add(name: str, function: object, help_text: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=description)
        command.set_defaults(command=function)
        return command

    with_config = [
        add("run", _run, "apply the source's changes to the tables",
            "Reads the changelog from where each table got to and applies it, one snapshot per micro-batch. Ctrl-C and "
            "SIGTERM finish the micro-batch and stop; running again goes on from there."),
        add("check", _check, "validate the configuration, reach source and catalogs, show the plan",
            "Validates the configuration, reaches the source and the catalogs, and shows the plan. Doesn't connect to "
            "the databases of the section verify. Changes nothing."),
        add("status", _status, "show each table's snapshot, position and lag",
            "Shows per table the last snapshot, the stored source position and how far it is behind. Changes nothing."),
        add("warm", _warm, "make the next starts faster",
            "Writes the classes that the JVM loads into an archive in the user's cache folder "
            "($XDG_CACHE_HOME/rowdelta, 200 MB), from which the next starts take them. Only for a local master."),
        listing := add("packages", _packages, "print the Maven coordinates for spark-submit --packages",
            "Prints the Maven coordinates that a configuration needs, for spark-submit --packages."),
    ]  # fmt: skip
    for command in with_config:
        command.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
    listing.add_argument(
        "--excludes",
        action="store_true",
        help="print instead what they would bring in without need, for --exclude-packages",
    )
    with_config[0].add_argument(
        "--verbose", action="store_true", help="print also what the JVM prints at its start, and each commit's position"
    )
    _add_package(add)
    _add_init(add)
    _add_history(add)
    _add_verify(commands)
    _add_maintain(commands)
    _add_reset(commands)
    _add_dead_letters(commands)
    demo = add("demo", _demo, "run an embedded example, from generated changes to a proven table",
               "Generates a small shop's changelog, runs the sink into a local warehouse, and shows that table and "
               "source are equal. Needs no server.")  # fmt: skip
    demo.add_argument(
        "--folder", default="demo", help="where to put source files, warehouse and checkpoint (default: ./demo)"
    )
    demo.add_argument(
        "--format", default="iceberg", choices=("iceberg", "delta"), help="format of the tables (default: iceberg)"
    )
    return parser


def _add_package(add: "Callable[[str, object, str, str], argparse.ArgumentParser]") -> None:
    package = add("package", _package, "pack what tasks import into an archive for spark-submit --archives", _PACKAGE)
    package.formatter_class = argparse.RawDescriptionHelpFormatter
    package.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
    package.add_argument(
        "--output", metavar="FILE",
        help="the archive to write (default: a name of version, Python and platform in this folder)",
    )  # fmt: skip
    package.add_argument("--force", action="store_true", help="replace an existing file")


def _add_init(add: "Callable[[str, object, str, str], argparse.ArgumentParser]") -> None:
    init = add("init", _init, "write a first configuration for a broker's topics or a folder's files",
               "Looks at a Kafka broker's topics, or at a folder of change files, recognises their format by the "
               "messages, and writes a commented configuration. Never overwrites a file. Needs no Java.")  # fmt: skip
    where = init.add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap-servers", metavar="HOST:PORT", help="a Kafka broker, or several with commas")
    where.add_argument("--files", metavar="DIR", help="a folder of change files (Parquet or JSON), or of such folders")
    init.add_argument("--registry", metavar="URL", help="the schema registry, for Avro")
    init.add_argument("--topics", metavar="REGEX", default=".*", help="only topics whose whole name this matches")
    init.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[],
        help="an option of Kafka's client, such as security.protocol=SASL_SSL, sasl.mechanism=PLAIN, sasl.username=u, "
        "'sasl.password=${PASSWORD}', or of the registry's, such as "
        "'schema.registry.basic.auth.user.info=rowdelta:${REGISTRY_PASSWORD}'; may be given several times. Write a "
        "secret as '${NAME}' in single quotes, since others can read a command line. The file never gets a secret",
    )  # fmt: skip
    init.add_argument(
        "--key", metavar="COLUMN", action="append", default=[],
        help="a key column, for tables whose messages don't state the key; may be given several times",
    )  # fmt: skip
    init.add_argument(
        "--order-by", metavar="COLUMN", action="append", default=[],
        help="a column that orders changes in files, such as seq or 'source.lsn bigint'; may be given several times",
    )  # fmt: skip
    init.add_argument("--output", metavar="FILE", default="sink.yaml", help="the file to write (default: ./sink.yaml)")


def _add_history(add: "Callable[[str, object, str, str], argparse.ArgumentParser]") -> None:
    history = add("history", _history, "list a table's commits",
                  "Lists a table's commits, newest first: when, by whom, from which source position to which, how many "
                  "changes of each kind, and the files. Changes nothing.")  # fmt: skip
    show = add("show", _show, "print rows of a table, also as they were",
               "Prints rows of a table as they are, or were at a time, in a snapshot, or at a source position. Which "
               "snapshot that is goes to stderr. Changes nothing.")  # fmt: skip
    for command in (history, show):
        command.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
        command.add_argument(
            "table", metavar="TABLE",
            help="catalog.namespace.table; or, if no pattern made it, the end of this or its source",
        )  # fmt: skip
        command.add_argument("--limit", type=_count, default=20, help="at most so many (default: 20)")
        command.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    show.add_argument(
        "--key", metavar="COLUMN=VALUE", action="append", default=[],
        help="only rows with this value; may be given for several columns. Without a column it is the key's",
    )  # fmt: skip
    when = show.add_mutually_exclusive_group()
    when.add_argument("--as-of", metavar="TIME", type=_time, help="ISO 8601, such as 2026-01-31T12:00:00; UTC")
    when.add_argument("--version", metavar="ID", type=int, help="a snapshot or version; rowdelta history lists them")
    when.add_argument(
        "--at-position", metavar="JSON", type=_position,
        help="the newest snapshot that is not past this source position, such as '{\"0\": 42}': no message of "
        "partition 0 from offset 42 on has been applied. Partitions that aren't named may be anywhere",
    )  # fmt: skip


def _of_tables(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    function: object,
    help_text: str,
    description: str,
) -> argparse.ArgumentParser:
    """A command that does something for all tables of a configuration, or for some."""
    command = commands.add_parser(
        name, help=help_text, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(command=function)
    command.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
    command.add_argument(
        "--table",
        metavar="TARGET",
        action="append",
        default=[],
        help="only this table, by its target, the end of it, or its source; may be given several times",
    )
    return command


def _add_maintain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    what = "rewrite what is slow to read, and remove what nobody needs"
    command = _of_tables(commands, "maintain", _maintain, what, _MAINTAIN)
    command.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    command.add_argument(
        "--where", metavar="CONDITION",
        help="rewrite only files that may have such rows, such as \"day >= '2026-01-01'\" (Spark SQL)",
    )  # fmt: skip
    command.add_argument(
        "--convert-equality-deletes", action="store_true",
        help="do only this: say by position what others have deleted by value, so that more engines read the table",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON object a table, for machines")


def _add_reset(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "reset",
        help="let a table's source be read from its start again",
        description=_RESET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=_reset)
    command.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
    command.add_argument("table", metavar="TABLE", help="the table's target, the end of it, or its source")
    command.add_argument("--empty", action="store_true", help="remove the table's rows too")
    command.add_argument("--yes", action="store_true", help="don't ask")


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _of_tables(commands, "verify", _verify, "compare tables with their sources", _VERIFY)
    command.add_argument("--limit", type=_count, default=20, help="show at most so many keys of a table (default: 20)")
    command.add_argument(
        "--timeout", type=_count, default=600, metavar="SECONDS",
        help="in each of at most 6 rounds a table, wait at most so long for connector and sink to get as far as the "
        "source (default: 600)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON object a table, for machines")


class _Version(argparse.Action):
    """Shows versions. It finds them only when asked, because it has to read files."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from sink.spark import versions as spark_versions

        print(f"rowdelta {_version()}")
        try:
            spark = spark_versions.installed()
            print(f"Spark {spark.full}, for Scala {spark.scala}")
            print(f"Iceberg {spark.known.iceberg}  {spark.iceberg_runtime}")
            print(f"Delta Lake {spark.known.delta}  {','.join(spark.delta_packages)}")
            print(f"Kafka connector  {spark.kafka_connector}")
        except ConfigError as error:
            parser.exit(ConfigError.exit_code, f"rowdelta: {error}\n")
        parser.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rowdelta")
    except PackageNotFoundError:  # sent to a cluster as files
        return "of unknown version"


def _add_dead_letters(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser(
        "dead-letters",
        help="list, count or replay the records that could not be applied",
        description="Shows the records that could not be applied, and applies them after a correction.",
        epilog=_DEAD_LETTERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = group.add_subparsers(metavar="action", required=True)

    def add(name: str, function: object, help_text: str, description: str) -> argparse.ArgumentParser:
        written = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
        action = actions.add_parser(name, help=help_text, description=description, formatter_class=written)
        action.set_defaults(command=function)
        action.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
        action.add_argument(
            "--table", metavar="TARGET", help="only letters of this target, as the configuration names it"
        )
        action.add_argument(
            "--class", dest="error_class", metavar="CLASS", help="only this error class, such as null_key"
        )
        action.add_argument("--reason", metavar="TEXT", help="only letters whose reason has this text in it")
        action.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
        return action

    listing = add("list", _list_dead_letters, "show them, newest first",
                  "Shows dead letters, newest first. Changes nothing. With --json bytes that are not UTF-8 are in "
                  "base64, as key_base64 and value_base64.")  # fmt: skip
    listing.add_argument("--limit", type=_count, default=50, help="at most so many (default: 50)")
    add("counts", _count_dead_letters, "count them by table, error class and reason",
        "Counts dead letters by table, error class and reason, the most frequent first. Changes nothing.")  # fmt: skip
    replaying = add("replay", _replay_dead_letters, "apply them after a correction", _REPLAY)
    replaying.add_argument(
        "--force",
        action="store_true",
        help="apply also letters that the topic no longer has, and go on if the configuration refuses records that "
        "were applied when they arrived",
    )


def _run(args: argparse.Namespace) -> int:
    config = _load(args)
    if args.verbose:
        log.setLevel(logging.DEBUG)
    if config.sink.log_format == "json":
        logs.use_json(config.sink.id)
    from sink.commands.run import refuse_early
    from sink.run import running

    refuse_early(config)
    with running.marked(config), _watching(config) as observer:
        return _run_watched(config, observer)


@contextmanager
def _watching(config: "Config") -> "Iterator[Observer | None]":
    """Serve what the run tells, if the configuration wants it. It is there before Spark starts, which takes seconds.

    :raises ConfigError: the address can't be used.
    """
    http = config.sink.http
    if http is None:
        yield None
        return
    from sink.watch.server import WatchServer
    from sink.watch.state import State

    state = State(config.sink.id, _version(), config.sink.ready_seconds)
    server = WatchServer(state, http.host, http.port, http.hosts)
    server.start()
    try:
        yield state
    finally:
        server.stop()


def _run_watched(config: "Config", observer: "Observer | None") -> int:
    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    from sink.spark import session

    with ThreadPoolExecutor(1, "rowdelta-import") as pool:
        pool.submit(import_module, "sink.run.pipeline")  # takes a second, which the JVM needs to start
        spark = session.start(config)
    from sink.run.observer import nobody
    from sink.run.pipeline import Pipeline, stops_on_signals

    with session.stopping(spark):
        pipeline = Pipeline(spark, config, observer or nobody)
        with stops_on_signals(spark, pipeline):
            pipeline.run()
    return 0


def _warm(args: argparse.Namespace) -> int:
    config = _load(args)
    from sink.commands import training

    for line in training.warm(Path(args.config), config):
        print(line, flush=True)
    return 0


def _check(args: argparse.Namespace) -> int:
    from sink.commands import inspection

    return _inspect(args, inspection.check, short=True)


def _status(args: argparse.Namespace) -> int:
    from sink.commands import inspection

    return _inspect(args, inspection.status, short=True)


def _refuse_options(args: argparse.Namespace) -> None:
    """:raises ConfigError: options of `init` that the chosen kind of source doesn't have."""
    of_kafka = {"--topics": args.topics != ".*", "--registry": args.registry is not None, "--option": args.option}
    of_files = {"--order-by": args.order_by}
    chosen, other, wrong = "--bootstrap-servers", "--files", of_files
    if args.files is not None:
        chosen, other, wrong = other, chosen, of_kafka
    names = [name for name, is_given in wrong.items() if is_given]
    if names:
        raise ConfigError(f"{' and '.join(names)}: only with {other}, and here is {chosen}. Leave it out.")


def _init(args: argparse.Namespace) -> int:
    from sink.commands import initialize, proposal

    _refuse_options(args)
    output = Path(args.output)
    if args.files is not None:
        results = initialize.from_files(Path(args.files), output, args.key, args.order_by)
    else:
        results = initialize.from_kafka(
            args.bootstrap_servers, output, args.registry, args.topics, args.option, args.key
        )
    for line in proposal.told("kafka" if args.files is None else "files", results):
        print(printable(line))
    print(f"wrote {output}. Read its comments, then: rowdelta check {output}")
    return 0


def _history(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.commands import time_travel

        found = time_travel.history(spark, config, time_travel.target(config, args.table))
        return found.lines(args.limit, as_json=args.json)

    return _inspect(args, look, short=True)


def _show(args: argparse.Namespace) -> int:
    def look(spark: "SparkSession", config: "Config") -> Iterator[str]:
        from sink.commands import time_travel

        when = time_travel.When(args.as_of, args.version, args.at_position)
        found = time_travel.show(spark, config, time_travel.target(config, args.table), when, args.key, args.limit)
        print(printable(found.heading), file=sys.stderr)
        if args.json:
            yield from found.rows
        elif found.cells:
            yield from _as_table(found.columns, found.cells)
        else:
            yield "no such row" if args.key else "no rows"

    return _inspect(args, look, short=True, shown=printable_row if args.json else printable)


def _verify(args: argparse.Namespace) -> int:
    config = _load(args)
    from sink.commands import verify
    from sink.spark import session

    spark = session.start(verify.with_drivers(config), short=True)
    outcomes = []
    with session.stopping(spark):
        for outcome in verify.verify(spark, config, args.table, args.limit, args.timeout):
            outcomes.append(outcome)
            for line in [verify.as_json(outcome)] if args.json else verify.lines(outcome):
                print(printable_row(line) if args.json else printable(line), flush=True)
    return verify.exit_code(outcomes)


def _agreed() -> bool:
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _reset(args: argparse.Namespace) -> int:
    if not args.yes and not sys.stdin.isatty():
        raise ConfigError("reset asks before it changes the table, and here is no terminal to answer. Give --yes.")
    config = _load(args)
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


def _maintain(args: argparse.Namespace) -> int:
    if args.convert_equality_deletes and args.where is not None:
        raise ConfigError(
            "--where chooses files to rewrite, and --convert-equality-deletes rewrites none. Leave out one of them."
        )
    config = _load(args)
    from sink.commands import maintain
    from sink.run.patterns import NO_TABLE
    from sink.spark import session

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
        yield from _as_table(columns, rows) if rows else [dead_letters.nothing(spark, config, _selection(args))]

    return _inspect(args, look, short=True, shown=printable_row if args.json else printable)


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
        yield from _as_table(columns, rows) if rows else [dead_letters.nothing(spark, config, _selection(args))]

    return _inspect(args, look, short=True)


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

    return _inspect(args, look) or (DataError.exit_code if left else 0)


def _selection(args: argparse.Namespace) -> "Selection":
    from sink.deadletters.table import Selection

    return Selection(args.table, args.error_class, args.reason)


def _as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with aligned columns. The last column isn't padded."""
    shown = [[one_line(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(columns) - 1)]
    for row in shown:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def _inspect(
    args: argparse.Namespace,
    look: "Callable[[SparkSession, Config], Iterator[str]]",
    *,
    short: bool = False,
    shown: Callable[[str], str] = printable,
) -> int:
    config = _load(args)
    from sink.spark import session

    spark = session.start(config, short=short)
    with session.stopping(spark):
        for line in look(spark, config):
            print(shown(line))
    return 0


def _load(args: argparse.Namespace) -> "Config":
    """The configuration, for a command that needs Java too."""
    from sink import config

    loaded = config.load(args.config)
    _require_java()
    return loaded


def _packages(args: argparse.Namespace) -> int:
    from sink import config
    from sink.spark import session

    listed = session.excludes if args.excludes else session.packages
    print(",".join(listed(config.load(args.config))))
    return 0


def _package(args: argparse.Namespace) -> int:
    from sink import config
    from sink.commands import packaging

    output = Path(args.output or packaging.default_name())
    for line in packaging.package(Path(args.config), config.load(args.config), output, force=args.force):
        print(line)
    return 0


def _demo(args: argparse.Namespace) -> int:
    _require_java()
    from sink.commands import demo

    return demo.run(Path(args.folder), args.format)


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if home and not Path(home, "bin", "java").exists():  # Spark's scripts take it in any case
        raise ConfigError(
            f"no Java found: JAVA_HOME is {home}, and there is no bin/java in it. Let it name a JDK 17 or newer, or "
            "unset it."
        )
    if not home and shutil.which("java") is None:
        raise ConfigError(
            "no Java found. Spark needs a JDK 17 or newer: install one (Debian and Ubuntu: apt install "
            "openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME."
        )
