"""Tables of Spark's session catalog (`spark_catalog: true`), which is a Hive metastore."""

from pathlib import Path

import pytest

from tests.delta.own_process import follow_in_own_process

pytestmark = pytest.mark.spark


def test_in_a_hive_metastore(tmp_path: Path) -> None:
    """A process of its own, since a session can't change its catalog. The metastore is a database in a file."""
    follow_in_own_process("tests.delta.catalog_story", tmp_path)
    assert (tmp_path / "metastore").is_dir()
