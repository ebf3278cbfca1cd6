"""How Python tasks reach the files that Spark reaches by Hadoop's file systems."""

from urllib.parse import urlsplit

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

_SCHEMES = ("s3", "s3a", "s3n")
_PLAIN = {"endpoint": "s3.endpoint", "endpoint.region": "s3.region"}
_SECRET = {
    "access.key": "s3.access-key-id",
    "secret.key": "s3.secret-access-key",
    "session.token": "s3.session-token",
}
"""Hadoop's setting, after `fs.s3a.` -> the property of PyIceberg's file access. Hadoop also looks for secrets in the
files that `hadoop.security.credential.provider.path` names.
"""
_AWS = ("amazonaws.com", "amazonaws.com.cn")
_REGION_OF_OTHERS = "us-east-1"
"""What stores beside AWS have if nobody gives them a region. Without one, PyIceberg asks AWS for the bucket's."""


def storage_properties(spark: SparkSession, location: str) -> dict[str, str]:
    """The session's settings for the bucket of a folder, as properties of PyIceberg's `FileIO`. Without keys, PyArrow
    looks for credentials where Hadoop's default providers look too: in the environment and the machine's own role.

    :param location: the folder.
    :return: nothing if the folder isn't on S3.
    """
    place = urlsplit(location)
    if place.scheme not in _SCHEMES:
        return {}
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    found = {name: text for key, name in _PLAIN.items() if (text := _setting(conf, place.netloc, key))}
    found |= {name: text for key, name in _SECRET.items() if (text := _secret(conf, place.netloc, key))}
    if "s3.endpoint" in found:
        if "://" not in found["s3.endpoint"]:
            secure = (_setting(conf, place.netloc, "connection.ssl.enabled") or "true") == "true"
            found["s3.endpoint"] = f"{'https' if secure else 'http'}://{found['s3.endpoint']}"
        if not (urlsplit(found["s3.endpoint"]).hostname or "").endswith(_AWS):
            found.setdefault("s3.region", _REGION_OF_OTHERS)
        if _setting(conf, place.netloc, "path.style.access") != "true":
            found["s3.force-virtual-addressing"] = "true"
    return found


def _setting(conf: JavaObject, bucket: str, key: str) -> str | None:
    """A setting of S3A. That of a bucket replaces the one for all buckets."""
    value = conf.get(f"fs.s3a.bucket.{bucket}.{key}") or conf.get(f"fs.s3a.{key}")
    return None if value is None else str(value)


def _secret(conf: JavaObject, bucket: str, key: str) -> str | None:
    value = conf.getPassword(f"fs.s3a.bucket.{bucket}.{key}") or conf.getPassword(f"fs.s3a.{key}")
    return None if value is None else "".join(value)
