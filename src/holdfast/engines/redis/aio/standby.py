"""The engine of the keeper under asyncio: the shared connection while it is healthy, else a connection of its own.

Renewals cannot wait for a dead connection, and other callers drop one only after their timeout. The keeper uses its own
connection after 0.2 seconds without an answer, or once a reply is overdue. It returns to the shared connection when the
server answers there again. If no other connection can be opened (a server at maxclients), it uses the shared one.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from holdfast.engines.redis.aio.engine import Engine
from holdfast.engines.redis.aio.pipelined_connection import Reply, Request
from holdfast.engines.redis.protocol import Op

_CHECK_EVERY: Final = 1.0  # seconds, while there are two connections


class StandbyEngine(Engine):
    """Runs steps on the engine of the client, or on its own connection while that engine is unresponsive."""

    PATIENCE: Final = 0.2  # seconds; less than CLEANUP_WAIT, after which a caller leaves its clean-up to the keeper

    def __init__(self, main: Engine) -> None:
        self._main = main
        super().__init__(main.target, main.timeout, main.router, main.now)

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        super()._begin_anew(loop)
        self.resp3 = self._main.resp3
        self._active = False  # whether steps go over our own connection
        self._refused_until = 0.0  # until then we do not try to open our own connection
        self._check: asyncio.TimerHandle | None = None

    def submit(self, op: Op, timeout: float, reply: Reply | None = None, *, first: bool = False) -> Reply:
        main = self._main
        active = main.is_unresponsive(self.PATIENCE) or main.has_overdue() or (self.is_up() and not main.is_up())
        if active and main.is_up() and not self.is_up() and monotonic() < self._refused_until:
            active = False
        if active != self._active:
            self._active = active
            self.router.look_again()  # keys that one connection tracks are not tracked on the other
        if not active:
            return main.submit(op, timeout, reply, first=True)
        if self._check is None:
            self._check_later()
        return super().submit(op, timeout, reply)

    def _refuse(self, requests: list[Request], error: Exception) -> None:
        if not self._main.is_up():
            super()._refuse(requests, error)
            return
        self._refused_until, self._active = monotonic() + 1.0, False
        for op, reply, deadline, *_ in requests:
            assert op is not None
            self._main.submit(op, max(0.0, deadline - monotonic()), reply)

    def _check_later(self) -> None:
        assert self._loop is not None
        self._check = self._loop.call_later(_CHECK_EVERY, self._check_both)

    def _check_both(self) -> None:
        """Drop our connection if the shared one is healthy again; drop the shared one if only ours gets answers."""
        self._check = None
        main, own, shared = self._main, self.shared, self._main.shared
        if own is not None and not own.lost:
            if main.is_up() and not main.is_unresponsive(self.PATIENCE):
                if not own.in_flight and not self.backlog:
                    self.abort()
            elif shared is not None and shared.is_unresponsive(1.0) and own.waiting_since > shared.waiting_since + 1.0:
                main.abort()
        if (self.is_up() or self._connecting is not None) and not self.closed:
            self._check_later()

    async def listen(self, timeout: float, keys: tuple[str, ...] = ()) -> bool:
        return await self._main.listen(timeout)

    async def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
        await super().close()
