"""Which change files are read whole, as bytes."""

import pytest

from sink.sources import files


@pytest.mark.parametrize(
    ("path", "special"),
    [
        ("file:/a/b c%20é#1.parquet", False),
        ("s3a://bucket/x/y.parquet", False),
        ("hdfs://name:8020/x/y-2026.parquet", False),
        ("/plain/x.parquet", False),
        ("s3a://bucket/2026-01-02T10:30:00Z.parquet", True),
        ("hdfs://name:8020/x:y/z.parquet", True),
        ("file:/a/region=EU/x.parquet", True),
        ("file:/a/_day=1.parquet", True),
        ("file:/a,b/x.parquet", True),
        ("file:/a/{x}.parquet", True),
        ("file:/a/[x].parquet", True),
        ("file:/a/x*.parquet", True),
        ("file:/a/x?.parquet", True),
    ],
)
def test_paths_that_mean_more_than_a_file(path: str, special: bool) -> None:
    """To Hadoop, which takes a list of patterns, or to Spark, which takes columns from folders."""
    assert bool(files._SPECIAL.search(path)) == special
