"""Paths of local disks. Hadoop reads the configuration's paths in the same way if its own settings are the defaults."""

import re
from pathlib import Path

from sink.errors import NeedsSparkError

_LOCAL = re.compile(r"(?:file:(?://)?)?(/(?!/)[^:%]*)")


def local_path(place: str) -> Path:
    """:raises NeedsSparkError: it is in another file system, or Hadoop might read it otherwise."""
    found = _LOCAL.fullmatch(place)
    if found is None:
        raise NeedsSparkError(f"the path {place}")
    return Path(found[1])
