"""RESP3 and client tracking on the connections of the asyncio engine.

RESP3 lets the server push messages between two replies, which notifications and tracking need. A connection changes to
it (HELLO 3) when it first subscribes or tracks, and not before, so an old server or proxy without HELLO serves clients
that need neither.

Only an error reply shows that a server does not speak RESP3, and only for that connection: the next connection, perhaps
to another server, asks again. If a connection is cut during HELLO, the cause is unknown: perhaps a proxy that closes
connections on unknown commands, or a load balancer whose server restarts. Each such HELLO costs the shared connection
and all requests in flight there. So after two in a row RESP3 is turned off, and HELLO is tried on separate connections
until one of them gets an answer.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.engines.redis.aio.pipelined_connection import PipelinedConnection, Reply
from holdfast.engines.redis.failures import log_no_resp3, log_resp3_is_back
from holdfast.protocol.effects import Command, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis.aio.engine import Engine

_HELLO: Final = Command(("HELLO", "3"))
_TRACKING: Final = Command(("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP"))

_MOST_CUTS: Final = 2  # cut connections in a row, after which RESP3 is turned off
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # seconds before a probe; doubled each time
_PROBE_TIMEOUT: Final = 1.0


class Resp3:
    """What is known about RESP3 on one server. All connections of a client in one event loop share it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.off = False  # HELLO is not sent, because connections were cut during it
        self._cuts = 0  # in a row
        self._logged = False  # the log says that RESP3 or tracking is missing
        self._pause = _FIRST_PAUSE
        self._probing: asyncio.Task[None] | None = None

    async def is_spoken(self, connection: PipelinedConnection) -> bool:
        """Whether this connection uses RESP3, after sending HELLO. Only then may it subscribe, because RESP2 allows
        nothing else on a subscribed connection."""
        if not self._may_say_hello(connection):
            return False
        try:
            await self._say_hello(connection)
        except StepFailed as failed:
            if failed.retry or connection.lost:
                raise
            return False
        return True

    def track(self, connection: PipelinedConnection) -> None:
        """Turn client tracking on: the server reports writes of other clients to keys that we have watched."""
        if self._may_say_hello(connection):
            connection.tracking = True
            self._say_hello(connection)
            connection.engine.ask(connection, _TRACKING).add_done_callback(partial(self._note_tracking, connection))

    def _may_say_hello(self, connection: PipelinedConnection) -> bool:
        if self.off and connection.hello is None:
            self._probe_soon()
            return False
        return connection.may_speak_resp3

    def _say_hello(self, connection: PipelinedConnection) -> Reply:
        """Change to RESP3, once per connection."""
        if connection.hello is None:
            connection.hello = connection.engine.ask(connection, _HELLO)
            connection.hello.add_done_callback(partial(self._note_hello, connection))
        return connection.hello

    def _note_hello(self, connection: PipelinedConnection, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if not isinstance(failed, StepFailed):
            self._cuts, self._pause = 0, _FIRST_PAUSE
        elif not connection.lost and not failed.silent:
            self._note_answer(connection, failed, "RESP3")
        else:
            self._cuts += 1
            if self._cuts >= _MOST_CUTS:
                self.off = True
                self._log(f"connections to {self._engine.address} were cut during HELLO", logging.WARNING)
                self._probe_soon()

    def _note_tracking(self, connection: PipelinedConnection, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if isinstance(failed, StepFailed):
            if not connection.lost and not failed.silent:
                self._note_answer(connection, failed, "client tracking")
        elif self._logged and connection.may_speak_resp3:
            self._logged = False
            log_resp3_is_back(self._engine.address)

    def _note_answer(self, connection: PipelinedConnection, failed: StepFailed, what: str) -> None:
        """Record an error reply, lasting or temporary."""
        connection.tracking = False
        if failed.retry:
            connection.hello = None
            return
        connection.may_track = False
        connection.may_speak_resp3 = connection.may_speak_resp3 and what != "RESP3"
        self._log(f"{self._engine.address} refuses {what}", logging.INFO)

    def _log(self, why: str, level: int) -> None:
        if not self._logged:
            self._logged = True
            log_no_resp3(why, level=level)

    # Probes.

    def _probe_soon(self) -> None:
        if self._probing is None and not self._engine.closed:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        """Try HELLO on separate connections until one is answered, while a waiter or a hold needs tracking."""
        try:
            while True:
                await asyncio.sleep(self._pause)
                if not self._engine.router.is_needed():
                    return  # until RESP3 is needed again
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                if await self._is_answered():
                    self.off, self._cuts = False, 0
                    self._engine.router.look_again()  # so that all keys are watched again
                    return
        finally:
            self._probing = None

    async def _is_answered(self) -> bool:
        """Whether the server answers HELLO; an error reply counts as an answer."""
        connection: PipelinedConnection | None = None
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                connection = await self._engine.open()
                await connection.engine.ask(connection, _HELLO)
        except StepFailed as failed:
            return connection is not None and not connection.lost and not failed.retry
        except Exception:  # from redis-py, a credential provider, the embedded server
            return False
        finally:
            if connection is not None and not connection.lost:
                connection.abort()
        return True

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
