"""`rowdelta check` and `rowdelta status`: look, and change nothing."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import SparkSession

from sink.config import Config, redacted
from sink.iceberg import Catalogs
from sink.inference import infer_columns
from sink.microbatch import property_prefix, start_position
from sink.pipeline import open_source
from sink.tables import plan_table


def check(spark: SparkSession, config: Config) -> Iterator[str]:
    """Validate everything a run would need, without creating or writing. Yields what was found, line by line.

    :raises RowdeltaError: the first thing that a run would fail on.
    """
    yield f"sink {config.sink.id}: {config.source.type} ({config.source.format}), trigger {config.sink.trigger}"
    for name, properties in config.catalogs.items():
        yield f"catalog {name}: {', '.join(f'{k}={v}' for k, v in redacted(properties).items())}"
    catalogs = Catalogs(spark)
    plans = []
    for i, section in enumerate(config.tables):
        table = catalogs.load(section.target)
        types = infer_columns(spark, config, section) if table is None and section.columns is None else None
        plans.append(plan_table(config, i, table, types))
    source = open_source(spark, config, {plan.section.target: plan.changelog for plan in plans})
    for plan in plans:
        section = plan.section
        yield f"{section.source} -> {section.target}: {'exists' if plan.exists else 'will be created'}"
        yield f"  source: {source.check(section)}"
        columns = ", ".join(
            f"{c.name} {c.type.simpleString()}{' (key)' if c.name in section.key else ''}" for c in plan.columns
        )
        inferred = not plan.exists and section.columns is None
        yield f"  columns{' (inferred from messages; write them down to pin them)' if inferred else ''}: {columns}"
        order = ", ".join(name for name, _ in plan.changelog.order_by) or "topic, partition, offset"
        yield f"  mode {section.mode}, deletes {section.deletes}, ordered by {order}"
    if config.sink.on_bad_record == "dead-letter":
        topic = f", and to topic {config.sink.dead_letter_topic}" if config.sink.dead_letter_topic else ""
        limit = config.sink.max_bad_records
        stop = f"; more than {limit:,} in a run and table stop the job" if limit is not None else ""
        yield f"bad records go to {config.dead_letter_table}{topic}{stop}"
    else:
        yield "a bad record stops the job"
    yield "ok"


def status(spark: SparkSession, config: Config) -> Iterator[str]:
    """Per table the last snapshot, the stored position and the lag."""
    catalogs = Catalogs(spark)
    plans: dict[str, Any] = {}
    source = open_source(spark, config, plans)
    prefix = property_prefix(config)
    for section in config.tables:
        table = catalogs.load(section.target)
        if table is None:
            yield f"{section.target}: does not exist yet; rowdelta run creates it"
            continue
        stored = table.position(prefix)
        position = stored.position if stored else start_position(table, prefix)
        snapshot = table.java.currentSnapshot()
        if snapshot is None:
            yield f"{section.target}: empty, no snapshot"
        else:
            at = datetime.fromtimestamp(int(snapshot.timestampMillis()) / 1000, UTC)
            summary = snapshot.summary()
            yield (
                f"{section.target}: snapshot {snapshot.snapshotId()} of {at:%Y-%m-%d %H:%M:%S} UTC, "
                f"{summary.get('total-data-files')} data files, {summary.get('total-delete-files')} delete files, "
                f"{int(summary.get('total-equality-deletes') or 0):,} equality deletes"
            )
        yield f"  position: {json.dumps(position) if position else 'none; nothing applied yet'}"
        yield f"  lag: {source.lag(section, position)}"
