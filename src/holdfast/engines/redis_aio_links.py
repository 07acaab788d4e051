"""Connections of one's own under asyncio, for commands that need one and the same (WATCH).

Everything else of a client travels over one connection that all tasks share, where these commands would get into each
other's way. A link is another connection like that one, which one caller has until it gives it back; then it rests, and
the next caller has it. One on which something went wrong, or of which the server still remembers something, is not used
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from holdfast.engines.redis_aio_wire import Wire
from holdfast.engines.wire import client_closed, connect_failure, leaves_nothing, lost_connection, silence
from holdfast.protocol.effects import Command, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis_aio import Engine

__all__ = ["Links"]

_MOST_RESTING: Final = 16


class Links:
    """The links of one client, in one event loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[Wire] = set()  # resting or not
        self._resting: list[Wire] = []
        self._bound: set[Wire] = set()  # of which the server remembers something
        self._inherited: list[Wire] = []  # of a parent process; kept, because collecting one would close it
        self._closed = False

    async def open(self, timeout: float) -> Wire:
        while self._resting:
            wire = self._resting.pop()
            if not wire.lost:
                return wire
            self._open.discard(wire)
        if self._closed:
            raise client_closed(self._engine.address)
        try:
            wire = await asyncio.wait_for(self._engine.open_wire(), timeout)
        except Exception as error:  # redis-py, a credential provider, the embedded server: anything
            raise connect_failure(error, self._engine.address, timeout, tls=self._engine.tls)  # noqa: B904 (has it)
        if self._closed:  # while it was under way
            wire.abort()
            raise client_closed(self._engine.address)
        self._open.add(wire)
        return wire

    async def call_on(self, wire: Wire, commands: Sequence[Command], timeout: float) -> list[Any]:
        """The reply to each, or its StepFailed. Whoever is cancelled meanwhile takes the link down: replies to come
        would be taken for those of the next."""
        if wire not in self._open or wire.lost:
            raise client_closed(self._engine.address) if self._closed else lost_connection(self._engine.address, None)
        self._bound.discard(wire)
        if not leaves_nothing(commands):
            self._bound.add(wire)
        replies = [wire.loop.create_future() for _ in commands]
        now = monotonic()
        deadline = now + timeout
        for command, reply in zip(commands, replies, strict=True):
            wire.send((command, reply, deadline, timeout, now))
        try:
            _, missing = await asyncio.wait(replies, timeout=timeout)
        except BaseException:
            self._drop(wire, replies)
            raise
        if missing:
            self._drop(wire, replies)
            for resting in self._resting:  # what is silent on one, because a router has forgotten it, is so on all
                self._drop(resting, [])
            self._resting.clear()
            raise silence(self._engine.address, timeout, None, sent=True, met=self._engine.known)
        outcomes = [reply.exception() or reply.result() for reply in replies]
        if wire.lost:
            self._forget(wire)
            for outcome in outcomes:
                if isinstance(outcome, StepFailed) and outcome.prompt:
                    raise outcome
        return outcomes

    def close(self, wire: Wire) -> None:
        """Give it back; harmless if it was lost or closed before."""
        if wire not in self._open:
            return
        if wire.lost or wire in self._bound or wire.asked or self._closed or len(self._resting) >= _MOST_RESTING:
            self._drop(wire, [])
        else:
            self._resting.append(wire)

    def _drop(self, wire: Wire, replies: Sequence[asyncio.Future[Any]]) -> None:
        for reply in replies:
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # nobody minds it any more
        self._forget(wire)
        if not wire.lost:
            wire.abort()

    def _forget(self, wire: Wire) -> None:
        self._open.discard(wire)
        self._bound.discard(wire)

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in that loop from now on. What was open in another does not come along."""
        for wire in self._open:
            if not wire.lost and not wire.loop.is_closed():
                wire.abort()
        self._clear()

    def forget(self) -> None:
        """In a forked child: they are the parent's."""
        for wire in self._open:
            if not wire.lost:
                wire.disinherit()
            self._inherited.append(wire)
        self._clear()

    def _clear(self) -> None:
        self._open, self._bound, self._resting = set(), set(), []

    async def close_all(self) -> None:
        self._closed = True
        wires = [wire for wire in self._open if not wire.lost]
        self._clear()
        for wire in wires:
            await wire.close()
