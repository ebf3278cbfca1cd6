"""Tables in a bucket."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sink.spark.s3_log_store import use_conditional_writes
from sink.targets.delta.storage import storage_properties
from tests.delta.own_process import follow_in_own_process
from tests.stack.s3 import running_s3

pytestmark = pytest.mark.spark


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in values:
            spark.conf.unset(name)


KEYS = {"fs.s3a.access.key": "key", "fs.s3a.secret.key": "secret"}
OWN_KEYS = {"s3.access-key-id": "key", "s3.secret-access-key": "secret"}


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n"])
def test_aws_needs_keys_alone(spark: SparkSession, scheme: str) -> None:
    """PyIceberg asks AWS for the bucket's region, as Hadoop does."""
    with settings(spark, KEYS):
        assert storage_properties(spark, f"{scheme}://lake/shop/orders") == OWN_KEYS


def test_the_machines_role(spark: SparkSession) -> None:
    assert storage_properties(spark, "s3a://lake/shop/orders") == {}


@pytest.mark.parametrize(
    "location", ["/lake/shop", "./lake", "file:///lake/shop", "hdfs://lake/shop", "gs://lake/shop"]
)
def test_other_stores_get_no_secrets(spark: SparkSession, location: str) -> None:
    with settings(spark, KEYS):
        assert storage_properties(spark, location) == {}


def test_an_endpoint_beside_aws_has_a_region(spark: SparkSession) -> None:
    """Without one, PyIceberg would ask AWS where the bucket is, and wait for it where AWS can't be reached."""
    with settings(spark, {"fs.s3a.endpoint": "store:9000", "fs.s3a.connection.ssl.enabled": "false"}):
        found = storage_properties(spark, "s3a://lake/shop")
    assert found == {
        "s3.endpoint": "http://store:9000",
        "s3.region": "us-east-1",
        "s3.force-virtual-addressing": "true",
    }


@pytest.mark.parametrize("endpoint", ["s3.eu-west-1.amazonaws.com", "https://s3.cn-north-1.amazonaws.com.cn"])
def test_an_endpoint_of_aws_has_its_own_region(spark: SparkSession, endpoint: str) -> None:
    with settings(spark, {"fs.s3a.endpoint": endpoint, "fs.s3a.path.style.access": "true"}):
        found = storage_properties(spark, "s3a://lake/shop")
    assert found == {"s3.endpoint": f"https://{endpoint.removeprefix('https://')}"}


def test_settings_of_a_bucket_win(spark: SparkSession) -> None:
    own = {
        "fs.s3a.bucket.lake.endpoint": "http://store:9000",
        "fs.s3a.bucket.lake.endpoint.region": "here",
        "fs.s3a.bucket.lake.path.style.access": "true",
        "fs.s3a.bucket.lake.secret.key": "another",
        "fs.s3a.bucket.lake.session.token": "token",
    }
    with settings(spark, KEYS | own):
        found = storage_properties(spark, "s3a://lake/shop")
        assert storage_properties(spark, "s3a://other/shop") == OWN_KEYS
    assert found == {
        "s3.endpoint": "http://store:9000",
        "s3.region": "here",
        "s3.access-key-id": "key",
        "s3.secret-access-key": "another",
        "s3.session-token": "token",
    }


def test_secrets_in_a_credential_store(spark: SparkSession, tmp_path: Path) -> None:
    jvm, gateway = spark.sparkContext._jvm, spark.sparkContext._gateway
    assert jvm is not None
    assert gateway is not None
    store = {"hadoop.security.credential.provider.path": f"localjceks://file{tmp_path}/keys.jceks"}
    with settings(spark, store):
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        (provider,) = jvm.org.apache.hadoop.security.alias.CredentialProviderFactory.getProviders(conf)
        for name, value in KEYS.items():
            letters = gateway.new_array(jvm.char, len(value))
            for place, letter in enumerate(value):
                letters[place] = letter
            provider.createCredentialEntry(name, letters)
        provider.flush()
        assert storage_properties(spark, "s3a://lake/shop") == OWN_KEYS


def test_a_log_store_that_is_set_stays(spark: SparkSession) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    conf, name = jvm.org.apache.spark.SparkEnv.get().conf(), "spark.delta.logStore.s3a.impl"
    conf.set(name, "theirs")
    try:
        assert not use_conditional_writes(spark)
        assert conf.get(name) == "theirs"
    finally:
        conf.remove(name)


def test_it_is_said_if_there_are_no_conditional_writes(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    """Here, since Hadoop's S3A isn't on the class path."""
    assert not use_conditional_writes(spark)
    assert "no conditional writes, so only one driver at a time may write Delta tables on S3" in caplog.text
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    assert not jvm.org.apache.spark.SparkEnv.get().conf().contains("spark.delta.logStore.s3a.impl")


def test_a_job_in_a_bucket(tmp_path: Path) -> None:
    with running_s3() as store:
        follow_in_own_process("tests.delta.s3_story", tmp_path, store.endpoint)
