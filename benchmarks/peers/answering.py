"""The other end of `benchmarks.peers.writers.PythonProgram`: answers lines of JSON."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peers.writers import RefusedError

Answer = Mapping[str, Any]


def serve(verbs: Mapping[str, Callable[..., Answer]]) -> None:
    """Answer until standard input ends. What others print to standard output goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            values = json.loads(line)
            try:
                answer = verbs[values.pop("do")](**values)
            except RefusedError as error:
                answer = {"refused": str(error)}
            except Exception as error:  # noqa: BLE001  # who asked says what follows
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
            answers.write(f"@{json.dumps(answer)}\n")
            answers.flush()
