"""A table with history has the versions that all changes make, in whatever order they come, whatever happens to the
sink, its index, and the table.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.memory.history import HistoryPlayer, history_story
from tests.memory.stories import Story, played, shrunk
from tests.memory.test_stories import PARTS, SEED, STORIES


def _failure(story: Story, folder: Path) -> Exception | None:
    try:
        played(replace(story, late=True, mode="upsert"), folder, HistoryPlayer)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_versions_are_there(tmp_path: Path, part: int) -> None:
    folder = tmp_path / "story"
    for seed in range(SEED + part, SEED + STORIES // 3, PARTS):
        story = history_story(seed)
        error = _failure(story, folder)
        if error is not None:
            simplest = shrunk(story, lambda simpler: _failure(simpler, folder) is not None)
            found = _failure(simplest, folder) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")
