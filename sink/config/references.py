"""`${NAME}`, `${NAME:-default}` and `${file:PATH}` in the configuration stand for what isn't in the file."""

import os
import re
import stat
from pathlib import Path

REFERENCE = re.compile(r"\$\{(?:file:(?!-)(?P<file>[^}]+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?)\}")
_MOST_BYTES = 1 << 20
"""Of a file with a secret. A chain of certificates has a few thousand."""


def resolve(reference: re.Match[str], folder: Path) -> str:
    """The text for which a reference stands. The line break at the end of a file isn't part of it.

    :param folder: relative paths of files begin here.
    :raises ValueError: the variable isn't set, or the file can't be read. The message never has the file's content.
    """
    if reference["file"] is not None:
        return _content(reference[0], folder, reference["file"].strip())
    name = reference["name"]
    value = os.environ.get(name, reference["default"])
    if value is None:
        raise ValueError(f"uses ${{{name}}}, and the environment has no {name}. Set it, or write ${{{name}:-default}}.")
    return value


def _content(reference: str, folder: Path, path: str) -> str:
    try:
        file = folder / Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"uses {reference}, and {path} begins with the home folder of a user who isn't known here. Write the whole "
            "path."
        ) from None
    try:
        # a pipe that nobody writes into would be waited for
        if not stat.S_ISREG(file.stat().st_mode):
            raise _NotAFileError
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            content = stream.read(_MOST_BYTES + 1)
    except _NotAFileError:
        raise ValueError(f"uses {reference}, and {file} is not a regular file. Give the path of a text file.") from None
    except OSError as error:
        raise ValueError(
            f"uses {reference}, and {file} can't be read ({error.strerror}). Create it, or correct the path."
        ) from None
    except ValueError:  # a null byte, or half of a character
        raise ValueError(
            f"uses {reference}, and {str(file)!r} can't be the name of a file. Correct the path."
        ) from None
    if len(content) > _MOST_BYTES:
        raise ValueError(f"uses {reference}, and {file} has more than 1 MB. Name a file that has only this value.")
    try:
        return content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError(f"uses {reference}, and {file} is not UTF-8 text. Give the path of a text file.") from None


class _NotAFileError(Exception):
    """It may be a folder, a pipe or a device."""
