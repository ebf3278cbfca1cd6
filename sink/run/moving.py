"""Moves rows to new files, in tasks or on the driver: what minor compactions, rewrites beside the stream and
`deletes: copy-on-write` have in common.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltawriters import TaskId
from deltawriters.keyindex import RunInfo
from sink.run.engine import Engine
from sink.spark import task


@dataclass(frozen=True)
class Moved:
    """What was written.

    :param files: the new files, as JSON in the format's terms.
    :param runs: where the rows are now.
    :param rows: number of rows.
    :param bytes: of the files.
    """

    files: list[str]
    runs: list[RunInfo]
    rows: int
    bytes: int


def moved(
    engine: Engine, plan: task.RewritePlan, groups: task.Groups, created: list[str], *, on_driver: bool = False
) -> Moved:
    """Write the groups' rows to new files.

    :param created: the paths of new files are added to it, also after an error.
    :param on_driver: without a job, which costs more than it saves if there is little to move.
    """
    results: Sequence[Mapping[str, Any]]
    if on_driver:
        results = [task.rewritten(plan, TaskId(0, 0, plan.operation), groups, created.extend)]
    else:
        results = engine.rewrite(plan, groups, created)
    return Moved(
        [json.dumps(file) for result in results for file in result["files"]],
        [RunInfo.from_json(run) for result in results for run in result["runs"]],
        sum(int(result["rows"]) for result in results),
        sum(int(result["bytes"]) for result in results),
    )
