"""Locations of files, as text."""

import re


def in_one_form(location: str) -> str:
    """The location in one form, whichever of the schemes and spellings for the same storage it has: `file:/a` and
    `file:///a` are `/a`, and `s3a://b/c` is `s3://b/c`.
    """
    return re.sub(r"^s3[an]://", "s3://", re.sub(r"^file:/+", "/", location))
