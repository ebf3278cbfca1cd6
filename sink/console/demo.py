"""`rowdelta demo`."""

import argparse
from pathlib import Path

from sink.console.command import Commands, command, require_java


def add(commands: Commands) -> None:
    added = command(
        commands, "demo", _demo, "run an embedded example, from generated changes to a proven table",
        "Generates a small shop's changelog, runs the sink into a local warehouse, and shows that table and "
        "source are equal. Needs no server.",
        has_config=False,
    )  # fmt: skip
    added.add_argument(
        "--folder", default="demo", help="where to put source files, warehouse and checkpoint (default: ./demo)"
    )
    added.add_argument(
        "--format", default="iceberg", choices=("iceberg", "delta"), help="format of the tables (default: iceberg)"
    )


def _demo(args: argparse.Namespace) -> int:
    require_java()
    from sink.commands import demo

    return demo.run(Path(args.folder), args.format)
