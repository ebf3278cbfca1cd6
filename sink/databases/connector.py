"""Debezium's connector in Kafka Connect, as the database shows it."""

import logging
import time
from collections.abc import Callable

from sink.databases.database import Database
from sink.databases.reading import Delivered, Newest, wait_for_delivery
from sink.errors import TemporaryError
from sink.spark.progress import Line

log = logging.getLogger("rowdelta")

_SETTLE = 5.0
_CONFIRMED = 70.0
_TIMEOUT = 600.0
"""Seconds. Kafka Connect stores each minute, by default, how far it has got in Kafka, and doesn't write that again. It
confirms it to the database when it knows of a later transaction.
"""


class KafkaConnector:
    """The connector that reads the log of a table's database (`sink.table.loading.Connector`).

    :param is_named: see `Database.check_reader`.
    :param since_now: makes what tells the newest messages of the topic that come from now on.
    """

    def __init__(self, database: Database, since_now: Callable[[], Newest], *, is_named: bool) -> None:
        self._database = database
        self._is_named = is_named
        self._since_now = since_now
        self._has_waited = False

    def check(self) -> None:
        self._database.check_server()
        self._database.check_reader(is_named=self._is_named)

    def wait(self, stopping: Callable[[], bool]) -> bool:
        name, line = self._database.name, Line()
        self._database.note_log_position()
        newest, settle = self._since_now(), _SETTLE
        if not self._has_waited and self._database.is_altered():
            # a change from before that must not come after the load begins: its row would come back
            settle = _CONFIRMED
            log.info("%s was altered or emptied lately: its connector has %.0f s to confirm what it has", name, settle)
        self._has_waited = True
        try:
            return wait_for_delivery(
                lambda: self._delivered(newest),
                settle,
                time.monotonic() + _TIMEOUT,
                lambda text: line.tell(f"waiting for the connector of {name}; {text}"),
                stopping,
            )
        except TimeoutError as error:
            raise TemporaryError(
                f"the connector of {name} doesn't get on: {error}. Start it, and run again: what is loaded stays."
            ) from None
        finally:
            line.clear()

    def _delivered(self, newest: Newest) -> tuple[Delivered, str]:
        """Without a reader the topic lacks changes."""
        state, text = self._database.delivered(newest)
        return Delivered.NOT_YET if state is Delivered.UNKNOWN else state, text
