"""`rowdelta`, whose failed tables are tried again after two seconds at first and not after ten."""

import sys

from sink.cli import main
from sink.run import supervisor

if __name__ == "__main__":
    supervisor.FIRST_PAUSE = 2.0
    sys.exit(main())
