"""Pydantic's errors in the words of the configuration file."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from sink.config.model import Config
from sink.config.options import MisplacedError, did_you_mean
from sink.redaction import MASK, is_secret, masked


def explain(problem: Any, lines: dict[tuple[str | int, ...], int]) -> str:
    """One pydantic problem as `:LINE: key: what is wrong`."""
    error = problem.get("ctx", {}).get("error")
    path = tuple(part for part in problem["loc"] if not _ALTERNATIVE.match(str(part)))
    is_one_of = len(path) < len(problem["loc"])
    path += error.path if isinstance(error, MisplacedError) else ()
    line = next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 1)
    where = f":{line}: {dotted(path)}: " if path else f":{line}: "
    kind, value = problem["type"], problem.get("input")
    found = MASK if any(is_secret(str(part)) for part in path) else masked(shown(value))
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1])
        return f"{where}unknown key{did_you_mean(str(path[-1]), known)}. Known here: {', '.join(known)}."
    if kind == "missing":
        return f"{where}missing. Add it{_example(path)}."
    if kind == "literal_error":
        return f"{where}got {found}, expected {problem['ctx']['expected']}."
    if isinstance(error, MisplacedError):
        return f"{where}{error}."
    if error is not None:
        return f"{where}{error}." if isinstance(value, dict | list) or not path else f"{where}got {found}; {error}."
    if is_one_of:
        return f"{where}got {found}, expected text, or a list of texts that is not empty."
    if kind == "model_type" and path[-2:-1] == ("columns",):
        return f"{where}got {found}, expected a type such as bigint, or a mapping with type."
    if kind in _LIST_KINDS and isinstance(value, str | int | float) and found != MASK:
        return f"{where}got {found}, expected a list: [{masked(str(value))}]."
    if kind == "string_type" and isinstance(value, int | float) and found != MASK:
        return f'{where}got {found}, expected text: "{found}".'
    if kind == "greater_than_equal" and isinstance(problem["ctx"]["ge"], float):
        kind = "at_least"
    expected = _EXPECTED.get(kind, problem["msg"][0].lower() + problem["msg"][1:])
    return f"{where}got {found}, expected {expected.format(**problem.get('ctx', {}))}."


_ALTERNATIVE = re.compile(r"(function-\w+|tuple)\[")
"""Part of a path that pydantic adds where a value may have several types."""
_LIST_KINDS = ("list_type", "tuple_type")
_EXPECTED = {
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "model_attributes_type": "a mapping (name: value)",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "greater_than_equal": "a whole number of at least {ge}",
    "at_least": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_short": "at least {min_length} in it",
    "string_too_short": "text that is not empty",
}
"""Pydantic's kind of a problem -> our words. Pydantic's own messages use Python's terms."""


def shown(value: Any) -> str:
    """`value` for a message. The contents of lists and mappings aren't shown, since they may be secret."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else repr(value)


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys of the section at a path. Numbers of entries and names of columns lead to no other section."""
    model: type[BaseModel] = Config
    for part in path:
        field = {field.alias or name: field for name, field in model.model_fields.items()}.get(str(part))
        model = model if field is None else next(_models(field.annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _example(path: tuple[str | int, ...]) -> str:
    examples: dict[tuple[str, ...], str] = {
        ("sink", "id"): ", for example `id: shop`",
        ("sink", "checkpoint"): ", for example `checkpoint: ./state/shop`",
        ("source", "type"): ": kafka, files or debezium",
        ("source", "format"): ", for example `format: debezium-json`",
    }
    return examples.get(tuple(str(p) for p in path), "")


def dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
