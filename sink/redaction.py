"""Hides secrets in what rowdelta prints, and in Spark's UI and event log."""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote

MASK = "****"
_WORDS = (
    "secret|password|passwd|passphrase|pwd|token|credential|access.?key|account.?key|shared.?key|api.?key|user.?info"
    "|jaas|signature|private|authorization|cookie|keystore.key|key.pem|sse.key|(?:en|de)cryption.?key\\b"
)
_NO_SECRET = re.compile(r"(?:endpoint\.ur[il]|credentials\.source)$")
"""Ends names that have one of the words and no secret: where a token comes from."""
_PUBLIC = re.compile(r"(?i)(?<!secret.)access.?key(?:.?id)?$")
"""Names of keys' ids. They are masked as values of these options, but they may be words that stand in other texts."""
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
    return _SECRET.search(name) is not None and _NO_SECRET.search(name) is None


def masked(text: str) -> str:
    """`text` without user and password in URLs, without values of parameters whose names mean secrets, and without the
    secrets that are known (`remember`).
    """
    if "PRIVATE KEY-----" in text:
        return MASK
    if _known.pattern is not None:
        text = _known.pattern.sub(MASK, text)
    return _PARAMETER.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))


class _Known:
    """The secrets of the configurations that this process has read. A driver, a registry or Kafka's client may quote
    them in any message, without a name beside them.
    """

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.pattern: re.Pattern[str] | None = None

    def add(self, texts: Iterable[str]) -> None:
        self.texts |= {text for text in texts if len(text) >= _SHORTEST}
        longest_first = sorted(map(re.escape, self.texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(longest_first)) if longest_first else None


_known = _Known()
_SHORTEST = 6
"""Of known secrets, in characters. A shorter one may be a part of many words, which would be masked."""
_QUOTED = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
"""An option of a login module in `sasl.jaas.config`."""
_PASSWORD = re.compile(r"://[^:/?#\s]*:([^@\s]+)@|:thin:[^/?#\s]*/([^@\s]+)@|[?&;,]([\w.-]+)=([^&;,\s]+)")


def remember(options: Mapping[str, str]) -> None:
    """Have `masked` hide the secrets among these options wherever they stand, also as base64, in URLs and in JSON."""
    _known.add(form for name, value in options.items() for secret in _secrets(name, value) for form in _forms(secret))


def _secrets(name: str, value: str) -> Iterator[str]:
    """The secrets in an option."""
    if is_secret(name) and not _PUBLIC.search(name):
        yield value
        yield from (line for line in value.splitlines() if len(line) >= 16)  # of a key in PEM
        for option, text in _QUOTED.findall(value):
            if is_secret(option):
                yield from (text, re.sub(r"\\(.)", r"\1", text))
        user, colon, password = value.partition(":")  # of a credential or of `user.info`
        if colon and not user.count(" "):
            yield password
    for in_url, of_oracle, parameter, text in _PASSWORD.findall(value):
        found = in_url or of_oracle or (text if is_secret(parameter) else "")
        yield from (found, unquote(found))


def _forms(secret: str) -> Iterator[str]:
    content = secret.encode("utf-8", "surrogatepass")
    yield from (secret, quote(content, safe=""), quote(content), quote_plus(content), json.dumps(secret)[1:-1])
    encoded = base64.b64encode(content).decode()
    yield from (encoded, encoded.rstrip("="), encoded.translate({43: "-", 47: "_"}).rstrip("="))


def redacted(values: Mapping[str, str]) -> dict[str, str]:
    """Options that may be printed. Values are masked if their names mean secrets, and so are secrets inside URLs."""
    return {name: MASK if is_secret(name) else masked(value) for name, value in values.items()}


def spark_pattern(given: str | None) -> str:
    """A value for `spark.redaction.regex`, with which Spark hides settings in its UI and its event log. It has the
    user's pattern, or Spark's default, and ours too.
    """
    return f"(?:{given or _SPARKS_OWN})|(?i:{_IN_SETTINGS})"
