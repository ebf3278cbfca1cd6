"""Paths of local disks. Hadoop reads the configuration's paths in the same way if its own settings are the defaults."""

import re
from pathlib import Path

_LOCAL = re.compile(r"(?:file:(?://)?)?(/(?!/)[^:%]*)")


def local_path(place: str) -> Path | None:
    """None if it is in another file system, or Hadoop might read it otherwise."""
    found = _LOCAL.fullmatch(place)
    return None if found is None else Path(found[1])
