"""`python -m sink`, and the file to give to spark-submit."""

import sys

from sink.cli import main

sys.exit(main())
