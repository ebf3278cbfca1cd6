"""What the tests of the sink's faults share: a start that takes half the time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.shop import Shop
from tests.sink.test_submit import CACHE, warm


@pytest.fixture(scope="module")
def fast_start(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The sinks of a module take jars from a record and classes from an archive, which is made once."""
    folder = shared_folder / CACHE
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        warm(folder, Shop(tmp_path_factory.mktemp("warm")).configured("1 second"), wait=True)
        yield
