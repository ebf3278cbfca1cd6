"""One stack for all tests of a process."""

from collections.abc import Iterator

import pytest

from tests.stack.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with running_stack() as started:
        yield started
