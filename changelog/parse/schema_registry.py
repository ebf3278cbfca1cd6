"""Gets schemas by id from a registry with Confluent's API, and finds the ids in messages.

Confluent's wire format is a zero byte, the schema's id (four bytes, big-endian), and the Avro body:

    00 00000009 00 02 02 06616e6e …     schema 9, and a record that begins with a null and a row

`source.format_options` take the settings of confluent-kafka's client, with the prefix `schema.registry.`:

    schema.registry.url: https://registry:8081
    schema.registry.basic.auth.user.info: user:secret
    schema.registry.ssl.ca.location: /etc/ssl/registry.pem

Each Python worker asks for a schema once.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from changelog.changes import BadOptionError, UnavailableError
from changelog.parse.avro_schema import Node, SchemaError, parse

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaReference

HEADER_BYTES = 5

PREFIX = "schema.registry."
_NUMBERS = (
    "timeout",
    "cache.capacity",
    "cache.latest.ttl.sec",
    "max.retries",
    "retries.wait.ms",
    "retries.max.wait.ms",
)
_TEXTS = (
    "url",
    "basic.auth.user.info",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "proxy",
    "bearer.auth.credentials.source",
    "bearer.auth.token",
    "bearer.auth.logical.cluster",
    "bearer.auth.identity.pool.id",
    "bearer.auth.client.id",
    "bearer.auth.client.secret",
    "bearer.auth.scope",
    "bearer.auth.issuer.endpoint.url",
)
OPTIONS: Mapping[str, tuple[str, ...]] = {PREFIX + name: () for name in (*_TEXTS, *_NUMBERS)}
"""The client's settings as `format_options`; each may have any value."""
REQUIRED = (PREFIX + "url",)

MOST_REFERENCES = 200
"""So many schemas a schema may refer to, also by way of others. Each costs a question to the registry."""

# without a timeout, the client would wait for ever
_DEFAULTS: Mapping[str, str | float] = {"timeout": 30.0}
# Error codes of the registry: subject, version or schema not found. A plain 404 may come from a server that is no
# registry.
_NOT_FOUND = (40401, 40402, 40403)
_PATIENCE_SECONDS = 5.0
_PATIENCE_EVERY_SECONDS = 60.0
"""How long a client waits for a schema id that the registry doesn't know, and how often at most: a topic of broken
messages may have any number of such ids.
"""


class RegistryError(UnavailableError):
    """The registry can't be reached, or refuses to answer. The records are right: the job stops, and may be started
    again.
    """


class Schemas(Protocol):
    """Where the formats look up schemas."""

    def get(self, schema_id: int) -> Node:
        """The schema with the id `schema_id`.

        :raises SchemaError: the registry has no such schema, or it isn't an Avro schema.
        :raises RegistryError: the registry doesn't answer.
        """


def client_settings(options: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | float]:
    """The settings of the client that `format_options` contain.

    :raises BadOptionError: a setting is missing or malformed.
    """
    settings: dict[str, str | float] = dict(_DEFAULTS)
    for name, value in options.items():
        setting = name.removeprefix(PREFIX)
        if name in OPTIONS:
            settings[setting] = _number(name, str(value)) if setting in _NUMBERS else str(value)
    if "url" not in settings:
        raise BadOptionError(f"format_options lacks {PREFIX}url; set it, for example to https://registry:8081")
    return settings


