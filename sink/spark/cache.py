"""The user's cache folder. It holds files that make a start faster, and can be deleted at any time."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def folder(name: str) -> Path | None:
    """A folder below `$XDG_CACHE_HOME/rowdelta` (by default `~/.cache/rowdelta`) that only this user can write to.

    :return: None if there can't be such a folder: the home may be read-only, or the folder may belong to another user.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        path = root / "rowdelta" / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own = all(_is_own(each) for each in (path.parent, path))
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    return path if is_own and os.access(path, os.W_OK) else None


def _is_own(path: Path) -> bool:
    """Whether only this user can write to the folder. Another user who can write there could make us load anything."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return True


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if others read or write it at the same time. A full disk isn't an
    error here.
    """
    from deltawriters.storage import whole_file  # it loads PyIceberg

    with suppress(OSError), whole_file(path) as file:
        file.write(text.encode())
