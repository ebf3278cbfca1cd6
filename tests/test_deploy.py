"""What is under `deploy/`."""

from pathlib import Path
from typing import Any

import yaml
from kubeflow_spark_api.models.spark_v1beta2_spark_application import SparkV1beta2SparkApplication

from sink import config
from sink.spark import versions

ROOT = Path(__file__).parents[1]


def manifests() -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy" / "kubernetes" / "sink.yaml").read_text()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def test_the_manifest_is_what_the_spark_operator_takes() -> None:
    """The operator's own models check types and what is required. A field that they don't know would be missing in what
    they write.
    """
    application = manifests()["SparkApplication"]
    parsed = SparkV1beta2SparkApplication.from_dict(application)
    assert parsed is not None
    assert parsed.to_dict() == application


def test_its_configuration_is_valid(tmp_path: Path, monkeypatch: Any) -> None:
    found = manifests()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "sink.yaml").write_text(found["ConfigMap"]["data"]["sink.yaml"])
    loaded = config.load(tmp_path / "sink.yaml")
    assert loaded.tables[0].target == "lake.shop.orders"
    spec = found["SparkApplication"]["spec"]
    # of the Spark that the manifest names, whatever the tests run with
    spark = versions.SparkVersion(spec["sparkVersion"], "2.13")
    assert spark.iceberg_runtime in spec["deps"]["packages"]
    image = (ROOT / "deploy" / "kubernetes" / "Dockerfile").read_text()
    assert f"apache/spark:{spec['sparkVersion']}-" in image
    assert f"pyspark=={spec['sparkVersion']}" in image
