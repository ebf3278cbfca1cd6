"""`rowdelta init`: looks at a source, and writes a first configuration for it. Only for MySQL it starts a JVM."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from changelog.parse.schema_registry import OPTIONS as REGISTRY_OPTIONS
from changelog.parse.schema_registry import PREFIX as REGISTRY_PREFIX
from sink import config
from sink.commands import database_discovery, discovery, proposal
from sink.commands.discovery import Found, LeftOut
from sink.config.job_sections import MARIADB, MYSQL, POSTGRES, SECURE, database_said_by
from sink.config.references import REFERENCE, resolve
from sink.errors import ConfigError
from sink.redaction import is_secret, masked, remember
from sink.sources import kafka_client
from sink.sources.kafka_client import JAAS, Broker

_PEM = {
    f"{kafka_client.PREFIX}ssl.certificate.location": f"{kafka_client.PREFIX}ssl.keystore.certificate.chain",
    f"{kafka_client.PREFIX}ssl.key.location": f"{kafka_client.PREFIX}ssl.keystore.key",
}
"""librdkafka's option with a file -> Java's with the file's content."""
_REFERENCE = re.compile(r"\$\{(?:file:(?!-)[^}:]+|[A-Za-z_]\w*)\}")
"""One reference without a default value."""
_DATABASES = {
    "postgresql": (POSTGRES, "5432", "PGPASSWORD"),
    "postgres": (POSTGRES, "5432", "PGPASSWORD"),
    "mysql": (MYSQL, "3306", "MYSQL_PWD"),
    "mariadb": (MARIADB, "3306", "MYSQL_PWD"),
}
"""Scheme of a database's URL -> Debezium's connector, the port, and the variable of the password, which the
database's own programs read.
"""
_USER = tuple(f"{kafka_client.PREFIX}sasl.{name}" for name in ("username", "password"))


def from_kafka(
    servers: str,
    output: Path,
    registry: str | None = None,
    topics: str = ".*",
    options: Sequence[str] = (),
    key: Sequence[str] = (),
) -> list[Found | LeftOut]:
    """Write a configuration for the topics of a broker.

    :param servers: addresses of the broker.
    :param output: the file to write.
    :param registry: URL of the schema registry.
    :param topics: regular expression. Only topics whose whole name it matches become tables.
    :param options: texts `NAME=VALUE` for Kafka's client, or for the registry's client if the name begins with
        `schema.registry.`. The file gets a secret as `${VARIABLE}`; the option may be given in this form too.
    :param key: key columns, for tables whose messages don't state a key.
    :return: what was found, and what was left out.
    :raises ConfigError: the file exists, an option is wrong, or nothing was found that can be a table.
    :raises TemporaryError: the broker or the registry doesn't answer.
    """
    _refuse_present(output)
    try:
        re.compile(topics)
    except re.error as error:
        raise ConfigError(f"--topics: {topics!r} is not a regular expression: {error}.") from None
    given = _pairs(options)
    if registry is not None:
        given[f"{REGISTRY_PREFIX}url"] = registry
    clear = {name: _resolved(name, value, output.resolve().parent) for name, value in given.items()}
    remember(clear)
    written = {name: hidden(name, value, _variable(name)) for name, value in given.items()}
    secrets = {_variable(name): clear[name] for name in given if written[name] != given[name]}
    in_file = _for_java(written)
    client = _for_java(clear)
    client |= {n: _resolved(n, client[n], output.resolve().parent) for n in _PEM.values() if n in client}
    remark = ""
    if re.search(r'["\\]', "".join(clear.get(name, "") for name in _USER)):
        # escapes are needed, and `${VARIABLE}` inside of the login line gets none
        line = f"{kafka_client.PREFIX}{JAAS}"
        template = _for_java(written | {_USER[1]: "…"})[line]
        remark = f'{_variable(line)}: {template} The password is in place of …, with \\ before each " and \\.'
        in_file[line] = f"${{{_variable(line)}}}"
        secrets = {n: v for n, v in secrets.items() if n != _variable(_USER[1])} | {_variable(line): client[line]}
    address = f"{kafka_client.PREFIX}bootstrap.servers"
    progress = _Progress("topics")
    broker = Broker({address: servers, **client}, progress.told)
    results = discovery.topics(broker, _of_registry(clear), topics, key, progress)
    place = proposal.Place(
        type="kafka",
        options={address: servers, "startingOffsets": "earliest", **in_file},
        folder=output.resolve().parent,
        format_options=_of_registry(written),
        secrets=sorted(secrets),
        remark=remark,
        what=f"Kafka at {servers}",
        file=output.name,
    )
    _write(output, proposal.write(place, results), secrets)
    return results


