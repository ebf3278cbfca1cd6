"""Locations of files, as text."""

import re


def in_one_form(location: str) -> str:
    """The location in one form, whichever of the schemes and spellings for the same storage it has: `file:/a` and
    `file:///a` are `/a`, and `s3a://b/c` is `s3://b/c`.
    """
    return re.sub(r"^s3[an]://", "s3://", re.sub(r"^file:/+", "/", location))


def in_pattern(folder: str) -> str:
    """A folder's path as it must be written in a pattern of Hadoop's (`FileSystem.globStatus`), without a slash at the
    end.
    """
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", folder.rstrip("/"))
