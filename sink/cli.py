"""The `rowdelta` command."""

import argparse
import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sink import config as configuration
from sink.errors import ConfigError, RowdeltaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EPILOG = """\
exit codes:
  0   done, or stopped as asked
  1   an unexpected error: please report it
  2   the configuration or the command line is wrong
  3   the source's data was refused (bad record, contradiction, re-read in mode changelog)
  4   the target table doesn't fit, is gone, or another run uses the same sink id
  75  a service was unreachable or a job failed: run again, nothing is lost or applied twice

a first run:
  rowdelta demo                  # an embedded example, no server needed
  rowdelta check sink.yaml       # is the configuration right, are Kafka and the catalog there?
  rowdelta run sink.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # it logs our own exceptions with their tracebacks on their way through the JVM; we report them ourselves
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    try:
        return int(args.command(args))
    except RowdeltaError as error:
        print(f"rowdelta: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rowdelta: interrupted; every table is as its last commit left it", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rowdelta",
        description="Keeps Iceberg tables equal to the databases whose changelogs you have, exactly once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def add(name: str, function: object, help_text: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=description)
        command.set_defaults(command=function)
        return command

    with_config = [
        add("run", _run, "apply the source's changes to the tables",
            "Reads the changelog from where each table got to and applies it, one snapshot per micro-batch. Ctrl-C and SIGTERM "
            "finish the micro-batch and stop; running again goes on from there."),
        add("check", _check, "validate the configuration and reach everything it names",
            "Validates the configuration, reaches the source and the catalogs, and shows the plan. Changes nothing."),
        add("status", _status, "show each table's snapshot, position and lag",
            "Shows per table the last snapshot, the stored source position and how far it is behind. Changes nothing."),
        add("packages", _packages, "print the Maven coordinates for spark-submit --packages",
            "Prints the Maven coordinates that a configuration needs, for spark-submit --packages."),
    ]  # fmt: skip
    for command in with_config:
        command.add_argument("config", metavar="sink.yaml", help="the configuration file (see README, Configuration)")
    demo = add("demo", _demo, "run an embedded example, from generated changes to a proven table",
               "Generates a small shop's changelog, runs the sink into a local warehouse, and shows that table and source are "
               "equal. Needs no server.")  # fmt: skip
    demo.add_argument(
        "--folder", default="demo", help="where to put source files, warehouse and checkpoint (default: ./demo)"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    config = configuration.load(args.config)
    _require_java()
    from sink import session
    from sink.pipeline import Pipeline, stops_on_signals

    spark = session.start(config)
    try:
        pipeline = Pipeline(spark, config)
        with stops_on_signals(spark, pipeline):
            pipeline.run()
    finally:
        _stop(spark)
    return 0


def _check(args: argparse.Namespace) -> int:
    from sink import inspection

    return _inspect(args, inspection.check)


def _status(args: argparse.Namespace) -> int:
    from sink import inspection

    return _inspect(args, inspection.status)


def _inspect(args: argparse.Namespace, look: "Callable[[SparkSession, configuration.Config], Iterator[str]]") -> int:
    config = configuration.load(args.config)
    _require_java()
    from sink import session

    spark = session.start(config)
    try:
        for line in look(spark, config):
            print(line)
    finally:
        _stop(spark)
    return 0


def _stop(spark: "SparkSession") -> None:
    """A signal to the whole process group, as systemd sends it, ends the JVM too; it may be gone before us."""
    from py4j.protocol import Py4JError

    with contextlib.suppress(Py4JError, OSError):
        spark.stop()


def _packages(args: argparse.Namespace) -> int:
    from sink import session

    print(",".join(session.packages(configuration.load(args.config))))
    return 0


def _demo(args: argparse.Namespace) -> int:
    _require_java()
    from sink import demo

    return demo.run(Path(args.folder))


def _require_java() -> None:
    import os

    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and Path(home, "bin", "java").exists()):
        raise ConfigError(
            "no Java found. Spark needs a JDK 17 or newer: install one (Debian and Ubuntu: apt install "
            "openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME."
        )
