"""The asyncio engine: every task's steps, and the server's bells, over one connection.

redis-py opens the connection and introduces us (TLS, AUTH, SELECT); then its transport is given a protocol of ours.
Requests of one loop turn are written together, replies come back in order, and each goes to the future that asked.
A caller that was cancelled, or out of patience, simply leaves: its future is done, its reply is dropped when it
comes, and the connection stays in step for everybody else.

A connection that owes a reply beyond its time is given up, whatever else is heard on it: if one reply is missing, all
that follow go to the wrong requests. What is under way there fails at once, and its callers send it again.

What is on the wire is bounded. Whatever finds no room there, or no wire, waits in a backlog, in order. Its time runs
from when it was asked for, and if it ends there, then nothing was sent.

Bells and tracking need RESP3 (redis_aio_resp3.py). Where it is refused, bells are heard on a second connection, and
nothing is tracked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, Final

import redis.exceptions

from holdfast.engines.redis_aio_resp3 import Resp3
from holdfast.engines.redis_aio_wire import PUSH, Reply, Request, Wire, subscribe_to
from holdfast.engines.target import Target
from holdfast.engines.wire import LATE, Op, client_closed, complain_of_mute, connect_failure, lost_connection, silence
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.effects import StepFailed

__all__ = ["Engine", "Lifeline"]

MOST_ASKED: Final = 1000  # requests on the wire; beyond that the server is no faster, and a lost connection costs more

_FIRST_PATIENCE: Final = 1.0  # seconds for a connection to come about; doubled for the next attempt
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0

_NEVER: Final = float("inf")

log = logging.getLogger("holdfast")


class Engine:
    """Runs steps on one server, for the tasks of one event loop, and hears its bells."""

    def __init__(
        self,
        target: Target,
        timeout: float,
        board: Switchboard,
        now: Callable[[], float],
    ) -> None:
        self.address = target.address
        self.tls = target.tls
        self.board = board
        self.now = now  # the clock by which bells are timed
        self.backlog: deque[Request] = deque()  # asked for while there is no wire, or no room on it
        self._target = target
        self._timeout = timeout
        self.known = False  # whether this server has ever answered
        self.served = False  # whether it has ever answered a step that may write, without an error
        self.closed = False
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
        self.resp3 = Resp3(self)
        self._excused = 0.0
        self.backlog.clear()

    def submit(self, op: Op, timeout: float, reply: Reply | None = None, *, first: bool = False) -> Reply:
        """Ask for one step. The future fails with StepFailed; cancelling it costs nobody else anything.

        ``first``: it goes before whatever waits for room on the wire, as renewals must.
        """
        if reply is None:
            reply = asyncio.Future(loop=self._loop)
        if self.closed:
            reply.set_exception(client_closed(self.address))
            return reply
        now = monotonic()
        deadline = now + timeout
        wire = self._wire
        request = op, reply, deadline, timeout, now
        if wire is not None and wire.open and (first or (len(wire.asked) < MOST_ASKED and not self.backlog)):
            wire.send(request)
        else:
            self.backlog.appendleft(request) if first else self.backlog.append(request)
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
            for reply in replies[len(outcomes) :]:  # we were cancelled: nobody waits for these, or minds their errors
                if not reply.cancel():
                    reply.exception()
        return outcomes

    def ask(self, wire: Wire, op: Op) -> Reply:
        """Ask for something on that very connection, whatever waits for it."""
        reply: Reply = wire.loop.create_future()
        if wire.lost:
            reply.set_exception(lost_connection(self.address, None))
            return reply
        now = monotonic()
        deadline = now + self._timeout
        wire.send((op, reply, deadline, self._timeout, now))
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        return reply

    def drain(self) -> None:
        """There is room on the wire."""
        backlog, wire = self.backlog, self._wire
        while backlog and wire is not None and wire.open and len(wire.asked) < MOST_ASKED:
            request = backlog.popleft()
            if not request[1].done():
                wire.send((*request[:4], monotonic()))

    # Timeouts. Deadlines mostly rise, so one alarm, at the earliest, is set anew once in a while and not per request.

    def _set_alarm(self, when: float) -> None:
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_later(when - monotonic(), self._expire_due)

    # If it goes off late, this process was busy, and the reply may be there, or its request was only just written. Then
    # each request whose time is over gets as much more, once, as the process was late.

    def _expire_due(self) -> None:
        now, earliest = monotonic(), _NEVER
        late = now - self._alarm_at
        self._alarm, self._alarm_at = None, _NEVER
        over = now
        if late > LATE:
            over, self._excused = self._excused, now
            earliest = now + min(late, self._timeout)
        self.backlog = deque(request for request in self.backlog if not request[1].done())
        wires = [wire for wire in (self._wire, self._ear) if wire is not None and not wire.lost]
        for requests, sent in [(self.backlog, False), *((wire.asked, True) for wire in wires)]:
            for _, reply, deadline, timeout, _ in requests:
                if reply.done():
                    continue
                if deadline > now:
                    earliest = min(earliest, deadline)
                elif deadline <= over:
                    reply.set_exception(self._silence(timeout, sent=sent))
        for wire in wires:
            if over < now:
                break
            if (look_at := wire.look_for_overdue(now)) <= now:
                wire.abort(
                    TimeoutError("a reply is overdue")
                )  # what else is under way there fails at once, and is sent again over a new connection
            else:
                earliest = min(earliest, look_at)
        if earliest < _NEVER:
            self._set_alarm(earliest)

    def expire(self, reply: Reply, timeout: float) -> None:
        """Its caller has waited for so long, and will not any more."""
        if not reply.done():
            sent = all(request[1] is not reply for request in self.backlog)
            reply.set_exception(self._silence(timeout, sent=sent))

    def _silence(self, timeout: float, *, sent: bool) -> StepFailed:
        tls = self.tls and not sent and self._connecting is not None
        return silence(self.address, timeout, None, sent=sent, met=self.known, tls=tls)

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
                wire = await self._open_in_time()
            finally:
                self._connecting = None
        except Exception as error:  # redis-py, a credential provider, the embedded server: anything
            backlog, self.backlog = self.backlog, deque()
            self._refuse([request for request in backlog if not request[1].done()], error)
            return error
        if self.closed:  # while the last of it was under way, too late to be cancelled
            await wire.close()
            return client_closed(self.address)
        self._wire = wire
        self.drain()
        if wire.lost and self.backlog:  # in the turn of the loop in which it was made, when it was nobody's yet
            self._connect()
        return None

    async def _open_in_time(self) -> Wire:
        """Open it. An attempt that meets with silence is given up for another, while there is time: what is silent may
        be one connection, and not the server."""
        until = monotonic() + self._timeout
        patience = self._timeout if self._target.prepare else _FIRST_PATIENCE
        while True:
            left = until - monotonic()
            try:
                return await asyncio.wait_for(self._open(PUSH), min(patience, left))
            except TimeoutError:
                if patience >= left:
                    raise
                patience *= 2

    def _refuse(self, requests: list[Request], error: Exception) -> None:
        """There is no connection for these."""
        for _, reply, *_ in requests:
            reply.set_exception(self._failed(error))

    def _failed(self, error: Exception) -> StepFailed:
        if isinstance(error, StepFailed):  # there was a connection
            return error
        failed = connect_failure(error, self.address, self._timeout, tls=self.tls)
        failed.retry = failed.retry and self.known
        return failed

    async def _open(self, push: Any) -> Wire:
        extra = await asyncio.to_thread(self._target.prepare) if self._target.prepare else {}
        connection = self._target.connection(self._timeout, extra)
        try:
            await connection.connect()
            # Between redis-py's handshake and our taking over, neither the end of the connection is told to us nor what
            # the server says before it: most likely that it has too many clients.
            if said := bytes(connection._reader._buffer):
                raise redis.exceptions.ResponseError(said.decode(errors="replace").strip().removeprefix("-"))
            if connection._writer.transport.is_closing() or connection._reader.at_eof():
                raise ConnectionResetError("the server closed the connection")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Wire(connection, self, asyncio.get_running_loop(), push)

    def open_wire(self) -> Coroutine[Any, Any, Wire]:
        """Another connection, for somebody to have for itself."""
        return self._open(None)

    def note_loss(self, wire: Wire) -> None:
        """That connection is no more."""
        if self.closed or wire.loop is not self._loop:
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

    def owes(self) -> bool:
        """Whether a request was not answered in its time: until all are, the connection takes no other."""
        return self.is_up() and self._wire is not None and self._wire.owing_since < _NEVER

    def hang_up(self) -> None:
        """Do without the present connection."""
        if self._wire is not None and not self._wire.lost:
            self._wire.abort()

    # Bells.

    async def listen(self, timeout: float) -> bool:
        """See to it that bells are heard; whether the server lets us."""
        if self.closed:
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
            if await self.resp3.is_spoken(wire):
                await self._subscribe(wire)
            else:
                await self._listen_apart()
        except StepFailed as failed:
            if failed.retry:
                return failed
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

    async def _listen_apart(self) -> None:
        """Listen on a connection that does nothing else, as RESP2 will have it."""
        ear = self._ear = await asyncio.wait_for(self._open(list), self._timeout)
        try:
            await self._subscribe(ear)
        finally:
            if not ear.listening:
                ear.abort()

    async def _subscribe(self, wire: Wire) -> None:
        if await self.ask(wire, subscribe_to(self.board.channel)) is not True:
            wire.abort()  # it was answered by something else than its confirmation: out of step
            raise lost_connection(self.address, None, met=self.known)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            complain_of_mute(self.address, self.board.channel)

    async def _rearm(self) -> None:
        """Listen again, as soon as that is possible, for as long as anybody needs it."""
        pause = _FIRST_PAUSE
        try:
            while self.board.is_needed() and not self._is_listening():
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if await self._arm() is False:
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
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        backlog, self.backlog = self.backlog, deque()
        for _, reply, *_ in backlog:
            if not reply.done():
                reply.set_exception(client_closed(self.address))
        tasks = [task for task in (self._rearming, self._arming, self._connecting) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.resp3.close()
        for wire in (self._wire, self._ear):
            if wire is not None and not wire.lost:
                await wire.close()


class Lifeline(Engine):
    """The keeper's way to the server: the client's one connection while that is well, else one of its own.

    Renewal has no time for a dead connection. Whoever calls waits for its timeout until it gives one up; the keeper
    goes another way after a moment's silence, or once a request was not answered in its time, and comes back once the
    server is heard on the first again. If no other connection is to be had, as on a server that has too many clients,
    the first must do.
    """

    PATIENCE: Final = 0.2  # less than a caller who leaves waits for its clean-up, which is then the keeper's at once

    def __init__(self, main: Engine) -> None:
        self._main = main
        super().__init__(main._target, main._timeout, main.board, main.now)

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        super()._begin_anew(loop)
        self.resp3 = self._main.resp3
        self._apart = False
        self._refused_until = 0.0  # no connection of its own is tried before
        self._look: asyncio.TimerHandle | None = None

    def submit(self, op: Op, timeout: float, reply: Reply | None = None, *, first: bool = False) -> Reply:
        main = self._main
        apart = main.is_deaf(self.PATIENCE) or main.owes() or (self.is_up() and not main.is_up())
        if apart and main.is_up() and not self.is_up() and monotonic() < self._refused_until:
            apart = False
        if apart != self._apart:
            self._apart = apart
            self.board.look_again()  # what was watched on the one is not on the other
        if not apart:
            return main.submit(op, timeout, reply, first=True)
        if self._look is None:
            assert self._loop is not None
            self._look = self._loop.call_later(1.0, self._look_at_main)
        return super().submit(op, timeout, reply)

    def _refuse(self, requests: list[Request], error: Exception) -> None:
        if not self._main.is_up():
            super()._refuse(requests, error)
            return
        self._refused_until, self._apart = monotonic() + 1.0, False
        for op, reply, deadline, *_ in requests:
            assert op is not None
            self._main.submit(op, max(0.0, deadline - monotonic()), reply)

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
        if (self.is_up() or self._connecting is not None) and not self.closed:
            assert self._loop is not None
            self._look = self._loop.call_later(1.0, self._look_at_main)

    async def listen(self, timeout: float) -> bool:
        return await self._main.listen(timeout)

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        await super().close()
