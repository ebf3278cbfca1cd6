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
_USER_INFO = re.compile(rf"(?<=://){_USER}|(?<=:thin:)[^/?#\s:]{{0,256}}/[^?#\s]{{0,256}}@", re.IGNORECASE)
"""Fits `user:password@` in a URL, and `user/password@` in Oracle's JDBC URLs, in a word that ends with `@`."""
_WORD = re.compile(r'[^\s"]++')
"""What a URL may stand in. A quote isn't part of it, so that no match goes from one value of a JSON row to another."""
_PARAMETER = re.compile(rf"(?i)((?:^|[?&;,])[\w.-]{{0,128}}?(?:{_WORDS}|\bsas\b|\bsig\b)[\w.-]{{0,128}}=)[^&;,\s'\"]*")
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
    secrets that are known (`remember`). It takes time in proportion to the text, whatever the text is.
    """
    if "PRIVATE KEY-----" in text:
        return MASK
    return _PARAMETER.sub(rf"\1{MASK}", _WORD.sub(_without_user_info, _without_known(text)))


def beginning(text: str, most: int) -> str:
    """The first `most` characters of `masked(text)`, or fewer, without a look at all of a long text. Of a text that is
    cut, a secret that the cut might part isn't shown.
    """
    longest = _known.longest
    window = 4 * most + longest
    if len(text) <= window:
        return masked(text)[:most]
    text = text[:window]
    # a password ends with an `@` that may be behind the cut
    cut = re.search(r'(?<![^\s"])[^\s"]*+\Z', text)
    last_word = cut.start() if cut is not None else window
    urls = [found for scheme in ("://", ":thin:") if (found := text.lower().find(scheme, last_word)) >= 0]
    shown = masked(text[: min(urls)] if urls else text)
    # the beginning of a known secret, which isn't recognized
    return shown[: max(0, len(shown) - longest)][:most]


def masked_in_row(line: str) -> str:
    """A row as JSON, in which only known secrets are masked: it is data, in which everything else means something.
    Numbers stay, and what comes out is JSON.
    """
    return line if _known.pattern is None else _JSON_TEXT.sub(_without_known_in_json, line)


_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def _without_known(text: str) -> str:
    return text if _known.pattern is None else _known.pattern.sub(MASK, text)


def _without_known_in_json(found: re.Match[str]) -> str:
    text = json.loads(found[0], strict=False)
    shown = _without_known(text)
    return found[0] if shown == text else json.dumps(shown, ensure_ascii=False)


def _without_user_info(found: re.Match[str]) -> str:
    # a match ends with an `@`, so the rest of the word isn't searched again and again for one
    word = found[0]
    end = word.rfind("@") + 1
    return _USER_INFO.sub(f"{MASK}@", word[:end]) + word[end:] if end else word


class _Known:
    """The secrets of the configurations that this process has read. A driver, a registry or Kafka's client may quote
    them in any message, without a name beside them.
    """

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.pattern: re.Pattern[str] | None = None
        self.longest = 0

    def add(self, texts: Iterable[str]) -> None:
        self.texts |= {text for text in texts if len(text) >= _SHORTEST}
        longest_first = sorted(map(re.escape, self.texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(longest_first)) if longest_first else None
        self.longest = max(map(len, self.texts), default=0)


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
        yield from (value, value.strip())
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
