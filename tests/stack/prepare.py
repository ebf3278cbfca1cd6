"""`make stack`: fetches all that the stack needs, so that tests and `make demo-stack` start at once.

Jars go into the project's cache folder; Spark's packages, and the archive of its classes, where `rowdelta warm` keeps
them. What only a system's package manager can bring is named.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.stack.jars import HERE, unpacked
from tests.stack.mariadb import program as program_of_mariadb
from tests.stack.postgres import program
from tests.stack.process import ServiceError

EXAMPLE = HERE.parents[1] / "docs" / "examples" / "stack"
# Those of Delta's own engine are for one version of Spark each.
_OTHERS = ("ivy-delta-", "ivy-sqlite-jdbc")


def missing() -> list[str]:
    """What is to be installed, in words."""
    found = []
    for find, names in ((program, ("postgres", "initdb", "pgbench")), (program_of_mariadb, ("mariadbd",))):
        for name in names:
            try:
                find(name)
            except ServiceError as error:
                found.append(str(error))
    found += [f"There is no {name}" for name in ("openssl", "java") if shutil.which(name) is None]
    return found


def main() -> int:
    for what in missing():
        print(what, file=sys.stderr)
    modules = sorted(path for path in Path(HERE).glob("ivy-*.xml") if not path.stem.startswith(_OTHERS))
    for number, module in enumerate(modules, 1):
        print(f"{number} of {len(modules)}: {module.stem}", flush=True)
        unpacked(module)
    print("Spark's packages and classes", flush=True)
    warm = subprocess.run([sys.executable, "-m", "sink", "warm", str(EXAMPLE / "sink.yaml")], check=False)
    return warm.returncode or bool(missing())


if __name__ == "__main__":
    sys.exit(main())
