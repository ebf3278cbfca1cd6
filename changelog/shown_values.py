"""A row's value in a text for people: as it is, or only its type and length (`sink.show_values: false`)."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from changelog.amounts import amount

_MOST = 80


def shown(value: Any, *, visible: bool) -> str:
    """`'abc'`, or `text of 3 characters`."""
    if visible:
        return f"'{shortened(str(value))}'"
    match value:
        case None:
            return "NULL"
        case str():
            return f"text of {amount(len(value), 'character')}"
        case bytes():
            return f"binary of {amount(len(value), 'byte')}"
        case list() | dict():
            return f"{type(value).__name__} of {amount(len(value), 'element')}"
        case int() if not isinstance(value, bool):
            return f"integer of {amount(len(str(abs(value))), 'digit')}"
    return type(value).__name__


def shown_texts(texts: pa.Array, *, visible: bool) -> pa.Array:
    """`shown` of each text; null stays null.

    :param texts: string.
    """
    if visible:
        return pc.binary_join_element_wise("'", texts, "'", "")
    kinds = [None if text is None else shown(text, visible=False) for text in texts.to_pylist()]
    return pa.array(kinds, pa.string())


def told(error: Exception, *, visible: bool) -> str:
    """An exception's type and message. The message may quote a value, so that only the type can be shown."""
    return f"{type(error).__name__}: {shortened(str(error))}" if visible else type(error).__name__


def shortened(text: str) -> str:
    return text if len(text) <= _MOST else text[:_MOST] + "…"
