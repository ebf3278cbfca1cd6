"""`rowdelta run`."""

from changelog.amounts import amount
from sink.config import Config
from sink.config.folders import check_folders
from sink.config.local_paths import local_path
from sink.errors import ConfigError
from sink.sources.directories import no_directory


def refuse_early(config: Config) -> None:
    """Find mistakes with which a run would end, before it starts a JVM: folders that are not there.

    :raises ConfigError: the first one.
    """
    check_folders(None, config)
    if config.source.type != "files":
        return
    folders = {table.source: local_path(table.source) for table in config.tables if not table.is_pattern}
    missing = [place for place, folder in folders.items() if folder is not None and not folder.exists()]
    # with others that work, a run goes on without a table
    if missing and (config.sink.on_table_error == "stop" or len(missing) == len(config.tables)):
        more = f" {amount(len(missing) - 1, 'more error')}: rowdelta check shows all." if len(missing) > 1 else ""
        raise ConfigError(f"{no_directory(missing[0])}{more}")
