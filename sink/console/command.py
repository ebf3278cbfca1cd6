"""What commands have in common: the configuration, a session, and lines of text."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sink.errors import ConfigError
from sink.printing import one_line, printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink.config import Config


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with aligned columns. The last column isn't padded."""
    shown = [[one_line(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(columns) - 1)]
    for row in shown:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Takes the commands of a parser."""


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
    description: str,
    *,
    has_config: bool = True,
) -> argparse.ArgumentParser:
    """Add a command. Its description is printed as it is if it has several lines."""
    formatter = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
    added = commands.add_parser(name, help=help_text, description=description, formatter_class=formatter)
    added.set_defaults(command=run)
    if has_config:
        added.add_argument("config", metavar="sink.yaml", help="the configuration file (see docs/configuration.md)")
    return added


def add_tables(added: argparse.ArgumentParser) -> None:
    """The option `--table` of a command that does something for all tables of a configuration, or for some."""
    added.add_argument(
        "--table",
        metavar="TARGET",
        action="append",
        default=[],
        help="only this table, by its target, the end of it, or its source; may be given several times",
    )


def inspect(
    args: argparse.Namespace,
    look: "Callable[[SparkSession, Config], Iterator[str]]",
    *,
    short: bool = False,
    shown: Callable[[str], str] = printable,
) -> int:
    config = load(args)
    from sink.spark import session

    spark = session.start(config, short=short)
    with session.stopping(spark):
        for line in look(spark, config):
            print(shown(line))
    return 0


def load(args: argparse.Namespace) -> "Config":
    """The configuration, for a command that needs Java too."""
    from sink import config

    loaded = config.load(args.config)
    require_java()
    return loaded


def require_java() -> None:
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


def version_of_rowdelta() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rowdelta")
    except PackageNotFoundError:  # sent to a cluster as files
        return "of unknown version"
