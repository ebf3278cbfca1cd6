"""Descriptions of data and delete files, in the JSON that Iceberg's `ContentFileParser` reads."""

import json
from typing import Any

from deltawriters.content import ContentFile, FileContent, Partition
from sink.targets.iceberg.column_metrics import NO_METRICS, Metrics


def content_file(
    content: FileContent,
    path: str,
    partition: Partition,
    record_count: int,
    size_in_bytes: int,
    metrics: Metrics = NO_METRICS,
    *,
    file_format: str = "PARQUET",
    **others: Any,
) -> ContentFile:
    """Describe a file. The enums' names are those that every `ContentFileParser` since 1.10 accepts.

    :param others: `equality_ids`, `referenced_data_file`, `content_offset` and `content_size_in_bytes`, if the file has
        them. None counts as not there.
    """
    described: dict[str, Any] = {
        "spec-id": partition.spec_id,
        "content": content.value,
        "file-path": path,
        "file-format": file_format,
        "partition": json.loads(partition.text),
        "file-size-in-bytes": size_in_bytes,
        "record-count": record_count,
    }
    for name, counts in (
        ("column-sizes", metrics.column_sizes),
        ("value-counts", metrics.value_counts),
        ("null-value-counts", metrics.null_value_counts),
        ("nan-value-counts", metrics.nan_value_counts),
    ):
        if counts:
            described[name] = {"keys": list(counts), "values": list(counts.values())}
    for name, bounds in (("lower-bounds", metrics.lower_bounds), ("upper-bounds", metrics.upper_bounds)):
        if bounds:
            described[name] = {"keys": list(bounds), "values": [b.hex().upper() for b in bounds.values()]}
    if metrics.split_offsets:
        described["split-offsets"] = list(metrics.split_offsets)
    described |= {name.replace("_", "-"): value for name, value in others.items() if value is not None}
    vector = (described["referenced-data-file"], described) if file_format == "PUFFIN" else None
    return ContentFile(content, path, record_count, size_in_bytes, described, vector)