def from_files(
    folder: Path, output: Path, key: Sequence[str] = (), order_by: Sequence[str] = ()
) -> list[Found | LeftOut]:
    """Write a configuration for a folder of change files.

    :param folder: the folder.
    :param output: the file to write.
    :param key: key columns.
    :param order_by: columns that order the changes.
    :return: what was found, and what was left out.
    :raises ConfigError: the file exists, or nothing was found that can be a table.
    """
    _refuse_present(output)
    progress = _Progress("folders")
    results = discovery.directories(folder.resolve(), key, order_by, progress)
    place = proposal.Place("files", {}, output.resolve().parent, what=str(folder), file=output.name)
    _write(output, proposal.write(place, results), {})
    return results


def from_database(url: str, output: Path, tables: str = ".*") -> list[Found | LeftOut]:
    """Write a configuration that mirrors a database with Debezium's own engine.

    :param url: `postgresql://user:password@host:port/database`, or `mysql:` or `mariadb:`. The password may be a
        reference `${NAME}`. Without one it is that of the environment's PGPASSWORD or MYSQL_PWD, if there is one.
    :param output: the file to write.
    :param tables: regular expression. Only tables `schema.table` (in MySQL `database.table`) that it matches as a whole
        are mirrored.
    :return: what was found, and what was left out.
    :raises ConfigError: the file exists, the URL is wrong, or nothing was found that can be a table.
    :raises TemporaryError: the database doesn't answer.
    """
    _refuse_present(output)
    try:
        re.compile(tables)
    except re.error as error:
        raise ConfigError(f"--tables: {tables!r} is not a regular expression: {error}.") from None
    connector, name, variable = _connector(url)
    password = connector.get("database.password")
    if password is None and variable in os.environ:
        password = connector["database.password"] = f"${{{variable}}}"
    secrets = {}
    if password is not None:
        clear = _resolved("password", password, output.resolve().parent, database_discovery.OPTION)
        remember({"password": clear})
        connector["database.password"] = hidden("password", password, variable)
        if connector["database.password"] == f"${{{variable}}}":
            secrets = {variable: clear}
        section = config.DatabaseSection(**database_said_by({**connector, "database.password": clear}))
    else:
        section = config.DatabaseSection(**database_said_by(connector))
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    is_partitioned = False
    if connector["connector.class"] == POSTGRES:
        results, lacks, is_partitioned = database_discovery.tables(section, prefix, tables)
        own = f"rowdelta_{re.sub(r'[^a-z0-9_]', '_', name.lower())}"[:63]
        connector |= {"slot.name": own, "publication.name": own, "publication.autocreate.mode": "filtered"}
    else:
        from sink.commands import mysql_discovery  # which imports Spark

        results, lacks = mysql_discovery.tables(connector, section, name, prefix, tables)
    connector["topic.prefix"] = prefix
    found = [each.name.partition(".")[2] for each in results if isinstance(each, Found)]
    connector["table.include.list"] = ",".join(map(re.escape, found))
    if is_partitioned:
        connector["publish.via.partition.root"] = "true"
    place = proposal.Place(
        type="debezium",
        options=connector,
        folder=output.resolve().parent,
        secrets=sorted(secrets),
        remark=" ".join(f"The database isn't ready: {what}." for what in lacks),
        what=f"database {name} at {connector['database.hostname']}",
        file=output.name,
    )
    _write(output, proposal.write(place, results), secrets)
    return results


def _connector(url: str) -> tuple[dict[str, str], str, str]:
    """A connector's properties that a database's address says, the database's name, and the password's variable."""
    scheme = url.partition(":")[0]
    made, port, variable = _DATABASES.get(scheme, _DATABASES["postgresql"])
    parameters = [name for name in SECURE if not is_secret(name)] if made == POSTGRES else ["ssl.mode"]
    wrong = ConfigError(
        f"{database_discovery.OPTION}: got {masked(url)}, expected the scheme {', '.join(_DATABASES)}, a user, a host "
        f"and a database, as rowdelta init --help shows. Parameters may be {', '.join(parameters)}."
    )
    try:
        parts: SplitResult = urlsplit(url)
        port = str(parts.port or port)
    except ValueError:
        raise wrong from None
    given = dict(parse_qsl(parts.query))
    name = unquote(parts.path.removeprefix("/"))
    is_known = scheme in _DATABASES and given.keys() <= set(parameters)
    if not (is_known and parts.hostname and parts.username and name) or "/" in name:
        raise wrong
    named = {"hostname": parts.hostname, "port": port, "user": unquote(parts.username), **given}
    named |= {"dbname": name} if made == POSTGRES else {"include.list": re.escape(name)}
    if parts.password:
        named["password"] = unquote(parts.password)
    connector = {"connector.class": made, **{f"database.{key}": value for key, value in named.items()}}
    return connector, name, variable


