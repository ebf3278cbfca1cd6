"""`rowdelta init`."""

import argparse
from pathlib import Path

from sink.console.command import Commands, command, require_java
from sink.errors import ConfigError
from sink.printing import printable


def add(commands: Commands) -> None:
    init = command(commands, "init", _init,
               "write a first configuration for a database, a broker's topics or a folder's files",
               "Looks at a database's tables, at a Kafka broker's topics, or at a folder of change files, whose format "
               "it recognises by the messages, and writes a commented configuration. Never overwrites a file. Needs no "
               "Java, but for MySQL and MariaDB.",
               has_config=False)  # fmt: skip
    where = init.add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap-servers", metavar="HOST:PORT", help="a Kafka broker, or several with commas")
    where.add_argument(
        "--database", metavar="URL",
        help="a database to mirror, postgresql://user@host:5432/database, with the password in PGPASSWORD, or "
        "mysql:// or mariadb:// with MYSQL_PWD, or as 'postgresql://user:${NAME}@…' in single quotes",
    )  # fmt: skip
    where.add_argument("--files", metavar="DIR", help="a folder of change files (Parquet or JSON), or of such folders")
    init.add_argument("--registry", metavar="URL", help="the schema registry, for Avro")
    init.add_argument(
        "--tables",
        metavar="REGEX",
        default=".*",
        help="only tables schema.table (in MySQL database.table) whose whole name this matches",
    )
    init.add_argument("--topics", metavar="REGEX", default=".*", help="only topics whose whole name this matches")
    init.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[],
        help="an option of Kafka's client, such as security.protocol=SASL_SSL, sasl.mechanism=PLAIN, sasl.username=u, "
        "'sasl.password=${PASSWORD}', or of the registry's, such as "
        "'schema.registry.basic.auth.user.info=rowdelta:${REGISTRY_PASSWORD}'; may be given several times. Write a "
        "secret as '${NAME}' in single quotes, since others can read a command line. The file never gets a secret",
    )  # fmt: skip
    init.add_argument(
        "--key", metavar="COLUMN", action="append", default=[],
        help="a key column, for tables whose messages don't state the key; may be given several times",
    )  # fmt: skip
    init.add_argument(
        "--order-by", metavar="COLUMN", action="append", default=[],
        help="a column that orders changes in files, such as seq or 'source.lsn bigint'; may be given several times",
    )  # fmt: skip
    init.add_argument("--output", metavar="FILE", default="sink.yaml", help="the file to write (default: ./sink.yaml)")


def _refuse_options(args: argparse.Namespace) -> str:
    """The option that says where changes come from.

    :raises ConfigError: options that this kind of source doesn't have.
    """
    sources = {"--database": args.database, "--files": args.files, "--bootstrap-servers": args.bootstrap_servers}
    (chosen,) = [name for name, value in sources.items() if value is not None]
    given = {
        "--tables": (args.tables != ".*", ["--database"]),
        "--topics": (args.topics != ".*", ["--bootstrap-servers"]),
        "--registry": (args.registry is not None, ["--bootstrap-servers"]),
        "--option": (args.option, ["--bootstrap-servers"]),
        "--order-by": (args.order_by, ["--files"]),
        "--key": (args.key, ["--bootstrap-servers", "--files"]),
    }
    names = [name for name, (is_given, takes) in given.items() if is_given and chosen not in takes]
    if names:
        others = " or ".join(given[names[0]][1])
        raise ConfigError(f"{' and '.join(names)}: only with {others}, and here is {chosen}. Leave it out.")
    return chosen


def _init(args: argparse.Namespace) -> int:
    from sink.commands import initialize, proposal

    chosen, output = _refuse_options(args), Path(args.output)
    if args.database is not None:
        if not args.database.startswith("postgres"):
            require_java()
        results = initialize.from_database(args.database, output, args.tables)
    elif args.files is not None:
        results = initialize.from_files(Path(args.files), output, args.key, args.order_by)
    else:
        results = initialize.from_kafka(
            args.bootstrap_servers, output, args.registry, args.topics, args.option, args.key
        )
    for line in proposal.told("kafka" if chosen == "--bootstrap-servers" else "files", results):
        print(printable(line))
    print(f"wrote {output}. Read its comments, then: rowdelta check {output}")
    return 0
