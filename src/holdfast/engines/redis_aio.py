"""The asyncio engine: every task's steps, and the server's bells, over one connection.

redis-py opens the connection and introduces us (TLS, AUTH, SELECT); then its transport is given a protocol of ours.
Requests of one loop turn are written together, replies come back in order, and each goes to the future that asked.
A caller that was cancelled, or out of patience, simply leaves: its future is done, its reply is dropped when it
comes, and the connection stays in step for everybody else.

What is on the wire is bounded. Whatever finds no room there, or no wire, waits in a backlog, in order. Its time runs
from when it was asked for, and if it ends there, then nothing was sent.

Bells and tracking need RESP3, which lets the server speak unasked between two replies. The connection changes over to
it when it is first to listen or to watch, and not before: then an old server, or a proxy, that has never heard of HELLO
is no trouble to those who need neither. Where it is refused, bells are heard on a second connection, and nothing is
tracked.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, TypeAlias

import hiredis

from holdfast.engines.target import Target
from holdfast.engines.wire import (
    Op,
    client_closed,
    connect_failure,
    is_elsewhere,
    is_noscript,
    lost_connection,
    pack,
    refusal,
    silence,
)
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.effects import Command, Step, StepFailed

__all__ = ["Engine", "Lifeline"]

Reply: TypeAlias = "asyncio.Future[Any]"
Request: TypeAlias = tuple[Op, Reply, float, float]  # with its deadline, and the timeout that this came from

MOST_ASKED: Final = 1000  # requests on the wire; beyond that the server is no faster, and a lost connection costs more
_CHUNK: Final = 16  # requests that are worth a write before the turn is over: the server begins while we go on

_HELLO: Final = Command(("HELLO", "3"))
_TRACKING: Final = Command(("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP"))
_CACHING: Final = pack(Command(("CLIENT", "CACHING", "YES")))
_HELLO_LOST: Final = 2  # connections that broke while it was unanswered: somebody in between does not know it

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0

_NEVER: Final = float("inf")
_MORE: Final = object()  # what the reader says when it needs more bytes, for False is a reply in RESP3
_PUSH: Final[Any] = getattr(hiredis, "PushNotification", None)  # without it a push would pass for somebody's reply

log = logging.getLogger("holdfast")


class _Nobody:
    """Whoever waits for a reply that nobody waits for."""

    def done(self) -> bool:
        return True


_NOBODYS: Final[Any] = (_HELLO, _Nobody(), _NEVER, _NEVER)


class Wire(asyncio.Protocol):
    """An introduced connection, from the moment it is ours until it is lost."""

    def __init__(self, connection: Any, engine: Engine, loop: asyncio.AbstractEventLoop, push: Any) -> None:
        self._connection = connection
        self._transport: Any = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self._engine = engine
        self._loop = loop
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._push = push  # the type of what was not asked for
        self._out: list[bytes] = []
        self._error: Exception | None = None
        self.asked: deque[Request] = deque()
        self.waiting_since = 0.0  # when the server last said something, or was first asked after that
        self.open = True  # whether it takes more
        self.lost = False
        self.listening = False
        self.tracking = False
        self.greeting: Reply | None = None
        self._transport.set_protocol(self)

    def send(self, request: Request, *, with_source: bool = False) -> None:
        op, asked, out = request[0], self.asked, self._out
        data = pack(op, with_source=with_source)
        if type(op) is Step and op.watch and self._tracks():
            asked.append(_NOBODYS)
            data = _CACHING + data  # in one piece with the step: it speaks of the very next command
        if not asked:
            self.waiting_since = monotonic()
            self._transport.write(data)  # the wire is idle: no reason to wait for others
        else:
            out.append(data)
            if len(out) == 1:
                self._loop.call_soon(self._flush)
            elif len(out) == _CHUNK:
                self._flush()
        asked.append(request)

    def _flush(self) -> None:
        if self._out and not self.lost:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _tracks(self) -> bool:
        """See to it that this connection is tracked, if the server can do that."""
        engine = self._engine
        if self.tracking or not engine.can_track:
            return self.tracking
        self.tracking = True
        engine.greet(self)
        engine.ask(self, _TRACKING).add_done_callback(engine.note_tracking)
        return True

    def data_received(self, data: bytes) -> None:
        self.waiting_since = monotonic()
        asked, push = self.asked, self._push
        try:
            self._reader.feed(data)
            gets = self._reader.gets
            while (answer := gets()) is not _MORE:
                kind = type(answer)
                if kind is hiredis.ReplyError:
                    self._take_error(answer)
                elif kind is push:
                    self._take_push(answer)
                else:
                    reply = asked.popleft()[1]
                    if not reply.done():
                        reply.set_result(answer)
        except (hiredis.HiredisError, IndexError) as error:  # no Redis at all, or a reply to nothing: out of step
            self.abort(error)
        if self._engine.backlog:
            self._engine.drain()

    def _take_error(self, answer: Exception) -> None:
        request = self.asked.popleft()
        reply = request[1]
        if is_noscript(answer):
            self.send(request, with_source=True)  # even if its caller has left: the next one needs the script too
        elif not reply.done():
            reply.set_exception(refusal(answer, self._engine.address))
        if is_elsewhere(answer):
            self.abort()

    def _take_push(self, answer: list[Any]) -> None:
        kind, board = answer[0], self._engine.board
        if kind == b"message":
            board.deliver(answer[2], self._engine.now())
        elif kind == b"invalidate":
            if answer[1] is None:  # everything was flushed
                board.look_again()
            else:
                for key in answer[1]:
                    board.touched(key.decode(errors="replace"))
        elif kind == b"subscribe":  # in its place among the replies, though it is none
            reply = self.asked.popleft()[1]
            self.listening = board.armed = True
            if not reply.done():
                reply.set_result(True)

    def is_deaf(self, timeout: float) -> bool:
        """Whether the server has been silent for that long although it was asked."""
        return bool(self.asked) and monotonic() - self.waiting_since >= timeout

    def pause_writing(self) -> None:
        self.open = False

    def resume_writing(self) -> None:
        self.open = not self.lost
        if self._engine.backlog:
            self._engine.drain()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost, self.open = True, False
        self._stream.connection_lost(error)
        self._connection._reader = self._connection._writer = None  # redis-py takes this to mean closed
        asked, self.asked = self.asked, deque()
        for _, reply, _, _ in asked:
            if not reply.done():  # one each: tracebacks and notes are its own
                reply.set_exception(lost_connection(self._engine.address, self._error or error))
        self._engine.note_loss(self)

    def abort(self, error: Exception | None = None) -> None:
        """Give it up. Who is waiting learns it in the next turn; who comes now is sent elsewhere."""
        self.lost, self.open, self._error = True, False, error
        self._transport.abort()

    def disinherit(self) -> None:
        """In a forked child: let go of our copy of the socket. Closing the transport would take the parent's socket out
        of the event queue that parent and child still share, so the descriptor is pointed elsewhere instead."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._transport.get_extra_info("socket").fileno())
        os.close(nowhere)

    async def close(self) -> None:
        await self._connection.disconnect()


