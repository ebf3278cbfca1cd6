"""What the model of the log raises when a writer broke a rule of the protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ProtocolViolation(Exception):  # noqa: N818
    """A table's files break a rule of PROTOCOL.md.

    :param rule: short name of the rule.
    :param detail: what was found.
    """

    def __init__(self, rule: str, detail: object) -> None:
        super().__init__(rule, detail)
        self.rule, self.detail = rule, detail
        self.version: int | None = None
        self.action: Any = None

    def __str__(self) -> str:
        return f"version {self.version}: {self.rule}: {self.detail}; action: {self.action}"


def require(kept: object, rule: str, detail: object) -> None:
    """:raises ProtocolViolation: `kept` is false."""
    if not kept:
        raise ProtocolViolation(rule, detail)


@contextmanager
def about(version: int, action: Any) -> Iterator[None]:
    """A violation found inside carries this version and action."""
    try:
        yield
    except ProtocolViolation as violation:
        if violation.version is None:
            violation.version, violation.action = version, action
        raise
