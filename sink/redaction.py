"""Hides secrets in what rowdelta prints, and in Spark's UI and event log."""

import re
from collections.abc import Mapping

MASK = "****"
_WORDS = (
    "secret|password|passwd|passphrase|pwd|token|credential|access.?key|account.?key|shared.?key|api.?key|user.?info"
    "|jaas|signature|private|authorization|cookie|keystore.key|key.pem|sse.key|(?:en|de)cryption.?key\\b"
)
_HEADERS = r"(?:^|\.)header\.(?!x-iceberg-access-delegation$)"
"""Begins the names of HTTP headers that a REST catalog gets. A gateway may use any name for its secret."""
_SECRET = re.compile(rf"{_WORDS}|\bsas\b|\bsig\b|{_HEADERS}", re.IGNORECASE)
_USER = r"(?:[^/?#\s:\[]*:(?!\d*(?:[,/?#]|$))\S*|[^/?#\s]*)@"
"""The password may contain `/`, `?` and `#`, unless it could be a port."""
_USER_INFO = re.compile(rf"(?<=://){_USER}|(?<=:thin:)[^/?#\s]*/[^?#\s]*@", re.IGNORECASE)
"""Fits `user:password@` in a URL, and `user/password@` in Oracle's JDBC URLs."""
_PARAMETER = re.compile(rf"(?i)((?:^|[?&;,])[\w.-]*?(?:{_WORDS}|\bsas\b|\bsig\b)[\w.-]*=)[^&;,\s'\"]*")
"""Fits a query parameter, or a property of a JDBC URL, whose name means a secret. Group 1 is all before its value."""
_SPARKS_OWN = "(?i)secret|password|token|access[.]?key"
"""The default of `spark.redaction.regex`."""
# Spark searches for this in the names and in the values of settings
_IN_SETTINGS = rf"{_WORDS}|\bsas\b|{_HEADERS}|://{_USER}|:thin:[^/?#\s]*/|[?&;,][\w.-]*\bsig=|PRIVATE KEY-----"


def is_secret(name: str) -> bool:
    """Whether the value of an option with this name must be masked."""
    return _SECRET.search(name) is not None


def masked(text: str) -> str:
    """`text` without user and password in URLs, and without values of parameters whose names mean secrets."""
    if "PRIVATE KEY-----" in text:
        return MASK
    return _PARAMETER.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))


def redacted(values: Mapping[str, str]) -> dict[str, str]:
    """Options that may be printed. Values are masked if their names mean secrets, and so are secrets inside URLs."""
    return {name: MASK if is_secret(name) else masked(value) for name, value in values.items()}


def spark_pattern(given: str | None) -> str:
    """A value for `spark.redaction.regex`, with which Spark hides settings in its UI and its event log. It has the
    user's pattern, or Spark's default, and ours too.
    """
    return f"(?:{given or _SPARKS_OWN})|(?i:{_IN_SETTINGS})"
