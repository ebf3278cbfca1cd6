"""The sections of the configuration that are about the whole job."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from changelog import formats
from sink.config.base import Section, Text, as_text
from sink.config.intervals import Interval, examples, is_interval, seconds_of
from sink.config.local_paths import local_path
from sink.config.options import MisplacedError, at, check_source, did_you_mean

_READY_SECONDS = 600.0


def _http(value: Any) -> Any:
    return value if isinstance(value, dict) else {"address": as_text(value)}


class HttpSection(Section):
    """`sink.http:` only an address, or a mapping with more.

    :param address: `host:port`. The host must be written, so that nobody listens to the world unawares.
    :param ready_within: a table may have something to apply for so long without a commit, and the sink is still ready.
    :param hosts: names by which browsers and other clients may call it, besides addresses and names without a dot.
    """

    address: Text
    ready_within: Interval | None = None
    hosts: list[str] = Field(default_factory=list)

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        host, port = cls._parts(value)
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(
                'write an address of this machine and a port, such as "127.0.0.1:8088" for this machine alone, '
                '"0.0.0.0:8088" for all who can reach it, or "[::1]:8088"'
            )
        return value

    @staticmethod
    def _parts(address: str) -> tuple[str, str]:
        host, _, port = address.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            return host[1:-1], port
        return ("", port) if ":" in host or "/" in host else (host, port)

    @property
    def host(self) -> str:
        return self._parts(self.address)[0]

    @property
    def port(self) -> int:
        return int(self._parts(self.address)[1])


class SinkSection(Section):
    """`sink:` the sink's name and how it runs."""

    id: str
    checkpoint: str
    trigger: Text = "available-now"
    on_bad_record: Literal["dead-letter", "fail"] = "dead-letter"
    dead_letter_table: str | None = None
    dead_letter_topic: str | None = None
    dead_letter_options: dict[str, Text] = Field(default_factory=dict)
    max_bad_records: Annotated[int, Field(ge=0)] | None = None
    on_table_error: Literal["continue", "stop"] = "continue"
    parallel_tables: Annotated[int, Field(ge=1)] | None = None
    http: Annotated[HttpSection, BeforeValidator(_http)] | None = None
    log_format: Literal["text", "json"] = "text"
    show_values: bool = True

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", value):
            raise ValueError("use letters, digits, '-' and '_'; the id becomes part of a table property's name")
        return value

    @field_validator("trigger")
    @classmethod
    def _trigger(cls, value: str) -> str:
        if value != "available-now" and not is_interval(value):
            raise ValueError(f'write "available-now", or an interval such as {examples(value)}')
        return value

    @property
    def ready_seconds(self) -> float:
        """The limit of `http.ready_within`; by default ten minutes, or three times the trigger if that is longer."""
        if self.http is not None and self.http.ready_within is not None:
            return seconds_of(self.http.ready_within)
        return max(_READY_SECONDS, 0.0 if self.trigger == "available-now" else 3 * seconds_of(self.trigger))


_JDBC = "jdbc:postgresql://host:5432/database, jdbc:mysql://host:3306/database or jdbc:mariadb://host:3306/database"


def _is_jdbc(url: str) -> bool:
    return re.match("jdbc:(postgresql|mysql|mariadb):", url) is not None


def _jdbc(url: str) -> str:
    if not _is_jdbc(url):
        raise ValueError(f"expected {_JDBC}")
    return url


def _check_reader(url: str | None, slot: str | None, connector_user: str | None) -> None:
    is_postgres = url is not None and url.startswith("jdbc:postgresql:")
    if slot is not None and url is not None and not is_postgres:
        raise MisplacedError("only Postgres has replication slots; leave it out", "slot")
    if connector_user is not None and is_postgres:
        raise MisplacedError("Postgres has slots; write slot", "connector_user")


class DatabaseSection(Section):
    """`source.database:` the database whose changes the messages are.

    :param url: JDBC URL (`jdbc:postgresql:`, `jdbc:mysql:` or `jdbc:mariadb:`).
    :param slot: Debezium's replication slot in Postgres. With Kafka a load needs it.
    :param connector_user: who reads MySQL's binlog for Debezium. A load needs it.
    """

    url: Annotated[Text, AfterValidator(_jdbc)]
    user: Text | None = None
    password: Text | None = None
    slot: Text | None = None
    connector_user: Text | None = None

    @model_validator(mode="after")
    def _slot_fits(self) -> Self:
        _check_reader(self.url, self.slot, self.connector_user)
        return self


