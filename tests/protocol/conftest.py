from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol.harness import Play


@pytest.fixture(autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    while Play.made:
        Play.made.pop().end()
