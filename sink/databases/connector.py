"""Debezium's connector in Kafka Connect, as the database shows it."""

import time
from collections.abc import Callable

from sink.databases.database import Database
from sink.databases.reading import Delivered, Newest, wait_for_delivery
from sink.errors import TemporaryError
from sink.spark.progress import Line

_SETTLE = 5.0
_TIMEOUT = 600.0
"""Seconds."""


class KafkaConnector:
    """The connector that reads the log of a table's database (`sink.table.loading.Connector`).

    :param since_now: makes what tells the newest messages of the topic that come from now on.
    """

    def __init__(self, database: Database, since_now: Callable[[], Newest]) -> None:
        self._database = database
        self._since_now = since_now

    def check(self) -> None:
        self._database.check_server()
        self._database.check_reader()

    def wait(self, stopping: Callable[[], bool]) -> bool:
        name, line = self._database.name, Line()
        self._database.note_log_position()
        newest = self._since_now()
        try:
            return wait_for_delivery(
                lambda: self._delivered(newest),
                _SETTLE,
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
