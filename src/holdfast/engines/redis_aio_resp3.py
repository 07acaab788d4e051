"""RESP3 and client tracking on the connections of the asyncio engine.

RESP3 lets the server speak unasked between two replies, which notifications and tracking need. A connection changes
over to it (HELLO 3) when it is first to listen or to track, and not before: then an old server or proxy that does not
know HELLO is no trouble to clients that need neither.

Only an answer says that a server does not speak RESP3, and it says so for that connection alone: the next one, perhaps
to another server, asks again. A connection that is cut during HELLO says nothing. It may be a proxy that closes
connections on commands that it does not know, or a load balancer whose server restarts. Each such HELLO costs the
shared connection, with all that is under way there. So after two in a row RESP3 is left off, and HELLO is tried on a
connection of its own, again and again, until it is answered there.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.engines.redis_aio_wire import Reply, Wire
from holdfast.engines.wire import complain_of_no_resp3, note_resp3_is_back
from holdfast.protocol.effects import Command, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis_aio import Engine

__all__ = ["Resp3"]

_HELLO: Final = Command(("HELLO", "3"))
_TRACKING: Final = Command(("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP"))

_MOST_CUTS: Final = 2  # in a row, before RESP3 is left off
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # before a probe; doubled each time
_PROBE_TIMEOUT: Final = 1.0


class Resp3:
    """What is known of one server and RESP3: shared by all connections of a client in one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.off = False  # HELLO is left off, because connections were cut during it
        self._cuts = 0  # in a row
        self._told = False  # the log says that RESP3 or tracking is missing
        self._pause = _FIRST_PAUSE
        self._probing: asyncio.Task[None] | None = None

    async def is_spoken(self, wire: Wire) -> bool:
        """Whether RESP3 is spoken on that connection; asks for it. Until that is certain nothing may be subscribed to:
        RESP2 allows nothing else on a connection that listens."""
        if not self._may_greet(wire):
            return False
        try:
            await self._greet(wire)
        except StepFailed as failed:
            if failed.retry or wire.lost:
                raise
            return False
        return True

    def track(self, wire: Wire) -> None:
        """Let the server tell us, on that connection, when other clients write what we have watched."""
        if self._may_greet(wire):
            wire.tracking = True
            self._greet(wire)
            wire.engine.ask(wire, _TRACKING).add_done_callback(partial(self._note_tracking, wire))

    def _may_greet(self, wire: Wire) -> bool:
        if self.off and wire.greeting is None:
            self._probe_soon()
            return False
        return wire.may_speak_resp3

    def _greet(self, wire: Wire) -> Reply:
        """Change over to RESP3, once per connection."""
        if wire.greeting is None:
            wire.greeting = wire.engine.ask(wire, _HELLO)
            wire.greeting.add_done_callback(partial(self._note_greeting, wire))
        return wire.greeting

    def _note_greeting(self, wire: Wire, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if not isinstance(failed, StepFailed):
            self._cuts, self._pause = 0, _FIRST_PAUSE
        elif not wire.lost and not failed.silent:
            self._note_answer(wire, failed, "RESP3")
        else:
            self._cuts += 1
            if self._cuts >= _MOST_CUTS:
                self.off = True
                self._tell(f"connections to {self._engine.address} were cut during HELLO", logging.WARNING)
                self._probe_soon()

    def _note_tracking(self, wire: Wire, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if isinstance(failed, StepFailed):
            if not wire.lost and not failed.silent:
                self._note_answer(wire, failed, "client tracking")
        elif self._told and wire.may_speak_resp3:
            self._told = False
            note_resp3_is_back(self._engine.address)

    def _note_answer(self, wire: Wire, failed: StepFailed, what: str) -> None:
        """The server answered with an error, for good or for now."""
        wire.tracking = False
        if failed.retry:
            wire.greeting = None
            return
        wire.may_track = False
        wire.may_speak_resp3 = wire.may_speak_resp3 and what != "RESP3"
        self._tell(f"{self._engine.address} refuses {what}", logging.INFO)

    def _tell(self, why: str, level: int) -> None:
        if not self._told:
            self._told = True
            complain_of_no_resp3(why, level=level)

    # Probes.

    def _probe_soon(self) -> None:
        if self._probing is None and not self._engine.closed:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        """Try HELLO on connections of its own until it is answered, for as long as tracking is of use."""
        try:
            while True:
                await asyncio.sleep(self._pause)
                if not self._engine.board.is_needed():
                    return  # until RESP3 is asked for again
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                if await self._is_answered():
                    self.off, self._cuts = False, 0
                    self._engine.board.look_again()  # which has everything watched again
                    return
        finally:
            self._probing = None

    async def _is_answered(self) -> bool:
        """Whether HELLO is answered, be it with an error."""
        wire: Wire | None = None
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                wire = await self._engine.open_wire()
                await wire.engine.ask(wire, _HELLO)
        except StepFailed as failed:
            return wire is not None and not wire.lost and not failed.retry
        except Exception:  # redis-py, a credential provider, the embedded server: anything
            return False
        finally:
            if wire is not None and not wire.lost:
                wire.abort()
        return True

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
