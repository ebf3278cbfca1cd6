"""What goes to a terminal or a log: texts of messages, tables and servers, perhaps of an attacker, who may name a topic
or a column. A text can't steer the terminal, can't look like a line of ours, and has no secret in it.
"""

import logging
import re
from pathlib import Path

from sink.redaction import masked, masked_in_row

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal (ECMA-48), end a line, or change the direction of writing (Unicode UAX 9); and lone
surrogates, which no terminal's encoding has. A line feed and a tab aren't among them."""


def printable(text: str) -> str:
    """A line, or a message of several lines, whose later lines are indented."""
    return _escaped(masked(text)).replace("\n", "\n  ")


def printable_row(line: str) -> str:
    """A row as JSON, which keeps its meaning. Only the secrets of the configuration are masked."""
    return _escaped(masked_in_row(line))


def one_line(text: str) -> str:
    """A cell of a table: line feeds and tabs are shown too."""
    return _escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintedRecords(logging.Filter):
    """Makes records of all loggers printable. Those of py4j go no further: it logs calls that fail because the JVM
    ends, and our own exceptions that pass through it, with tracebacks. The command reports these errors itself.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if Path(record.pathname).parent.name == "py4j":
            return False
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = printable(record.exc_text)
        return True
