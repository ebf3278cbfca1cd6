"""`make stack`: fetches all that the stack needs, so that tests and `make demo-stack` start at once.

Jars go into the project's cache folder; Spark's packages, and the archive of its classes, where `rowdelta warm` keeps
them. What only a system's package manager can bring is named.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.stack import mariadb, postgres
from tests.stack.jars import HERE, NotInstalledError, unpacked

EXAMPLE = HERE.parents[1] / "docs" / "examples" / "stack"
# Those of Delta's own engine are for one version of Spark each; `missing` fetches the databases.
_OTHERS = ("ivy-delta-", "ivy-sqlite-jdbc", "ivy-postgres", "ivy-mariadb")


def missing() -> list[str]:
    """What is to be installed, in words. Databases that come as packages are fetched."""
    found = [f"There is no {name}" for name in ("openssl", "java") if shutil.which(name) is None]
    for server in (postgres.server, mariadb.server):
        try:
            server()
        except NotInstalledError as error:
            found.append(str(error))
    return found


def main() -> int:
    print("PostgreSQL and MariaDB", flush=True)
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