class _Progress:
    """Prints a line on stderr every two seconds. The first one comes after two seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self._told > 2.0:
            self.told(f"{done:,} of {of:,} {self._what} looked at")

    def told(self, text: str) -> None:
        self._told = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def _refuse_present(output: Path) -> None:
    """:raises ConfigError: the file already exists. Somebody may have corrected it by hand."""
    if output.exists():
        raise ConfigError(f"{output} exists, and is left as it is. Name another file with --output.")
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {output.parent}. Create it, or correct --output.")


def _write(output: Path, text: str, secrets: Mapping[str, str]) -> None:
    """Write the file, and then read it like every other command, to check it. A file with a mistake doesn't stay: it
    would be in the way of the next `init`.

    :param secrets: values of the environment variables that the file refers to. They may not be set yet.
    """
    with output.open("x", encoding="utf-8") as file:
        file.write(text)
    absent = {name: value for name, value in secrets.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        config.load(output)
    except ConfigError:
        output.unlink()
        raise
    finally:
        for name in absent:
            del os.environ[name]


def _pairs(options: Sequence[str]) -> dict[str, str]:
    """Options by name. The names are those of Spark's source, or, for the registry, of `format_options`."""
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise ConfigError("--option needs NAME=VALUE, such as security.protocol=SASL_SSL.")
        name = name.strip()
        if name.startswith(REGISTRY_PREFIX) and name not in REGISTRY_OPTIONS:
            raise ConfigError(f"--option {name}: the registry's client has no such option.")
        own = name.startswith((kafka_client.PREFIX, REGISTRY_PREFIX))
        found[name if own else f"{kafka_client.PREFIX}{name}"] = value
    return found


def _of_registry(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name.startswith(REGISTRY_PREFIX)}


def _resolved(name: str, value: str, folder: Path, option: str = "--option") -> str:
    """Put values in place of references in an option's value, as in a configuration file.

    :param folder: of the configuration file.
    :param option: of the command line.
    :raises ConfigError: there is no such variable or file.
    """
    try:
        return REFERENCE.sub(lambda reference: resolve(reference, folder), value)
    except ValueError as error:
        raise ConfigError(f"{option} {name} {error}") from None


def hidden(name: str, value: str, variable: str) -> str:
    """An option's value as the file may have it. A secret becomes `${variable}`, unless the whole value is a reference
    already. A value with a reference and other text may also contain a secret, so it is replaced too.
    """
    if _REFERENCE.fullmatch(value) or not (is_secret(name) or masked(value) != value):
        return value
    return f"${{{variable}}}"


def _variable(name: str) -> str:
    """Name of the environment variable for a secret. For `kafka.sasl.password`, it is KAFKA_SASL_PASSWORD."""
    return re.sub(r"\W", "_", name).upper()


def _for_java(options: Mapping[str, str]) -> dict[str, str]:
    """Translate options of librdkafka into those of Kafka's Java client. They differ for users and certificates."""
    prefix = kafka_client.PREFIX
    found = {name: value for name, value in options.items() if name.startswith(prefix)}
    username, password = (found.pop(name, None) for name in _USER)
    if (username is None) != (password is None):
        raise ConfigError("--option sasl.username and sasl.password belong together. Give both.")
    if username is not None and password is not None:
        mechanism = found.setdefault(f"{prefix}sasl.mechanism", found.pop(f"{prefix}sasl.mechanisms", "PLAIN"))
        found[f"{prefix}{JAAS}"] = kafka_client.jaas(mechanism, username, password)
    oauth = {n: found.pop(n) for n in list(found) if re.search(r"\.sasl\.oauthbearer\.(method|client\.|scope$)", n)}
    if oauth:
        found[f"{prefix}{JAAS}"] = kafka_client.oauth_jaas({n.removeprefix(prefix): v for n, v in oauth.items()})
        found.setdefault(f"{prefix}sasl.login.callback.handler.class", kafka_client.OAUTH_HANDLER)
    for file, content in _PEM.items():
        if file in found:
            found[f"{prefix}ssl.keystore.type"] = "PEM"
            found[content] = f"${{file:{Path(found.pop(file)).expanduser().resolve()}}}"
    certificates = found.pop(f"{prefix}ssl.ca.location", None)
    if certificates is not None:
        found[f"{prefix}ssl.truststore.type"] = "PEM"
        found[f"{prefix}ssl.truststore.location"] = certificates
    return found
