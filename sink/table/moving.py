"""Moves rows to new files, in tasks or on the driver: what minor compactions, rewrites beside the stream and
`deletes: copy-on-write` have in common.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from deltawriters import TaskId
from deltawriters.keyindex import RunInfo
from deltawriters.scratch import Scratch
from sink.plans import Groups, RewritePlan
from sink.table.engine import Engine

T = TypeVar("T")


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


def move_rows(
    engine: Engine,
    plan: RewritePlan,
    groups: Groups,
    scratch: Scratch,
    *,
    on_driver: bool = False,
    threads: int = 1,
) -> Moved:
    """Write the groups' rows to new files.

    :param scratch: gets the new files, also after an error.
    :param on_driver: without a job, which costs more than it saves if there is little to move.
    :param threads: on the driver. Arrow leaves Python's lock while it decodes and encodes.
    """
    results: Sequence[Mapping[str, Any]]
    if on_driver:
        parts = shares(groups, threads)

        def rewritten(number: int) -> Mapping[str, Any]:
            return plan.move(TaskId(number, 0, plan.operation), parts[number], scratch.paths.extend)

        with ThreadPoolExecutor(max(1, len(parts) - 1)) as pool:  # the first one is this thread's
            others = [pool.submit(rewritten, number) for number in range(1, len(parts))]
            results = [rewritten(0), *(other.result() for other in others)]
    else:
        results = engine.rewrite(plan, groups, scratch.paths)
    return Moved(
        [json.dumps(file) for result in results for file in result["files"]],
        [RunInfo.from_json(run) for result in results for run in result["runs"]],
        sum(int(result["rows"]) for result in results),
        sum(int(result["bytes"]) for result in results),
    )


def dealt(items: Iterable[T], count: int, size: Callable[[T], int]) -> list[list[T]]:
    """Deal items out in at most so many groups, which are about equally large. No group is empty."""
    groups: list[list[T]] = [[] for _ in range(count)]
    sizes = [(0, number) for number in range(count)]
    for item in sorted(items, key=size, reverse=True):
        before, number = sizes[0]
        groups[number].append(item)
        heapq.heapreplace(sizes, (before + max(1, size(item)), number))
    return [group for group in groups if group]


def shares(groups: Groups, count: int) -> Sequence[Groups]:
    """Groups of files, dealt out to at most so many tasks."""
    each: list[Any] = list(groups)
    return dealt(each, count, lambda group: int(group.size_in_bytes))
