"""The section `maintenance` of the configuration: what the sink does for its tables beside the stream."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, ConfigDict, Field, field_validator

from sink.config.base import Section, Text

_AGE = re.compile(r"(\d+) (minute|hour|day|week)s?")
_UNITS = {"minute": "minutes", "hour": "hours", "day": "days", "week": "weeks"}
_SHORTEST_ORPHANS = timedelta(days=1)
"""A file may be written for hours before its commit. Iceberg's own procedure refuses a shorter time too."""


def _hyphenated(name: str) -> str:
    return name.replace("_", "-")


def age(text: str) -> timedelta:
    """:raises ValueError: it isn't a time such as `5 days`."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ValueError('write a time such as "5 days" or "12 hours"')
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _is_age(text: str) -> str:
    age(text)
    return text


Age = Annotated[Text, AfterValidator(_is_age)]


class ExpireSection(Section):
    """`expire:` snapshots and versions that nobody needs any more.

    :param retain_last: the newest ones, which are kept whatever their age (Iceberg).
    """

    older_than: Age = "5 days"
    retain_last: Annotated[int, Field(ge=1)] = 20

    def due(self, made: Sequence[int], now: datetime) -> int:
        """How many snapshots may go.

        :param made: when each was made, in milliseconds since 1970, the oldest first.
        """
        end = (now - age(self.older_than)).timestamp() * 1000
        return sum(time < end for time in made[: -self.retain_last])


class OrphansSection(Section):
    """`orphans:` files in the table's folder that no snapshot has.

    :param every: how often they are looked for, which lists the whole folder.
    """

    every: Age = "7 days"
    older_than: Age = "3 days"

    @field_validator("older_than")
    @classmethod
    def _older_than(cls, value: str) -> str:
        if age(value) < _SHORTEST_ORPHANS:
            raise ValueError('write at least "1 day": younger files may be those of a commit that is still to come')
        return value


class RewriteSection(Section):
    """`rewrite:` which files are rewritten, by the names of Iceberg's `rewrite_data_files`, and in which order rows are
    written.

    :param target_file_size_bytes: of the files that a rewrite makes. None: as the table wants them.
    :param sort: columns, one after the other. None: rows stay in the order in which they come.
    """

    model_config = ConfigDict(alias_generator=_hyphenated, populate_by_name=True)

    target_file_size_bytes: Annotated[int, Field(ge=1024 * 1024)] | None = None
    min_input_files: Annotated[int, Field(ge=2)] = 5
    delete_ratio_threshold: Annotated[float, Field(gt=0, le=1)] = 0.1
    delete_file_threshold: Annotated[int, Field(ge=1)] = 8
    max_file_group_size_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    max_concurrent_file_group_rewrites: Annotated[int, Field(ge=1)] = 1
    sort: Annotated[list[str], Field(min_length=1)] | None = None

    @field_validator("sort")
    @classmethod
    def _sort(cls, value: list[str] | None) -> list[str] | None:
        for column in value or []:
            if (value or []).count(column) > 1:
                raise ValueError(f"sort names {column!r} twice. Name it once")
        return value


class MaintenanceSection(Section):
    """`maintenance:` of all tables, or of one. A table's own values replace the global ones.

    :param budget: bytes that rewrites may write for each byte that micro-batches write; 0 switches rewrites off.
    :param window: a cron expression (UTC); everything that takes long begins only in its minutes.
    :param expire: None switches it off. So does leaving it out, except for a table that the sink has created: history
        that is gone doesn't come back, so nobody else loses it unasked.
    :param orphans: likewise.
    """

    budget: Annotated[float, Field(ge=0)] = 0.5
    window: str = "* * * * *"
    rewrite: RewriteSection = RewriteSection()
    expire: ExpireSection | None = None
    orphans: OrphansSection | None = None

    @field_validator("window")
    @classmethod
    def _window(cls, value: str) -> str:
        try:
            CronSim(value, datetime(2026, 1, 1))
        except CronSimError as error:
            raise ValueError(
                f'not a cron expression ({error}). Write its five fields, such as "* 1-5 * * *" for the hours from '
                "1:00 to 5:59"
            ) from None
        return value

    def of_own_table(self) -> "MaintenanceSection":
        """With what is done, unless the configuration says otherwise, for a table that the sink has created."""
        defaults: dict[str, Section] = {"expire": ExpireSection(), "orphans": OrphansSection()}
        left_out = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=left_out)

    @property
    def shown(self) -> str:
        """Text for people."""
        rewrites = f"rewrites within {self.budget:g} of what is written"
        if not self.budget:
            rewrites = "no rewrites"
        if self.rewrite.sort is not None:
            rewrites += f", rows sorted by {', '.join(self.rewrite.sort)}"
        expire, orphans = self.expire, self.orphans
        old = (
            "snapshots stay"
            if expire is None
            else f"snapshots go after {expire.older_than} (not the last {expire.retain_last})"
        )
        left = "orphans stay" if orphans is None else f"orphans go after {orphans.older_than}"
        return f"{rewrites}, {old}, {left}"

    def is_open(self, now: datetime) -> bool:
        """Whether a rewrite may begin now."""
        minute = now.replace(second=0, microsecond=0)
        return next(CronSim(self.window, minute - timedelta(minutes=1)), None) == minute
