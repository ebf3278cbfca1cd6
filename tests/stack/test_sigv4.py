"""A REST catalog that takes only requests which are signed by AWS's Signature Version 4."""

import json
from pathlib import Path

import pytest

from tests.stack.rest_catalog import running_rest_catalog
from tests.stack.sigv4 import SigV4
from tests.stack.sink_process import S3A_PACKAGES, SinkProcess, written

pytestmark = pytest.mark.spark


def test_a_catalog_that_wants_signatures(tmp_path: Path) -> None:
    changes = tmp_path / "changes"
    changes.mkdir()
    (changes / "1.json").write_text(json.dumps({"row_kind": "+I", "id": 1, "seq": 1}))
    with running_rest_catalog() as catalog, SigV4(catalog.uri) as door:
        values = {
            "sink": {"id": "signed", "checkpoint": str(tmp_path / "state"), "trigger": "available-now"},
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "catalogs": {
                "lake": {
                    "type": "rest",
                    "uri": door.url,
                    "rest.sigv4-enabled": "true",
                    "rest.signing-name": door.SERVICE,
                    "rest.signing-region": door.REGION,
                    "rest.access-key-id": "${CATALOG_KEY}",
                    "rest.secret-access-key": "${CATALOG_SECRET}",
                }
            },
            "tables": [
                {
                    "source": str(changes),
                    "target": "lake.shop.orders",
                    "key": ["id"],
                    "columns": {"id": "bigint"},
                    "order_by": ["seq bigint"],
                }
            ],
            "spark": {
                "spark.master": "local[2]",
                "spark.driver.memory": "1g",
                "spark.ui.enabled": "false",
                "spark.jars.packages": ",".join(S3A_PACKAGES),
                "spark.jars.excludes": "software.amazon.awssdk:bundle",
            },
        }
        variables = {"CATALOG_KEY": door.KEY, "CATALOG_SECRET": door.SECRET}
        sink = SinkProcess(written(tmp_path / "sink", values), tmp_path, variables)
        done = sink.finish("run", str(sink.config))
        assert done.returncode == 0, done.stderr
        assert "batch 0: +I 1 " in done.stderr + done.stdout
        assert any(method == "POST" and path.endswith("/tables/orders") for method, path in door.requests)
        status = sink.finish("status", str(sink.config))
        assert status.returncode == 0, status.stderr
        assert "lag: 0 files behind" in status.stdout
        wrong = SinkProcess(sink.config, tmp_path, {**variables, "CATALOG_SECRET": "another"})
        refused = wrong.finish("status", str(sink.config))
        assert refused.returncode != 0
        assert "catalogs.lake: it can't be opened: Forbidden" in refused.stderr
        assert "another" not in refused.stderr
