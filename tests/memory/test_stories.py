"""Any story about a table ends well, whatever happens in it: see `tests.memory.stories`.

`ROWDELTA_MEMORY_STORIES=20000 pytest tests/memory` goes hunting, and `ROWDELTA_MEMORY_SEED` plays the same stories
again. A story that fails is printed in its simplest form.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

import pytest
from pyspark import SparkContext

from tests.memory.stories import Story, played, shrunk

ROOT = Path(__file__).parents[2]
STORIES = int(os.environ.get("ROWDELTA_MEMORY_STORIES", "1000"))
SEED = int(os.environ.get("ROWDELTA_MEMORY_SEED", SystemRandom().randrange(10**9)))


@pytest.fixture(autouse=True)
def _no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here starts a JVM."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a JVM would be started")

    monkeypatch.setattr(SparkContext, "_ensure_initialized", refuse)


def failure(story: Story, folder: Path) -> Exception | None:
    try:
        played(story, folder)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


def test_every_snapshot_is_right(tmp_path: Path) -> None:
    folder = tmp_path / "story"
    for seed in range(SEED, SEED + STORIES):
        story = Story.random(seed)
        error = failure(story, folder)
        if error is not None:
            simplest = shrunk(story, lambda simpler: failure(simpler, folder) is not None)
            found = failure(simplest, folder) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")


def test_stories_need_no_java(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tests.memory.stories import Story, played; from pyspark import SparkContext\n"
        "for seed in range(20): played(Story.random(seed), pathlib.Path(sys.argv[1]))\n"
        "assert SparkContext._gateway is None and SparkContext._jvm is None; print('played')"
    )
    nowhere = {"PATH": "/nowhere", "JAVA_HOME": "/nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path / "story")]
    assert (
        subprocess.run(command, cwd=ROOT, env=nowhere, capture_output=True, text=True, check=True).stdout == "played\n"
    )