POSTGRES = "io.debezium.connector.postgresql.PostgresConnector"
_OURS = re.compile(
    r"name|rowdelta\..*|offset\..*|errors\.max\.retries|converter\..*|schema\.history\.internal|connect\.keep\.alive.*|message\.prefix\..*"
    r"|(key|value|header)\.converter(?!\.schemas\.enable$).*"
)
"""Fits properties of a connector that the sink sets itself."""
MYSQL = "io.debezium.connector.mysql.MySqlConnector"
MARIADB = "io.debezium.connector.mariadb.MariaDbConnector"
_JDBC_KINDS = {MYSQL: "mysql", MARIADB: "mariadb"}
"""Connector of a binlog -> the kind of database in a JDBC URL."""
_SSL_MODES = {"required": "trust", "verify_ca": "verify-ca", "verify_identity": "verify-full"}
"""Of MySQL's connector -> of MariaDB's driver, which doesn't encrypt if it need not."""
SECURE = ("sslmode", "sslcert", "sslkey", "sslrootcert", "sslpassword")


def database_said_by(connector: Mapping[str, Any]) -> dict[str, str]:
    """`source.database`, as properties of a connector say it. Empty if they don't."""
    given = {name: str(as_text(value)) for name, value in connector.items()}
    login = {key: given[f"database.{key}"] for key in ("user", "password") if f"database.{key}" in given}
    made, host, name = (given.get(key, "") for key in ("connector.class", "database.hostname", "database.dbname"))
    kind, host = _JDBC_KINDS.get(made), f"[{host}]" if ":" in host else host
    if host and kind is not None:
        mode = given.get("database.ssl.mode", "").lower()
        mode = _SSL_MODES.get(mode, mode if mode in ("trust", "verify-ca", "verify-full") else "")
        url = f"jdbc:{kind}://{host}:{given.get('database.port', '3306')}/{f'?sslMode={mode}' if mode else ''}"
        # others may read the binlog too
        return {"url": url} | ({"connector_user": login["user"]} if "user" in login else {}) | login
    if made != POSTGRES or not host or not name:
        return {}
    place = f"{host}:{given.get('database.port', '5432')}/{quote(name, safe='')}"
    secure = urlencode({key: given[f"database.{key}"] for key in SECURE if f"database.{key}" in given})
    found = {
        "url": f"jdbc:postgresql://{place}{'?' if secure else ''}{secure}",
        "slot": given.get("slot.name", "debezium"),
    }
    return found | login


