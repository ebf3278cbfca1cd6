"""`rowdelta run`, and `warm`."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sink import logs
from sink.console.command import Commands, command, load, version_of_rowdelta

if TYPE_CHECKING:
    from sink.config import Config
    from sink.table.observer import Observer

log = logging.getLogger("rowdelta")


def add(commands: Commands) -> None:
    added = command(
        commands, "run", run, "apply the source's changes to the tables",
        "Reads the changelog from where each table got to and applies it, one snapshot per micro-batch. Ctrl-C and "
        "SIGTERM finish the micro-batch and stop; running again goes on from there.",
    )  # fmt: skip
    added.add_argument(
        "--verbose", action="store_true", help="print also what the JVM prints at its start, and each commit's position"
    )


def add_warm(commands: Commands) -> None:
    command(
        commands, "warm", _warm, "make the next starts faster",
        "Writes the classes that the JVM loads into an archive in the user's cache folder "
        "($XDG_CACHE_HOME/rowdelta, 200 MB), from which the next starts take them. Only for a local master.",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    config = load(args)
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

    state = State(config.sink.id, version_of_rowdelta(), config.sink.ready_seconds)
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
    from sink.run.pipeline import Pipeline, stops_on_signals
    from sink.table.observer import nobody

    with session.stopping(spark):
        pipeline = Pipeline(spark, config, observer or nobody)
        with stops_on_signals(spark, pipeline.stop):
            pipeline.run()
    return 0


def _warm(args: argparse.Namespace) -> int:
    config = load(args)
    from sink.commands import training

    for line in training.warm(Path(args.config), config):
        print(line, flush=True)
    return 0
