"""Locations of files, as text."""

import re

from sink.errors import TableError


def in_one_form(location: str) -> str:
    """The location in one form, whichever of the schemes and spellings for the same storage it has: `file:/a` and
    `file:///a` are `/a`, and `s3a://b/c` is `s3://b/c`.
    """
    return re.sub(r"^s3[an]://", "s3://", re.sub(r"^file:/+", "/", location))


def check_location(what: str, location: str) -> None:
    """Arrow's and Iceberg's clients end a URI's path at a `#` or `?`, so all files below it would be one file.

    :param what: what is there, for the message.
    :raises TableError: the location is a URI with such a character.
    """
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:[^#?]*([#?])", location)
    if found is not None:
        raise TableError(
            f"{what} is at {location}, and clients of storage take {found[1]!r} for the end of a path: its files would "
            "overwrite each other. Choose a location, or a table's name, without it."
        )


def in_pattern(folder: str) -> str:
    """A folder's path as it must be written in a pattern of Hadoop's (`FileSystem.globStatus`), without a slash at the
    end.
    """
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", folder.rstrip("/"))