class SourceSection(Section):
    """`source:` where changes come from, and their format.

    :param connector: properties of Debezium's connector (`type: debezium`).
    :param buffer: the folder into which Debezium's engine writes, and from which the sink reads.
    """

    type: Literal["kafka", "files", "debezium"]
    format: str
    connector: dict[str, Text] = Field(default_factory=dict)
    buffer: str | None = None
    options: dict[str, Text] = Field(default_factory=dict)
    format_options: dict[str, Text | Annotated[tuple[Text, ...], Field(min_length=1)]] = Field(default_factory=dict)
    discovery_interval: Interval = "1 minute"
    database: DatabaseSection | None = None

    @field_validator("format")
    @classmethod
    def _format(cls, value: str) -> str:
        if value not in formats.OURS and value not in formats.names():  # `names` searches all installed packages
            raise ValueError(
                f"there is no format {value!r}{did_you_mean(value, formats.names())}; write one of "
                f"{', '.join(formats.names())}"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _said_by_connector(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type") == "debezium":
            connector = values.get("connector")
            database = database_said_by(connector) if isinstance(connector, dict) else {}
            return {"format": "debezium-json"} | ({"database": database} if database else {}) | values
        return values

    @field_validator("buffer")
    @classmethod
    def _buffer(cls, value: str | None) -> str | None:
        """As a path, also if it is a URI, which only Hadoop understands."""
        path = None if value is None else local_path(value)
        return value if path is None else str(path)

    @model_validator(mode="after")
    def _connector_fits(self) -> Self:
        if self.type != "debezium":
            for name in ("connector", "buffer"):
                if getattr(self, name):
                    raise MisplacedError(f"{name} is for type: debezium, and type is {self.type}. Leave it out", name)
            return self
        if self.options:
            raise MisplacedError(
                "got options, which type: debezium doesn't have. Write properties of the connector into connector",
                "options",
            )
        if self.format.endswith("avro"):
            raise MisplacedError(f"got {self.format}, but Debezium's engine writes JSON here", "format")
        if self.buffer is None or local_path(self.buffer) is None:
            raise MisplacedError(
                f"got {self.buffer}, expected a folder of this machine, or one that is mounted there, such as "
                "./state/buffer: Debezium's engine locks it, and renames files in it",
                "buffer",
            )
        made = self.connector.get("connector.class", "")
        if not re.fullmatch(r"io\.debezium\.connector\.\w+\.\w+", made):
            raise MisplacedError(
                f"connector.class: got {made or 'nothing'}, expected a connector of Debezium's, such as "
                f"{', '.join((POSTGRES, *_JDBC_KINDS))}",
                "connector",
            )
        if "topic.prefix" not in self.connector:
            raise MisplacedError(
                "topic.prefix is missing. Topics are named <topic.prefix>.<schema or database>.<table>", "connector"
            )
        if made in _JDBC_KINDS and self.connector.get("heartbeat.interval.ms") == "0":
            raise MisplacedError(
                "got 0, but heartbeats tell how far the connector is. They write nothing; leave it out",
                *("connector", "heartbeat.interval.ms"),
            )
        for name in self.connector:
            if _OURS.fullmatch(name):
                raise MisplacedError("the sink sets this property itself. Leave it out", "connector", name)
        return self

    @model_validator(mode="after")
    def _format_options_fit(self) -> Self:
        made = formats.find(self.format)
        for name, value in self.format_options.items():
            if name not in made.OPTIONS:
                known = f"Known for {self.format}: {', '.join(made.OPTIONS) or 'none'}"
                raise MisplacedError(f"unknown key{did_you_mean(name, made.OPTIONS)}. {known}", "format_options", name)
            choices = made.OPTIONS[name]
            if choices and value not in choices:
                raise MisplacedError(f"got {value!r}, expected one of {', '.join(choices)}", "format_options", name)
        for name in made.REQUIRED:
            if not self.format_options.get(name):
                raise MisplacedError(f"format: {self.format} needs {name}", "format_options")
        return self

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        with at("options"):
            check_source(self.options, files=self.type == "files")
        return self

    @property
    def has_topics(self) -> bool:
        """Whether records have topics and offsets; else they are in files."""
        return self.type != "files"

    @property
    def discovery_seconds(self) -> float:
        """Seconds between two searches for new topics or directories."""
        return seconds_of(self.discovery_interval)

    @property
    def file_format(self) -> str:
        """Format of change files: `parquet` or `json` (one object a line)."""
        return self.options.get("path_format", "parquet" if self.format == "row-kind" else "json")


class VerifySection(Section):
    """`verify:` the source with which `rowdelta verify` compares a table. A table's own values replace the global ones.

    :param url: JDBC URL of the database, if it is another one than `source.database`.
    :param table: the database's table; in an entry that is a pattern, with `$1` for a group of its source. By default
        what the topic's name has after its first part.
    :param spark_table: any table that Spark reads, in place of a database.
    :param slot: Debezium's replication slot in Postgres.
    :param connector_user: who reads MySQL's binlog for Debezium.
    :param settle: how long a change takes from the connector into the topic, at most.
    """

    url: Text | None = None
    user: Text | None = None
    password: Text | None = None
    table: Text | None = None
    spark_table: Text | None = None
    slot: Text | None = None
    connector_user: Text | None = None
    settle: Interval = "5 seconds"

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not _is_jdbc(value):
            raise ValueError(f"expected {_JDBC}; for anything else that Spark can read, write spark_table")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.spark_table is not None:
            for name in ("url", "user", "password", "table", "slot", "connector_user"):
                if getattr(self, name) is not None:
                    raise MisplacedError(f"{name} is of a database, and spark_table is given too. Keep one", name)
        _check_reader(self.url, self.slot, self.connector_user)
        return self

    @property
    def database(self) -> DatabaseSection | None:
        """The database with which a table is compared. None if it is no database."""
        if self.url is None:
            return None
        return DatabaseSection(
            url=self.url,
            user=self.user,
            password=self.password,
            slot=self.slot,
            connector_user=self.connector_user,
        )

    @property
    def settle_seconds(self) -> float:
        return seconds_of(self.settle)


class LoadSection(Section):
    """`load:` how tables are copied from `source.database`.

    :param auto: whether `rowdelta run` loads tables that are empty and have no position. `rowdelta load` does.
    :param connections: with which a table is read.
    :param part_rows: about how many rows each of them reads before all are committed.
    :param replica: JDBC URL of a replica of `source.database` from which rows are read.
    """

    auto: bool = False
    connections: int = Field(default=4, ge=1, le=100)
    part_rows: int = Field(default=1_000_000, ge=1)
    replica: Annotated[Text, AfterValidator(_jdbc)] | None = None


class IndexSection(Section):
    """`index:` where the tables' key indexes are stored.

    Tasks use `properties` (`s3.endpoint`, …) to reach this place, instead of the catalog's properties.
    """

    location: str | None = None
    properties: dict[str, Text] | None = None
