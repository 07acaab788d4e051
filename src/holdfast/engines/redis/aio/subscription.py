"""The subscription to a client's notifications under asyncio.

With RESP3 the shared connection subscribes. Without RESP3, a second connection is used for the subscription only, and
no key is tracked. A lost subscription is renewed automatically as long as a waiter or a hold needs it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from holdfast.engines.redis.aio.pipelined_connection import PipelinedConnection, outcomes_of
from holdfast.engines.redis.failures import client_closed, log_no_pubsub, lost_connection, silence
from holdfast.engines.redis.protocol import is_redirection
from holdfast.protocol.effects import StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis.aio.engine import Engine

_FIRST_PAUSE: Final = 0.05  # seconds between attempts; doubled each time
_LONGEST_PAUSE: Final = 1.0


class Subscription:
    """The subscription of one engine, in one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.connection: PipelinedConnection | None = None  # the subscriber, if it is not the shared connection
        self._interrupted = False  # whether the subscription was lost, and not renewed yet
        self._subscribing: asyncio.Task[bool | Exception] | None = None
        self._resubscribing: asyncio.Task[None] | None = None

    async def listen(self, timeout: float) -> bool:
        """Subscribe to notifications; False if the server does not allow that."""
        engine = self._engine
        if engine.closed:
            raise client_closed(engine.address)
        if self._is_subscribed():
            return True
        task = self._subscribe()
        await asyncio.wait([task], timeout=timeout)
        if not task.done():
            raise silence(engine.address, timeout, None, sent=False)
        outcome = client_closed(engine.address) if task.cancelled() else task.result()
        if isinstance(outcome, Exception):
            raise engine.failed(outcome)
        return outcome

    def _is_subscribed(self) -> bool:
        if self._engine.channels.missing():
            return False
        both = (self._engine.shared, self.connection)
        return any(connection is not None and connection.subscribed and not connection.lost for connection in both)

    def _subscribe(self) -> asyncio.Task[bool | Exception]:
        """The task that subscribes. All callers share it, so a cancelled caller does not cancel it for the others."""
        if self._subscribing is None:
            self._subscribing = asyncio.get_running_loop().create_task(self._try_to_subscribe())
        return self._subscribing

    async def _try_to_subscribe(self) -> bool | Exception:
        """Whether the server allows subscriptions; or the error, if that is still unknown."""
        engine = self._engine
        try:
            while (shared := engine.shared) is None or shared.lost:
                error = await engine.connect()
                if error is not None:
                    return error
            if await engine.resp3.is_spoken(shared):
                await self._subscribe_on(shared)
            else:
                await self._subscribe_apart()
        except StepFailed as failed:
            if is_redirection(failed.__cause__):
                engine.channels.note_refused()
                return failed
            if failed.retry:
                return failed
            if not engine.logged_no_pubsub:
                engine.logged_no_pubsub = True
                log_no_pubsub(engine.address, engine.router, failed.__cause__)
            return False
        except Exception as error:
            return error
        finally:
            self._subscribing = None
        if self._interrupted:
            self._interrupted = False
            engine.router.look_again()
        return True

    async def _subscribe_apart(self) -> None:
        """Subscribe on a second connection, because RESP2 allows nothing else on a subscribed one."""
        engine = self._engine
        subscriber = self.connection
        if subscriber is None or subscriber.lost:
            subscriber = self.connection = await asyncio.wait_for(engine.open(list), engine.timeout)
        try:
            await self._subscribe_on(subscriber)
        finally:
            if not subscriber.subscribed:
                subscriber.abort()

    async def _subscribe_on(self, connection: PipelinedConnection) -> None:
        engine = self._engine
        asked = [engine.ask(connection, command) for command in engine.channels.missing()]
        for outcome in await outcomes_of(asked):
            if isinstance(outcome, StepFailed):
                raise outcome
            if outcome is not True:
                connection.abort()  # the reply is not a confirmation, so replies are out of step
                raise lost_connection(engine.address, None, ever_answered=engine.ever_answered)

    def note_loss(self, connection: PipelinedConnection) -> None:
        """Record the end of a connection: notifications, or reports about tracked keys, may have been lost."""
        engine = self._engine
        if connection.subscribed:
            self._interrupted = True
            engine.channels.lose_all()
        if connection.subscribed or connection.tracking:
            engine.router.look_again()
        if self._interrupted:
            self._resubscribe_soon(connection.loop)

    def resubscribe(self, loop: asyncio.AbstractEventLoop) -> None:
        """Subscribe to missing channels, and let all waiters look again: they may have missed a notification."""
        self._interrupted = True
        self._resubscribe_soon(loop)

    def _resubscribe_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._resubscribing is None and self._engine.channels.is_needed():
            self._resubscribing = loop.create_task(self._resubscribe())

    async def _resubscribe(self) -> None:
        """Subscribe again as soon as possible, while a waiter or a hold needs it."""
        pause = _FIRST_PAUSE
        try:
            while self._engine.channels.is_needed() and not self._is_subscribed():
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if await self._subscribe() is False:
                    return
        finally:
            self._resubscribing = None

    def tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in (self._resubscribing, self._subscribing) if task is not None]
