"""Reads the configuration file: YAML in, a typed model out. An error names file, line, key and value, and says what was
expected.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    ValidationError,
)

from sink.config.messages import dotted, explain, shown
from sink.config.model import Config, has_folders
from sink.config.references import REFERENCE, resolve
from sink.errors import ConfigError
from sink.redaction import MASK, is_secret, remember


def load(path: str | Path) -> Config:
    """Read, put values in place of references, validate.

    :raises ConfigError: the message names file, line, key and value, and says what was expected. It has all mistakes.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}). Give the path of a configuration file.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8, as a configuration file must be. Save it as UTF-8.") from None
    lines: dict[tuple[str | int, ...], int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _construct(node, (), lines, file)
    except yaml.MarkedYAMLError as error:
        # the error's own text quotes the line, which may hold a secret
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = _yaml_hint(text.splitlines()[line - 1 : line], error)
        # an unquoted secret may begin like an alias, an anchor or a tag
        problem = re.sub(r"(alias|anchor|tag|tag handle) '.*'", r"\1", str(error.problem), flags=re.DOTALL)
        raise ConfigError(f"{path}:{line}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected the sections sink, source, catalogs and tables, found "
            f"{shown(values) if text.strip() else 'an empty file'}."
        )
    for options in _mappings(values):
        remember(options)
    try:
        return Config.model_validate(_absolute_paths(values, file.resolve().parent))
    except ValidationError as error:
        # if a value fits none of several types, pydantic reports it several times; show it once
        problems = dict.fromkeys(explain(problem, lines) for problem in error.errors())
        raise ConfigError("\n".join(f"{path}{problem}" for problem in problems)) from None


def _mappings(values: Any) -> Iterator[dict[str, str]]:
    """The texts of all mappings in a value, by their names."""
    if isinstance(values, dict):
        yield {name: value for name, value in values.items() if isinstance(value, str)}
    for inner in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _mappings(inner)


def _yaml_hint(line: list[str], error: yaml.MarkedYAMLError) -> str:
    """A hint for a frequent mistake. It doesn't show the line itself, which may have a secret."""
    if "'\\t'" in str(error.problem):
        return ". This is a tab; YAML is indented with spaces"
    if re.search(r"\b(alias|anchor|tag)\b", str(error.problem)):
        return ". Quote a value that begins with *, & or !"
    if "got '{'" in str(error.problem) and line and "${" in line[0]:
        return '. Between { and } or [ and ], quote what has ${…} in it: "${NAME}/x"'
    return ""


def _construct(
    node: yaml.Node | None, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], file: Path
) -> Any:
    if node is None:
        return None
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in result:
                raise ConfigError(
                    f"{file}:{key_node.start_mark.line + 1}: {dotted((*path, key))} is given twice. Keep one."
                )
            result[key] = _construct(value_node, (*path, key), lines, file)
            lines[(*path, key)] = key_node.start_mark.line + 1
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*path, i), lines, file) for i, child in enumerate(node.value)]
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except ValueError:  # such as 2026-02-30, which only looks like a date
        value = str(node.value)
    if isinstance(value, bool | int | float) and path and is_secret(str(path[-1])):
        if isinstance(value, bool) and node.value.lower() not in ("true", "false"):
            raise ConfigError(
                f"{file}:{lines[path]}: {dotted(path)}: got {MASK}, which is not text in YAML, expected text. "
                "Write it in quotes."
            )
        # as it is written, since YAML's 0123 is 83; and as text, so that it is masked
        return str(node.value)
    if isinstance(value, str):
        return REFERENCE.sub(lambda reference: _resolved(reference, path, lines[path], file), value)
    return value if isinstance(value, bool | int | float | None) else str(node.value)


def _resolved(reference: re.Match[str], path: tuple[str | int, ...], line: int, file: Path) -> str:
    try:
        value = resolve(reference, file.resolve().parent)
        if path and path[-1] in ("expression", "where"):
            remember({"secret": value})  # such as the salt of a hash
        return value
    except ValueError as error:
        raise ConfigError(f"{file}:{line}: {dotted(path)} {error}") from None


def _absolute_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make local paths absolute. Relative ones start at the configuration file's folder, not at the current folder."""

    def absolute(path: Any) -> Any:
        if not isinstance(path, str) or not path or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
            return path
        return os.path.normpath(folder / Path(path).expanduser())

    for section, entry in _path_entries(values):
        section[entry] = absolute(section[entry])
    return values


def _path_entries(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    sink, source, catalogs = values.get("sink"), values.get("source"), values.get("catalogs")
    if isinstance(sink, dict) and "checkpoint" in sink:
        yield sink, "checkpoint"
    if isinstance(source, dict) and "buffer" in source:
        yield source, "buffer"
    if isinstance(values.get("index"), dict) and "location" in values["index"]:
        yield values["index"], "location"
    if isinstance(catalogs, dict):
        for catalog in catalogs.values():
            if isinstance(catalog, dict) and "warehouse" in catalog and has_folders(catalog):
                yield catalog, "warehouse"
    if isinstance(source, dict) and source.get("type") == "files" and isinstance(values.get("tables"), list):
        for table in values["tables"]:
            if isinstance(table, dict) and isinstance(table.get("source"), str):
                yield table, "source"
