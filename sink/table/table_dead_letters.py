"""The bad records of one table: they are committed to the dead-letter table before the table's own commit."""

import logging
from collections.abc import Callable

from changelog.amounts import amount
from deltawriters.scratch import Scratch
from sink.deadletters.table import DeadLetters
from sink.sources.source import Position, Source
from sink.table.observer import DeadLettersKept, Observer
from sink.table.written import Written
from sink.targets.retries import Retries
from sink.targets.values import Done, Outcome

log = logging.getLogger("rowdelta")


class TableDeadLetters:
    """The bad records of one table.

    :param dead_letters: None if none are kept.
    :param target: the table, as it is configured.
    :param table: its name, for messages.
    :param named: a position of an earlier run, with the names of partitions that positions have now.
    """

    def __init__(
        self,
        dead_letters: DeadLetters | None,
        target: str,
        table: str,
        source: Source,
        observer: Observer,
        named: Callable[[Position], Position],
    ) -> None:
        self._dead_letters = dead_letters
        self._target = target
        self._table = table
        self._source = source
        self._observer = observer
        self._named = named

    @property
    def are_kept(self) -> bool:
        return self._dead_letters is not None

    @property
    def opening(self) -> int:
        """See `DeadLetters`."""
        return self._dead_letters.opening if self._dead_letters else 0

    @property
    def operation(self) -> str | None:
        """The last commit of bad records of the table that is known here."""
        return self._dead_letters.operation(self._target) if self._dead_letters else None

    def retries(self) -> Retries | None:
        """Those of a micro-batch's bad records. None if none are kept."""
        return None if self._dead_letters is None else self._dead_letters.retries()

    def publish(self) -> None:
        """See `DeadLetters.publish`."""
        if self._dead_letters is not None:
            self._dead_letters.publish(self._target)

    def is_ahead(self, position: Position | None, *, or_there: bool = False) -> bool:
        """Whether there may be bad records beyond the table's position. That happens if the run crashed between both
        commits, or if somebody set the table's position back.

        :param or_there: or at the position, where those of all parts of a load are.
        """
        kept = self._kept()
        if kept is None or position is None:
            return kept is not None
        return self._source.is_ahead(kept, position) or (or_there and not self._source.is_ahead(position, kept))

    def _kept(self) -> Position | None:
        """The position up to which bad records are kept."""
        kept = self._dead_letters.position(self._target) if self._dead_letters else None
        return None if kept is None else self._named(kept)

    def check_limit(self, written: Written) -> None:
        """See `DeadLetters.check_limit`."""
        if self._dead_letters is not None:
            self._dead_letters.check_limit(self._target, written.bad_by_class, written.samples)

    def commit(self, end: Position, written: Written, scratch: Scratch) -> Outcome:
        """Try to commit an attempt's bad records, if there are any. If the run crashes after it, it repeats the batch,
        and the dead-letter table's position prevents a second copy.

        :param end: the position after the micro-batch.
        :param scratch: has the attempt's files.
        """
        begun = written.begun
        if not written.dead_letters:
            return Done()
        assert self._dead_letters is not None
        kept = self._kept()
        if kept is not None:  # an earlier attempt may have read further, and its records are beyond this one's end
            end = self._source.furthest(kept, end)
        outcome = self._dead_letters.commit(
            self._target, begun.operation, end, written.dead_letters, written.bad_by_class, begun.opening, begun.letters
        )
        if outcome != Done():
            return outcome
        scratch.keep(written.dead_letter_paths)
        records, samples = amount(written.bad, "bad record"), "; ".join(written.samples)
        log.warning("%s: %s to %s. %s", self._table, records, self._dead_letters.name, samples)
        self._observer(DeadLettersKept(self._table, written.bad_by_class))
        self.publish()
        return outcome
