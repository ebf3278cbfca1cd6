"""How files are reached: PyIceberg's `FileIO` over Arrow's file systems, with fewer requests to an object store."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.io import S3_RETRY_STRATEGY_IMPL, FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO


@lru_cache(maxsize=64)
def file_io(properties: tuple[tuple[str, str], ...]) -> FileIO:
    """What reaches files with these properties (`s3.endpoint`, `s3.access-key-id`, …), the same in a whole process.

    Each new client of an object store connects anew, and the tasks of each micro-batch would have one of their own.
    """
    return _ArrowFileIO(dict(properties))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A local file that has its name when it is complete, so that other processes never see a part of it."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as target:
            yield target
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


class _ArrowFileIO(PyArrowFileIO):
    def _initialize_s3_fs(self, netloc: str | None) -> FileSystem:
        """Arrow starts a multipart upload when a file is opened: three requests for a file of any size. If it may open
        the file later, it sends a small one (below 10 MB) by one. PyIceberg has no property for that.
        """
        made = super()._initialize_s3_fs(netloc)
        if S3_RETRY_STRATEGY_IMPL in self.properties:  # pickling, by which the options are known, leaves it out
            return made
        options: dict[str, Any] = made.__reduce__()[1][0]
        return S3FileSystem(**(options | {"allow_delayed_open": True}))
