"""Both faces, with recipes. Every lock here is unsafe, and says so; that it does is tested by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import AioFace, BlockingFace, _AioLock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "recipes" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning"))


class Blocking(BlockingFace):
    def recipe(self, name: str, key: str, **options: Any) -> Any:
        return self.client.recipe(name, key, **options)


class Asyncio(AioFace):
    def recipe(self, name: str, key: str, **options: Any) -> Any:
        return _AioLock(self, self.client.recipe(name, key, **options))


@pytest.fixture(params=[Blocking, Asyncio], ids=lambda face: face.kind)
def connect(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``connect(target, **options)``, on either face; what it made is closed after the test."""
    made: list[Any] = []

    def make(target: object = None, **options: Any) -> Any:
        made.append(request.param(target, **options))
        return made[-1]

    make.kind = request.param.kind  # type: ignore[attr-defined]
    yield make
    for face in made:
        face.close()
