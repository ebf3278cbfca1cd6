"""How Python tasks reach the files that Spark reaches by Hadoop's file systems."""

from pyspark.sql import SparkSession

_S3 = {
    "fs.s3a.endpoint": "s3.endpoint",
    "fs.s3a.endpoint.region": "s3.region",
    "fs.s3a.access.key": "s3.access-key-id",
    "fs.s3a.secret.key": "s3.secret-access-key",
    "fs.s3a.session.token": "s3.session-token",
}
"""Hadoop's setting -> the property of PyIceberg's file access."""


def storage_properties(spark: SparkSession) -> dict[str, str]:
    """The session's settings for S3, as properties of PyIceberg's `FileIO`. Without keys, PyArrow looks for credentials
    where Hadoop's default providers look too: in the environment and the machine's own role.
    """
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    found = {name: str(value) for key, name in _S3.items() if (value := conf.get(key)) is not None}
    if "s3.endpoint" in found and "://" not in found["s3.endpoint"]:
        secure = str(conf.get("fs.s3a.connection.ssl.enabled") or "true") == "true"
        found["s3.endpoint"] = f"{'https' if secure else 'http'}://{found['s3.endpoint']}"
    if str(conf.get("fs.s3a.path.style.access") or "false") != "true":
        found["s3.force-virtual-addressing"] = "true"
    return found if any(name != "s3.force-virtual-addressing" for name in found) else {}
