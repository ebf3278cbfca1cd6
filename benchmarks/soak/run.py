"""Feeds the job, kills it, takes samples, and compares the tables with the source."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.processes import commit, machine_seconds
from benchmarks.soak.changes import Changes, differences
from benchmarks.soak.job import Job, SoakError

Sample = dict[str, Any]

_AHEAD = 5
"""Files that wait when the sink is killed, so that it is killed at work."""


@dataclass(frozen=True)
class Plan:
    """How long, and how often what happens, in micro-batches."""

    batches: int = 10_000
    keys: int = 1_000_000
    events: int = 1_000
    kill_every: int = 200
    column_every: int = 1_000
    comparisons_between: int = 20
    sample_every: int = 50
    seed: int = 1
    regions: int = 8
    """Partitions of the tables."""

    def kills(self) -> set[int]:
        """Never where the tables are compared: then the sink has nothing to do."""
        wanted = range(self.kill_every * 3 // 4, self.batches, self.kill_every)
        return {kill + 1 if kill in self.comparisons() else kill for kill in wanted}

    def comparisons(self) -> set[int]:
        """At the end, and at points at equal distances before it."""
        parts = self.comparisons_between + 1
        return {self.batches * part // parts for part in range(1, parts + 1)}

    def samples(self) -> set[int]:
        return {*range(self.sample_every, self.batches, self.sample_every), self.batches}


def run(plan: Plan, job: Job, samples: Path, tell: Callable[[str], None] = print) -> list[str]:
    """Play the plan. Samples are appended to a file of JSON lines as they are taken.

    :return: the differences between tables and source, in words. Empty if there are none.
    """
    changes = Changes(plan.keys, plan.events, plan.column_every, plan.seed, plan.regions)
    wrong: list[str] = []
    before: dict[str, dict[str, float]] = {}
    began = datetime.now(UTC).isoformat(timespec="seconds")
    _append({**asdict(plan), "formats": job.formats, "commit": commit(), "began": began}, samples)
    kills, comparisons, sampled = plan.kills(), plan.comparisons(), plan.samples()
    job.publish(1, changes.first_load())
    job.start()
    try:
        job.wait_for(1)
        for stop in sorted(kills | comparisons | sampled):
            ahead = min(stop + _AHEAD, *(each for each in comparisons if each >= stop)) if stop in kills else stop
            while changes.batches < ahead:
                batch = changes.batch()
                job.publish(changes.batches + 1, batch)
            if stop in kills:
                # who gets there first is killed at work, and the others on their way
                turn = (job.formats[stop // plan.kill_every % len(job.formats)],)
                job.wait_for(stop + 1, turn)
                job.kill()
                job.start()
                before = {}
                continue
            job.wait_for(stop + 1)
            if stop in sampled:
                told = {name: job.told(name) for name in job.formats}
                _append(_sample(job, stop, told, before), samples)
                before = told
            if stop in comparisons:
                _stands_at(job, stop + 1)
                expected = changes.expected()
                found = {name: differences(job.rows(name), expected) for name in job.formats}
                wrong += [f"{name} after {stop:,}: {each}" for name in job.formats for each in found[name]]
                equal = ", ".join(f"{name} {'differs' if found[name] else 'equal'}" for name in job.formats)
                tell(f"{stop:,} micro-batches, {job.starts} starts, {expected.num_rows:,} rows: {equal}")
                _append({"batch": stop, "compared": found, "rows": expected.num_rows, "starts": job.starts}, samples)
                job.forget(below=stop - 5)
    finally:
        job.kill()
    return wrong


def _stands_at(job: Job, number: int) -> None:
    """See that no table is further than it can be."""
    for name in job.formats:
        position = job.position(name)
        if position != number:
            raise SoakError(f"{name} stands at file {position}, not {number}")


def _sample(job: Job, batch: int, told: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> Sample:
    tables = {}
    for name in job.formats:
        now, then = told[name], before.get(name, {})
        commits = now["commits"] - then.get("commits", 0.0)
        stages = {key: value - then.get(key, 0.0) for key, value in now.items() if key.endswith("_seconds")}
        live = {key: value for key, value in now.items() if key.startswith("live_")}
        started = perf_counter()
        job.rows(name)
        tables[name] = {
            **live,
            **job.files(name),
            "commit_seconds": stages.get("commit_seconds", 0.0) / max(1.0, commits),
            "batch_seconds": sum(stages.values()) / max(1.0, commits),
            "scan_seconds": perf_counter() - started,
        }
    return {"batch": batch, "tables": tables, "processes": job.processes(), "machine_seconds": machine_seconds()}


def _append(sample: Sample, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(sample) + "\n")
