"""The keeper's engine on a cluster under asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.engines.redis.aio.pipelined_connection import outcomes_of
from holdfast.engines.redis.cluster.aio import ClusterEngine
from holdfast.engines.redis.protocol import Op


class ClusterStandby:
    """The engine of the keeper: the standby of each node, which belongs to the engine of the cluster."""

    def __init__(self, main: ClusterEngine) -> None:
        self._main = main
        self.submit = partial(main.submit, standby=True)
        self.listen = main.listen
        self.expire = main.expire

    async def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        return await outcomes_of([self.submit(op, timeout) for op in ops])

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: the engine of the cluster moves all nodes."""

    def forget(self) -> None:
        """Do nothing: the engine of the cluster does this for all nodes."""

    async def close(self) -> None:
        """Do nothing: the engine of the cluster closes all nodes."""
