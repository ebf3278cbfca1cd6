"""`rowdelta package` and `packages`."""

import argparse
from pathlib import Path

from sink.console.command import Commands, command

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


def add(commands: Commands) -> None:
    package = command(
        commands, "package", _package, "pack what tasks import into an archive for spark-submit --archives", _PACKAGE
    )
    package.add_argument(
        "--output", metavar="FILE",
        help="the archive to write (default: a name of version, Python and platform in this folder)",
    )  # fmt: skip
    package.add_argument("--force", action="store_true", help="replace an existing file")


def add_packages(commands: Commands) -> None:
    added = command(
        commands, "packages", _packages, "print the Maven coordinates for spark-submit --packages",
        "Prints the Maven coordinates that a configuration needs, for spark-submit --packages.",
    )  # fmt: skip
    added.add_argument(
        "--excludes",
        action="store_true",
        help="print instead what they would bring in without need, for --exclude-packages",
    )


def _package(args: argparse.Namespace) -> int:
    from sink import config
    from sink.commands import packaging

    output = Path(args.output or packaging.default_name())
    for line in packaging.package(Path(args.config), config.load(args.config), output, force=args.force):
        print(line)
    return 0


def _packages(args: argparse.Namespace) -> int:
    from sink import config
    from sink.spark import session

    listed = session.excludes if args.excludes else session.packages
    print(",".join(listed(config.load(args.config))))
    return 0
