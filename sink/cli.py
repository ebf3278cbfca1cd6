"""The `rowdelta` command: which commands there are, and how they end."""

import argparse
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from sink import logs

# These load little: until the imports of this module are done, nobody handles signals.
from sink.console import dead_letters, demo, init, load, look, maintain, package, reconcile, reset, run, verify
from sink.console.command import version_of_rowdelta
from sink.errors import ConfigError, RowdeltaError
from sink.printing import printable
from sink.spark import interrupts

log = logging.getLogger("rowdelta")

COMMANDS = (
    run.add,
    look.add_check,
    look.add_status,
    run.add_warm,
    package.add_packages,
    package.add,
    init.add,
    load.add,
    look.add_history,
    verify.add,
    reconcile.add,
    maintain.add,
    reset.add,
    dead_letters.add,
    demo.add,
)
"""What adds each command to the parser, in the order of `--help`."""

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
    for add in COMMANDS:
        add(commands)
    return parser


class _Version(argparse.Action):
    """Shows versions. It finds them only when asked, because it has to read files."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from sink.spark import versions as spark_versions

        print(f"rowdelta {version_of_rowdelta()}")
        try:
            spark = spark_versions.installed()
            print(f"Spark {spark.full}, for Scala {spark.scala}")
            if spark.known.iceberg is not None:
                print(f"Iceberg {spark.known.iceberg}  {spark.iceberg_runtime}")
            print(f"Delta Lake {spark.known.delta}  {','.join(spark.delta_packages)}")
            print(f"Kafka connector  {spark.kafka_connector}")
        except ConfigError as error:
            parser.exit(ConfigError.exit_code, f"rowdelta: {error}\n")
        parser.exit()
