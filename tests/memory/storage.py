"""Files in memory, and the clock of a process: it counts what the process does outside of itself, and at each count
something may happen to it.
"""

import io
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO

ANY = "any step"

Step = tuple[str, int]
"""A step of a process: its name, or `ANY`, and the how manieth it is of these, from 1 on."""


class CrashError(BaseException):
    """The process dies here. No handler may do anything any more: each further step raises it again."""


class Clock:
    """Counts the steps of one process: reads and writes of files, looks at the table, commits.

    :param plan: what happens at which step. It gets the clock and the step's name.
    """

    def __init__(self, plan: Mapping[Step, "Callable[[Clock, str], None]"] | None = None) -> None:
        self._plan = dict(plan or {})
        self._done: Counter[str] = Counter()
        self._is_dead = self._is_paused = False

    def step(self, what: str) -> None:
        if self._is_paused:
            return
        if self._is_dead:
            raise CrashError(what)
        self._done.update((what, ANY))
        happens = self._plan.pop((what, self._done[what]), None) or self._plan.pop((ANY, self._done[ANY]), None)
        if happens is None:
            return
        self._is_paused = True  # what others do are no steps of this process
        try:
            happens(self, what)
        finally:
            self._is_paused = False

    def die(self, what: str) -> None:
        self._is_dead = True
        raise CrashError(what)


class MemoryFiles(FileIO):
    """Files by path.

    :param clock: is asked before each write and deletion; None for a reader who isn't part of the story.
    """

    def __init__(self, contents: dict[str, bytes], clock: Clock | None) -> None:
        super().__init__()
        self.contents = contents
        self.clock = clock

    def new_input(self, location: str) -> "_Input":
        return _Input(location, self)

    def new_output(self, location: str) -> "_Output":
        return _Output(location, self)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        path = location if isinstance(location, str) else location.location
        self.step("delete a file")
        if self.contents.pop(path, None) is None:
            raise FileNotFoundError(path)

    def step(self, what: str) -> None:
        if self.clock is not None:
            self.clock.step(what)


class _Input(InputFile):
    def __init__(self, location: str, files: MemoryFiles) -> None:
        super().__init__(location)
        self._files = files

    def __len__(self) -> int:
        return len(self._files.contents[self.location])

    def exists(self) -> bool:
        return self.location in self._files.contents

    def open(self, seekable: bool = True) -> Any:
        if not self.exists():
            raise FileNotFoundError(self.location)
        return io.BytesIO(self._files.contents[self.location])


class _Output(OutputFile):
    def __init__(self, location: str, files: MemoryFiles) -> None:
        super().__init__(location)
        self._files = files

    def __len__(self) -> int:
        return len(self._files.contents[self.location])

    def exists(self) -> bool:
        return self.location in self._files.contents

    def to_input_file(self) -> _Input:
        return _Input(self.location, self._files)

    def create(self, overwrite: bool = False) -> Any:
        self._files.step("create a file")
        return _Writing(self.location, self._files.contents)


class _Writing(io.BytesIO):
    """The file is there when it is closed."""

    def __init__(self, path: str, contents: dict[str, bytes]) -> None:
        super().__init__()
        self._path = path
        self._contents = contents

    def close(self) -> None:
        if not self.closed:
            self._contents[self._path] = self.getvalue()
        super().close()


class SteppingFiles(PyArrowFileIO):
    """Files of the disk, for the key index: tasks map its runs into memory."""

    def __init__(self, clock: Clock) -> None:
        super().__init__({})
        self._clock = clock

    def new_input(self, location: str) -> Any:
        self._clock.step("read the index")
        return super().new_input(location)

    def new_output(self, location: str) -> Any:
        self._clock.step("write the index")
        return super().new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self._clock.step("delete a file of the index")
        super().delete(location)
