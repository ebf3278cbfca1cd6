"""Secrets leave no trace: neither in what rowdelta prints, nor in Spark's UI and event log."""

import re
from collections.abc import Mapping

MASK = "****"
_WORDS = (
    "secret|password|passwd|passphrase|pwd|token|credential|access.?key|account.?key|shared.?key|api.?key|user.?info"
    "|jaas|signature|private|authorization|cookie|keystore.key|key.pem|sse.key|(?:en|de)cryption.?key\\b"
)
_SECRET = re.compile(rf"{_WORDS}|\bsas\b|\bsig\b", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@|(?<=:thin:)[^/?#\s]*/[^?#\s]*@", re.IGNORECASE)
"""`user:password@` of a URL, and `user/password@` of Oracle's JDBC URLs."""
_PARAMETER = re.compile(rf"(?i)((?:^|[?&;,])[\w.-]*?(?:{_WORDS}|\bsas\b|\bsig\b)[\w.-]*=)[^&;,\s'\"]*")
"""A query parameter, or a property of a JDBC URL, with a telling name; what comes before its value is group 1."""
_SPARKS_OWN = "(?i)secret|password|token|access[.]?key"
"""The default of `spark.redaction.regex`."""
# Spark looks for it in the names of settings and in their values
_IN_SETTINGS = rf"{_WORDS}|\bsas\b|://[^/?#\s]*@|:thin:[^/?#\s]*/|[?&;,][\w.-]*\bsig=|PRIVATE KEY-----"


def is_secret(name: str) -> bool:
    """Whether the value of an option of this name is to be masked."""
    return _SECRET.search(name) is not None


def masked(text: str) -> str:
    """`text` without the user information of URLs and the values of parameters with a telling name."""
    if "PRIVATE KEY-----" in text:
        return MASK
    return _PARAMETER.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))


def redacted(values: Mapping[str, str]) -> dict[str, str]:
    """Options as they may be printed: those with a telling name are masked, and so are secrets inside of URLs."""
    return {name: MASK if is_secret(name) else masked(value) for name, value in values.items()}


def spark_pattern(given: str | None) -> str:
    """`spark.redaction.regex`, by which Spark leaves settings out of its UI and its event log: the user's, or Spark's
    default, and ours as well.
    """
    return f"(?:{given or _SPARKS_OWN})|(?i:{_IN_SETTINGS})"