class Engine:
    """Runs steps on one server, for the tasks of one event loop, and hears its bells."""

    def __init__(
        self,
        target: Target,
        timeout: float,
        board: Switchboard,
        now: Callable[[], float],
        *,
        deaf_after: float | None = None,
    ) -> None:
        self.address = target.address
        self.board = board
        self.now = now  # the clock by which bells are timed
        self.backlog: deque[Request] = deque()  # asked for while there is no wire, or no room on it
        self.can_track = _PUSH is not None
        self._target = target
        self._timeout = timeout
        self._deaf_after = (deaf_after or timeout) * 0.99  # silence for which a connection is given up
        self._speaks_resp3 = _PUSH is not None  # until it is known not to
        self._hellos_lost = 0
        self._known = False
        self._closed = False
        self._warned = False
        self._inherited: list[Wire] = []  # of a parent process; kept, because collecting one would close it
        self._begin_anew(None)

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._wire: Wire | None = None
        self._ear: Wire | None = None  # where bells are heard if not on the wire itself
        self._interrupted = False  # whether a listener was lost, and not replaced yet
        self._connecting: asyncio.Task[Exception | None] | None = None
        self._connecting_since = 0.0
        self._arming: asyncio.Task[bool | Exception] | None = None
        self._rearming: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = _NEVER
        self.backlog.clear()

    def submit(self, op: Op, timeout: float, reply: Reply | None = None) -> Reply:
        """Ask for one step. The future fails with StepFailed; cancelling it costs nobody else anything."""
        if reply is None:
            reply = asyncio.Future(loop=self._loop)
        if self._closed:
            reply.set_exception(client_closed(self.address))
            return reply
        deadline = monotonic() + timeout
        wire = self._wire
        if wire is not None and wire.open and len(wire.asked) < MOST_ASKED and not self.backlog:
            wire.send((op, reply, deadline, timeout))
        else:
            self.backlog.append((op, reply, deadline, timeout))
            if wire is None or wire.lost:
                self._connect()
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        return reply

    async def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        replies = [self.submit(op, timeout) for op in ops]
        outcomes: list[Any] = []
        try:
            for reply in replies:
                try:
                    outcomes.append(await reply)
                except StepFailed as failed:
                    outcomes.append(failed)
        finally:
            for reply in replies[len(outcomes) :]:  # we were cancelled: nobody waits for these
                reply.cancel()
        return outcomes

    def ask(self, wire: Wire, op: Op) -> Reply:
        """Ask for something on that very connection, whatever waits for it."""
        assert self._loop is not None
        reply: Reply = self._loop.create_future()
        deadline = monotonic() + self._timeout
        wire.send((op, reply, deadline, self._timeout))
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        return reply

    def drain(self) -> None:
        """There is room on the wire."""
        backlog, wire = self.backlog, self._wire
        while backlog and wire is not None and wire.open and len(wire.asked) < MOST_ASKED:
            request = backlog.popleft()
            if not request[1].done():
                wire.send(request)

    # Timeouts. Deadlines mostly rise, so one alarm, at the earliest, is set anew once in a while and not per request.

    def _set_alarm(self, when: float) -> None:
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_later(when - monotonic(), self._expire_due)

    def _expire_due(self) -> None:
        self._alarm, self._alarm_at = None, _NEVER
        now, earliest, expired = monotonic(), _NEVER, False
        self.backlog = deque(request for request in self.backlog if not request[1].done())
        wires = [wire for wire in (self._wire, self._ear) if wire is not None]
        for requests, sent in [(self.backlog, False), *((wire.asked, True) for wire in wires)]:
            for _, reply, deadline, timeout in requests:
                if reply.done():
                    continue
                if deadline > now:
                    earliest = min(earliest, deadline)
                else:
                    reply.set_exception(silence(self.address, timeout, None, sent=sent))
                    expired = True
        if earliest < _NEVER:
            self._set_alarm(earliest)
        if expired:
            self._give_up_if_deaf()

    def expire(self, reply: Reply, timeout: float) -> None:
        """Its caller has waited for so long, and will not any more."""
        if not reply.done():
            sent = all(request[1] is not reply for request in self.backlog)
            reply.set_exception(silence(self.address, timeout, None, sent=sent))
            self._give_up_if_deaf()

    def _give_up_if_deaf(self) -> None:
        patience = min(self._deaf_after, self._timeout)
        if self._wire is not None and not self._wire.lost and self._wire.is_deaf(patience):
            self._wire.abort()  # half-open, or hung for so long that a new connection is worth a try

    # Connections.

    def _connect(self) -> asyncio.Task[Exception | None]:
        """See to it that a connection is being made."""
        assert self._loop is not None
        if self._connecting is None:
            self._connecting_since = monotonic()
            self._connecting = self._loop.create_task(self._make_wire())
        return self._connecting

    async def _make_wire(self) -> Exception | None:
        """Make the wire, and send what waits for it; or say why there is none."""
        try:
            try:
                wire = await asyncio.wait_for(self._open(_PUSH), self._timeout)
            finally:
                self._connecting = None
        except Exception as error:  # redis-py, a credential provider, the embedded server: anything
            backlog, self.backlog = self.backlog, deque()
            for _, reply, _, _ in backlog:
                if not reply.done():
                    reply.set_exception(self._failed(error))
            return error
        if self._closed:  # while the last of it was under way, too late to be cancelled
            await wire.close()
            return client_closed(self.address)
        self._wire, self._known = wire, True
        self.drain()
        return None

    def _failed(self, error: Exception) -> StepFailed:
        failed = connect_failure(error, self.address, self._timeout)
        failed.retry = failed.retry and self._known
        return failed

    async def _open(self, push: Any) -> Wire:
        extra = await asyncio.to_thread(self._target.prepare) if self._target.prepare else {}
        connection = self._target.connection(self._timeout, extra)
        try:
            await connection.connect()
            # Between redis-py's handshake and our taking over, the end of the connection is told to nobody of ours.
            if connection._writer.transport.is_closing() or connection._reader.at_eof():
                raise ConnectionResetError("the server closed the connection")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Wire(connection, self, asyncio.get_running_loop(), push)

    def note_loss(self, wire: Wire) -> None:
        """That connection is no more."""
        if self._closed:
            return
        if wire.listening:
            self._interrupted = True
            self.board.armed = False
        if wire.listening or wire.tracking:
            self.board.look_again()
        if self._interrupted and self._rearming is None and self.board.is_needed():
            assert self._loop is not None
            self._rearming = self._loop.create_task(self._rearm())
        if wire is self._wire and self.backlog:
            self._connect()

    def is_up(self) -> bool:
        return self._wire is not None and not self._wire.lost

    def is_deaf(self, patience: float) -> bool:
        """Whether the server has been silent for so long, be it that it was asked or that it was called."""
        if self._wire is not None and not self._wire.lost:
            return self._wire.is_deaf(patience)
        return self._connecting is not None and monotonic() - self._connecting_since >= patience

    def hang_up(self) -> None:
        """Do without the present connection."""
        if self._wire is not None and not self._wire.lost:
            self._wire.abort()

    # Bells.

    async def listen(self, timeout: float) -> bool:
        """See to it that bells are heard; whether the server lets us."""
        if self._closed:
            raise client_closed(self.address)
        if self._is_listening():
            return True
        arming = self._arm()
        await asyncio.wait([arming], timeout=timeout)
        if not arming.done():
            raise silence(self.address, timeout, None, sent=False)
        outcome = client_closed(self.address) if arming.cancelled() else arming.result()
        if isinstance(outcome, Exception):
            raise self._failed(outcome)
        return outcome

    def _is_listening(self) -> bool:
        return any(wire is not None and wire.listening and not wire.lost for wire in (self._wire, self._ear))

    def _arm(self) -> asyncio.Task[bool | Exception]:
        """One task, for however many want to listen: none of them is to take it down when it leaves."""
        assert self._loop is not None
        if self._arming is None:
            self._arming = self._loop.create_task(self._begin_to_listen())
        return self._arming

    async def _begin_to_listen(self) -> bool | Exception:
        """Whether we may listen, or why that is not known."""
        try:
            while (wire := self._wire) is None or wire.lost:
                error = await self._connect()
                if error is not None:
                    return error
            ear = wire
            if not await self._speaks(wire):
                ear = self._ear = await asyncio.wait_for(self._open(list), self._timeout)
            await self.ask(ear, Command(("SUBSCRIBE", self.board.channel)))
        except StepFailed as failed:
            if failed.retry:
                return failed
            if ear is not wire:
                ear.abort()
            self._warn()
            return False
        except Exception as error:
            return error
        finally:
            self._arming = None
        if self._interrupted:
            self._interrupted = False
            self.board.look_again()
        return True

    async def _speaks(self, wire: Wire) -> bool:
        """Whether RESP3 is spoken on it."""
        if self._speaks_resp3:
            try:
                await self.greet(wire)
            except StepFailed as failed:
                if failed.retry:
                    raise
        return self._speaks_resp3

    def greet(self, wire: Wire) -> Reply:
        """Change over to RESP3, once per connection."""
        if wire.greeting is None:
            wire.greeting = self.ask(wire, _HELLO)
            wire.greeting.add_done_callback(self._note_greeting)
        return wire.greeting

    def _note_greeting(self, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if not isinstance(failed, StepFailed):
            self._hellos_lost = 0
            return
        self._hellos_lost += failed.prompt
        if not failed.retry or self._hellos_lost >= _HELLO_LOST:
            self._speaks_resp3 = self.can_track = False

    def note_tracking(self, reply: Reply) -> None:
        failed = None if reply.cancelled() else reply.exception()
        if isinstance(failed, StepFailed) and not failed.retry:
            self.can_track = False

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s does not let this user listen, so those who wait for a lock poll instead. To be woken they need the "
                "permissions +subscribe and &%s:*",
                self.address,
                self.board.channel.rpartition(":")[0],
            )

    async def _rearm(self) -> None:
        """Listen again, as soon as that is possible, for as long as anybody needs it."""
        pause = _FIRST_PAUSE
        try:
            while self.board.is_needed() and not self._is_listening():
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if not isinstance(await self._arm(), Exception):
                    return
        finally:
            self._rearming = None

    # The end of it.

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in that loop from now on. A client outlives event loops (asyncio.run in a loop, a loop per test); its
        connection does not. Which loop it is, its driver must say: to ask costs a system call before Python 3.12."""
        old = self._loop
        for wire in (self._wire, self._ear):
            if wire is not None and not wire.lost and old is not None and not old.is_closed():
                wire.abort()
        self._begin_anew(loop)

    def forget(self) -> None:
        """In a forked child: connection and loop are the parent's."""
        for wire in (self._wire, self._ear):
            if wire is not None:
                if not wire.lost:
                    wire.disinherit()
                self._inherited.append(wire)
        self._begin_anew(None)

    async def close(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        backlog, self.backlog = self.backlog, deque()
        for _, reply, _, _ in backlog:
            if not reply.done():
                reply.set_exception(client_closed(self.address))
        tasks = [task for task in (self._rearming, self._arming, self._connecting) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for wire in (self._wire, self._ear):
            if wire is not None and not wire.lost:
                await wire.close()


class Lifeline(Engine):
    """The keeper's way to the server: the client's one connection while that is well, else one of its own.

    Renewal has no time for a dead connection. Whoever calls waits for its timeout until it gives one up; the keeper
    goes another way after a moment's silence, and comes back once the server is heard on the first again.
    """

    PATIENCE: Final = 0.2  # less than a caller who leaves waits for its clean-up, which is then the keeper's at once
    DEAF_AFTER: Final = 0.3

    def __init__(self, main: Engine) -> None:
        self._main = main
        super().__init__(main._target, main._timeout, main.board, main.now, deaf_after=self.DEAF_AFTER)

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        super()._begin_anew(loop)
        self._apart = False
        self._look: asyncio.TimerHandle | None = None

    def submit(self, op: Op, timeout: float, reply: Reply | None = None) -> Reply:
        main = self._main
        apart = main.is_deaf(self.PATIENCE) or (self.is_up() and not main.is_up())
        if apart != self._apart:
            self._apart = apart
            self.board.look_again()  # what was watched on the one is not on the other
        if not apart:
            return main.submit(op, timeout, reply)
        if self._look is None:
            assert self._loop is not None
            self._look = self._loop.call_later(1.0, self._look_at_main)
        return super().submit(op, timeout, reply)

    def _look_at_main(self) -> None:
        """Once a second, while there are two connections: is either of them superfluous?"""
        self._look = None
        main, wire, others = self._main, self._wire, self._main._wire
        if wire is not None and not wire.lost:
            if main.is_up() and not main.is_deaf(self.PATIENCE):
                if not wire.asked and not self.backlog:
                    self.hang_up()
            elif others is not None and others.is_deaf(1.0) and wire.waiting_since > others.waiting_since + 1.0:
                main.hang_up()  # the server is heard here, and not there: that connection is dead
        if (self.is_up() or self._connecting is not None) and not self._closed:
            assert self._loop is not None
            self._look = self._loop.call_later(1.0, self._look_at_main)

    async def listen(self, timeout: float) -> bool:
        return await self._main.listen(timeout)

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        await super().close()
