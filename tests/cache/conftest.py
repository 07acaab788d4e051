"""The three stages of tests/conformance, for functions that are computed or kept apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import APIS, STAGES, BlockingApi, Scenario, _drive, server_of_stage


class Awaited:
    """A blocking client whose methods can be awaited, and which is given coroutine functions as if they were plain."""

    def __init__(self, client: holdfast.Client) -> None:
        self._client = client

    async def get_or_compute(self, key: str, fn: Callable[[], Any], *args: Any, **options: Any) -> Any:
        return self._client.get_or_compute(key, plain(fn), *args, **options)

    def statistics(self) -> Any:
        return self._client.statistics()

    async def invalidate(self, key: str) -> bool:
        return self._client.invalidate(key)

    def cached(self, *args: Any, **options: Any) -> Any:
        return self._decorator(self._client.cached(*args, **options))

    def exclusive(self, *args: Any, **options: Any) -> Any:
        return self._decorator(self._client.exclusive(*args, **options))

    @staticmethod
    def _decorator(decorate: Any) -> Any:
        def apply(function: Any) -> Any:
            decorated = decorate(plain(function))
            awaited = awaitable(decorated)
            if hasattr(decorated, "invalidate"):
                awaited.key, awaited.invalidate = decorated.key, awaitable(decorated.invalidate)
            return awaited

        return apply


def plain(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return _drive(result) if hasattr(result, "send") else result

    return call


def awaitable(function: Any) -> Any:
    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class BlockingCaches(BlockingApi):
    def client(self, **options: Any) -> Any:
        client = holdfast.connect(self.server.url, **options)
        self._clients.append(client)
        return Awaited(client)


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], Any]:
    """Plays a scenario on one of the stages."""
    server = server_of_stage(request)
    api = BlockingCaches if request.param == "blocking" else APIS[request.param]
    return lambda scenario: api.play(scenario, server)
