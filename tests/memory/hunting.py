"""Plays many stories. One that fails is told in its simplest form.

`ROWDELTA_MEMORY_STORIES=20000 pytest tests/memory` goes hunting, and `ROWDELTA_MEMORY_SEED` plays the same stories
again.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import SystemRandom

import pytest

from tests.memory.stories import Player, Story, played

STORIES = int(os.environ.get("ROWDELTA_MEMORY_STORIES", "300"))
PARTS = 4
"""So that several processes of pytest can share the stories."""
_SEED = int(os.environ.get("ROWDELTA_MEMORY_SEED", SystemRandom().randrange(10**9)))


def failure(story: Story, folder: Path, player: type[Player] = Player) -> Exception | None:
    try:
        played(story, folder, player)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


def hunt(tell: Callable[[int], Story], part: int, count: int, folder: Path, player: type[Player] = Player) -> None:
    """Play a part of `count` random stories.

    :param tell: makes a story of a seed.
    """
    for seed in range(_SEED + part, _SEED + count, PARTS):
        story = tell(seed)
        error = failure(story, folder, player)
        if error is not None:
            simplest = _shrunk(story, player.fixed, lambda simpler: failure(simpler, folder, player) is not None)
            found = failure(simplest, folder, player) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")


def is_found(stories: Iterable[Story], folder: Path, player: type[Player] = Player) -> bool:
    """Whether a mistake makes one of the stories end otherwise. An error of the test itself isn't one."""
    errors = (failure(story, folder, player) for story in stories)
    error = next((error for error in errors if error is not None), None)
    assert not isinstance(error, (TypeError, AttributeError, NameError)), error
    return error is not None


def _shrunk(story: Story, fixed: tuple[str, ...], fails: Callable[[Story], bool]) -> Story:
    """The simplest story that still fails, as far as removing one thing at a time leads."""
    while (simpler := next(filter(fails, story.simpler(fixed)), None)) is not None:
        story = simpler
    return story