class Registry:
    """A registry. The object keeps all schemas that the registry has returned.

    :param options: `format_options`; names that aren't in `OPTIONS` are ignored.
    """

    def __init__(self, options: Mapping[str, str | tuple[str, ...]]) -> None:
        # the client takes as long to import as all else here, and most formats have no registry
        from confluent_kafka.schema_registry import SchemaRegistryClient

        settings = client_settings(options)
        # the URL for messages, without user and password
        self.url = re.sub(r"//[^/@]*@", "//", str(settings["url"]))
        self._client = SchemaRegistryClient(settings)
        self._known: dict[int, Node] = {}
        self._patient_from = -inf

    def get(self, schema_id: int) -> Node:
        if schema_id not in self._known:
            what = f"schema id {schema_id}"
            schema = self._patiently(lambda: self._ask(what, lambda: self._client.get_schema(schema_id)))
            self._known[schema_id] = self._parse(what, schema)
        return self._known[schema_id]

    def latest(self, subject: str) -> Node:
        """The newest schema of a subject, such as `shop.public.orders-value`.

        :raises SchemaError: the registry has no such subject, or its schema isn't an Avro schema.
        :raises RegistryError: the registry doesn't answer.
        """
        what = f"subject {subject}"
        return self._parse(what, self._ask(what, lambda: self._client.get_latest_version(subject).schema))

    def _parse(self, what: str, schema: "Schema") -> Node:
        if schema.schema_type not in (None, "AVRO"):
            raise SchemaError(f"{what} is {schema.schema_type}, not Avro")
        try:
            return parse(schema.schema_str or "", self._references(what, schema))
        except SchemaError as error:
            raise SchemaError(f"{what}: {error}") from None

    def _references(self, what: str, schema: "Schema", found: set[tuple[str, str]] | None = None) -> Iterator[str]:
        """Texts of the schemas that a schema refers to, each once. A schema comes after the schemas that it refers to
        itself.

        :param found: subject and version of those that were met already. Without it, schemas that all refer twice to
            the one before would be asked for 2^n times.
        :raises SchemaError: there are too many.
        """
        found = set() if found is None else found
        for reference in schema.references or []:
            name = (str(reference.subject), str(reference.version or "latest"))
            if name in found:
                continue
            if len(found) == MOST_REFERENCES:
                raise SchemaError(f"refers to more than {MOST_REFERENCES} other schemas")
            found.add(name)
            other = self._ask(what, partial(self._version, reference))
            yield from self._references(what, other, found)
            yield other.schema_str or ""

    def _patiently(self, question: "Callable[[], Schema]") -> "Schema":
        """Ask again while the registry doesn't know a schema: a replica may learn of a new one after the topic has its
        first message.
        """
        end = None
        while True:
            try:
                return question()
            except SchemaError:
                now = monotonic()
                if end is None:
                    if now < self._patient_from:
                        raise
                    end = now + _PATIENCE_SECONDS
                    self._patient_from = now + _PATIENCE_EVERY_SECONDS
                if now >= end:
                    raise
                sleep(0.5)

    def _version(self, reference: "SchemaReference") -> "Schema":
        return self._client.get_version(str(reference.subject), reference.version or "latest").schema

    def _ask(self, what: str, question: "Callable[[], Schema]") -> "Schema":
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question()
        except SchemaRegistryError as error:
            if error.error_code in _NOT_FOUND:
                raise SchemaError(f"{what} is unknown to the schema registry {self.url}") from None
            raise RegistryError(f"the schema registry {self.url} refused {what}: {error}") from error
        except Exception as error:
            raise RegistryError(
                f"the schema registry {self.url} can't be asked for {what}: {type(error).__name__}: {error}"
            ) from error


@lru_cache(maxsize=16)
def _connected(options: tuple[tuple[str, str], ...]) -> Registry:
    return Registry(dict(options))


def connect(options: Mapping[str, str | tuple[str, ...]]) -> Registry:
    """The registry that `format_options` name. All tasks of a Python worker share one object."""
    return _connected(tuple(sorted((name, str(value)) for name, value in options.items() if name in OPTIONS)))


def by_schema(values: pa.BinaryArray) -> Iterator[tuple[int | None, pa.Array]]:
    """Each schema id, with the numbers (int64) of the rows that have it. The id is None for rows that aren't in
    Confluent's wire format.

    :param values: binary, without nulls.
    """
    count = len(values)
    if not count:
        return
    offsets = np.frombuffer(values.buffers()[1], np.int32, count + 1, values.offset * 4).astype(np.int64)
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    ids = np.full(count, -1, np.int64)
    long_enough = np.flatnonzero(np.diff(offsets) >= HEADER_BYTES)
    header = data[offsets[:-1][long_enough, None] + np.arange(HEADER_BYTES)].astype(np.int64)
    # schema ids are Java ints, so a registry has no answer for a larger id
    is_header = (header[:, 0] == 0) & (header[:, 1] < 128)
    ids[long_enough] = np.where(is_header, header[:, 1:] @ np.array([1 << 24, 1 << 16, 1 << 8, 1]), -1)
    for schema_id in np.unique(ids):
        yield (None if schema_id < 0 else int(schema_id)), pa.array(np.flatnonzero(ids == schema_id))


def _number(name: str, value: str) -> float:
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        raise BadOptionError(f"format_options: {name} is {value!r}, expected a number") from None
