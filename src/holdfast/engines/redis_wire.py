"""The wire: one connection that the threads of a client share, for its keeper, for watched keys and for bells.

Theory of operation. A thread of ours owns the connection: it alone opens, writes, reads and closes it, and waits in
poll() when there is nothing to do. Whoever wants something puts a request into a queue, wakes that thread, and waits
for the answer as long as its own patience lasts. So there is no moment at which Ctrl-C in a calling thread could leave
the wire half written, no TLS session in two hands, and a caller who leaves costs nobody anything: replies come in
order, each goes to the request that asked, and one that nobody waits for is dropped.

A request whose caller has left without a reply decides whether the connection is still of use, and not the last byte
that was heard: if one reply is missing, all that follow would go to the wrong requests. So the connection is given up
when the oldest such request is overdue, whatever else is heard, and what is under way there fails at once and is sent
again over a new one.

Pushes share the connection, which is what RESP3 is for: bells (pub/sub), and word that somebody else wrote a key that a
step has read with ``watch`` (client tracking, told apart by OPTIN, and silent about what the wire itself writes by
NOLOOP). A server or proxy that does not speak RESP3 gets a second connection that only listens, and nothing is tracked.
Only an answer says that. If a connection was cut during HELLO, RESP3 is tried again later, beside the one that is used.

It is opened on first use: a client that never waits, and never holds for long, does without.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis.exceptions

from holdfast.engines import greenlets
from holdfast.engines.redis_link import PENDING, Asked, Link, Request, Waker
from holdfast.engines.target import Target
from holdfast.engines.wire import (
    Op,
    client_closed,
    complain_of_mute,
    complain_of_no_resp3,
    connect_failure,
    is_elsewhere,
    is_noscript,
    lost_connection,
    note_resp3_is_back,
    pack,
    refusal,
    silence,
)
from holdfast.protocol.effects import Command, Step, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis import Engine
    from holdfast.protocol.bells import Switchboard

__all__ = ["Wire"]

log = logging.getLogger("holdfast")

_FIRST_PATIENCE, _LONGEST_PATIENCE = 1.0, 5.0  # for a connection to come about; doubled when it was not enough
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # between attempts
_FIRST_PROBE, _RAREST_PROBE = 0.5, 4.0  # seconds between attempts at HELLO, after it was cut; doubled each time
_PROBE_PATIENCE = 0.5

_NEVER: Final = float("inf")

_SWALLOWED: Final[Asked] = None, 0
_TRACKING: Final[Asked] = None, 1  # whether it was refused matters

_TRACK: Final = pack(Command(("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")))
_CACHE: Final = pack(Command(("CLIENT", "CACHING", "YES")))


class Wire:
    """Runs steps on one server, and listens to it. Any thread may call what has no underscore."""

    def __init__(self, target: Target, board: Switchboard, now: Callable[[], float], spare: Engine) -> None:
        self.address = target.address
        self._target = target
        self._board = board
        self.spare = spare  # for steps, while there is no connection
        self._now = now  # the clock of the board, which is not that of our timeouts
        self._closed = False
        self._complained = False
        self._told = False  # that waiters poll for now; until the next subscription
        self._speaks_resp3 = True
        self._tracks = True
        self._begin()

    def _begin(self) -> None:
        self._queue: deque[Request] = deque()
        self._seat: dict[None, threading.Thread] = {}  # whoever gets this seat is the thread; there is one
        self._waker: Waker | None = None
        self._asleep = False
        self._doubt = False  # a caller may have left without a reply
        # What follows is the thread's own.
        self._opening: Any = None  # a connection that is no link yet, but has a socket
        self._links: dict[int, Link] = {}  # by descriptor: the line, the ear, or the one that is both under RESP3
        self._line: Link | None = None
        self._ear: Link | None = None
        self._poll: Any = None
        self._marks: list[greenlets.Mark] = []
        self._patience = _FIRST_PATIENCE
        self._not_before = 0.0  # for the next attempt to connect
        self._rearm_at = _NEVER
        self._rearm_pause = _FIRST_PAUSE
        self._rearming: Request | None = None
        self._probe_at = _NEVER  # when to try RESP3 again, after a connection was cut during HELLO
        self._probe_pause = _FIRST_PROBE
        self._untracked = False  # the log says that RESP3 and tracking are off
        self._missed = False  # whether a bell may have been, since the listener was lost

    # For callers

    def start(self) -> None:
        """Start the thread, unless it runs. It does nothing until something is asked."""
        if not self._seat:
            # Should an interrupt strike here, there may be two threads or none, but only one gets the seat, and the
            # next caller sees an empty one.
            threading.Thread(target=self._run, name="holdfast-bells", daemon=True).start()

    def call(self, op: Op, timeout: float) -> Any:
        reply = self.call_each((op,), timeout)[0]
        if isinstance(reply, StepFailed):
            raise reply
        return reply

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each, or its StepFailed."""
        if not ops:
            return []
        if self.is_up() or not self.spare.has_resting():
            return self._ask(Request(ops, timeout), timeout)
        # No connection yet. If none can be made (a server at maxclients), one that is there will do, untracked.
        until = time.monotonic() + timeout
        replies = self._ask(Request(ops, timeout / 2), timeout / 2)
        unsent = all(isinstance(reply, StepFailed) and not reply.sent for reply in replies)
        left = until - time.monotonic()
        return self.spare.call_each(ops, left) if unsent and left > 0 and not self._closed else replies

    def is_up(self) -> bool:
        """Whether there is a connection that takes requests."""
        link = self._line
        return link is not None and link.owing_since == _NEVER

    def listen(self, timeout: float) -> bool:
        """Hear bells from now on; False if the server does not allow that."""
        if self._board.armed:
            return True
        reply = self._ask(self._subscription(timeout), timeout)[0]
        if isinstance(reply, StepFailed):
            if reply.retry and not (reply.silent or reply.prompt or self._told):  # the server has refused it for now
                self._told = True
                log.warning("waiters poll until notifications can be subscribed to: %s", reply.error)
            raise reply
        self._told = False
        return bool(reply)

    def _subscription(self, timeout: float) -> Request:
        return Request((Command(("SUBSCRIBE", self._board.channel)),), timeout, listens=True)

    def _ask(self, request: Request, timeout: float) -> list[Any]:
        unsent = False
        try:
            self._submit(request)
            request.wait(timeout)
        except StepFailed as failed:
            return [failed] * len(request.ops)
        finally:
            request.left = True
            unsent = request.claim()
        replies = list(request.replies)
        if not unsent and any(reply is PENDING for reply in replies):
            self._doubt = True
            self._wake()
        return [
            self._judge(reply, op, timeout, sent=not unsent) for reply, op in zip(replies, request.ops, strict=True)
        ]

    def _judge(self, reply: Any, op: Op, timeout: float, *, sent: bool) -> Any:
        if reply is PENDING:
            return silence(self.address, timeout, None, sent=sent)
        return refusal(reply, self.address, op) if isinstance(reply, hiredis.ReplyError) else reply

    def _submit(self, request: Request) -> None:
        if self._closed:
            raise client_closed(self.address)
        self._queue.append(request)
        try:
            self.start()
        except RuntimeError as error:  # the interpreter is on its way out, or there are too many
            with suppress(ValueError, IndexError):  # another caller has started it just now, and it takes what is there
                self._queue.remove(request)
            raise connect_failure(error, self.address, 0.0) from error
        self._wake()
        if self._closed and request.claim():  # the thread may have ended before it could see this one
            raise client_closed(self.address)

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None and self._asleep:
            waker.wake()

    def close(self) -> None:
        self._closed = True
        self._refuse_all(lambda: client_closed(self.address))
        if (waker := self._waker) is not None:
            waker.wake()
        thread = self._seat.get(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)  # longer only if it is just connecting, and then it ends by itself

    def forget(self) -> None:
        """In a forked child: thread and sockets are the parent's."""
        for mark in self._marks:
            mark.end()
        for link in self._links.values():
            link.forget()
        sock = getattr(self._opening, "_sock", None)
        if sock is not None:
            sock.close()
        if self._waker is not None:
            self._waker.close()
        self._board.armed = False
        self._begin()

    def _refuse_all(self, why: Callable[[], StepFailed]) -> None:
        """Refuse what is in the queue by now, and not what comes while this is done."""
        for _ in range(len(self._queue)):
            try:
                request = self._queue.popleft()
            except IndexError:
                return
            if request.claim():
                request.fail(why)

    # For the thread

    def _run(self) -> None:
        try:
            waker = Waker()
        except OSError as error:  # too many open files
            self._refuse_all(partial(connect_failure, error, self.address, 0.0))
            return
        if self._seat.setdefault(None, threading.current_thread()) is not threading.current_thread():
            return
        self._marks = greenlets.mark()
        self._poll = select.poll()  # here, because gevent's belongs to the thread that makes it
        self._poll.register(waker, select.POLLIN)
        self._waker = waker
        while not self._closed:
            try:
                if self._doubt:
                    self._give_up_overdue()  # before any other request is sent that way
                self._send_all()
                self._regain_resp3()
                self._rearm()
                self._wait()
            except Exception as error:
                log.exception("the listener of %s stumbled and starts again", self.address)
                for link in list(self._links.values()):
                    self._lose(link, error)
                time.sleep(_FIRST_PAUSE)
        for link in list(self._links.values()):
            self._lose(link, None)
        self._refuse_all(lambda: client_closed(self.address))
        self._waker = None

    def _send_all(self) -> None:
        """Send what is in the queue, over a connection that is made if there is none."""
        while self._queue and not self._closed:
            try:
                request = self._queue[0]  # it stays there meanwhile, so that close() finds it
                link = self._ear if request.listens else self._line
                if link is None:
                    if time.monotonic() < self._not_before:
                        return
                    self._connect(listens=request.listens)
                elif link.owing_since != _NEVER:
                    return  # until all is answered there, which shows that none was taken for another, or it is lost
                elif self._queue.popleft() is request and time.monotonic() < request.until and request.claim():
                    self._send(link, request)
            except IndexError:
                return  # close() was quicker

    def _send(self, link: Link, request: Request) -> None:
        if request.listens and self._board.armed:
            request.answer(0, True)
            return
        request.sent_at = time.monotonic()
        for place, data in enumerate(request.data):
            self._write(link, request, place, data)

    def _write(self, link: Link, request: Request, place: int, data: bytes) -> None:
        op = request.ops[place]
        if isinstance(op, Step) and op.watch and link.resp3 and self._tracks:
            if not link.tracking:
                link.tracking = True
                link.write(_TRACK, _TRACKING)
            link.write(_CACHE + data, _SWALLOWED, (request, place))
        else:
            link.write(data, (request, place))

    def _connect(self, *, listens: bool) -> None:
        """Make a connection. If none comes about, whoever wanted it knows, or may hope for the next attempt."""
        self._drop_expired()
        if not self._queue:
            return
        patience = self._patience
        self._not_before = time.monotonic() + _FIRST_PAUSE
        try:
            link = self._open_any(patience, listens=listens)
        except (TimeoutError, redis.exceptions.TimeoutError):
            self._patience = min(2 * patience, _LONGEST_PATIENCE)  # those who have more than that stay in the queue
            return
        except Exception as error:  # redis-py, a credential provider, a custom connect function: anything
            self._refuse_all(partial(connect_failure, error, self.address, patience, tls=self._target.tls))
            return
        self._patience = _FIRST_PATIENCE
        self._not_before = 0.0
        self._install(link, listens=listens)

    def _install(self, link: Link, *, listens: bool) -> None:
        if link.is_ear and self._ear is None:
            self._ear = link
        if self._line is None and (link.resp3 or not listens):
            self._line = link
        self._links[link.sock.fileno()] = link
        self._poll.register(link.sock, link.events)
        self._opening = None
        if link.resp3:
            self._probe_at, self._probe_pause = _NEVER, _FIRST_PROBE
            if self._untracked:
                self._untracked = False
                note_resp3_is_back(self.address)

    def _drop_expired(self) -> None:
        for _ in range(len(self._queue)):
            request = self._queue.popleft()
            if time.monotonic() < request.until and not request.left:
                self._queue.append(request)

    def _open_any(self, patience: float, *, listens: bool) -> Link:
        if self._speaks_resp3:
            try:
                return self._open(patience, resp3=True, is_ear=True)
            except (redis.exceptions.ResponseError, redis.exceptions.ConnectionError) as refused:
                if isinstance(refused.__context__, OSError) or refusal(refused, self.address).retry:
                    raise  # no connection at all, or none for the moment
                # HELLO was refused, or answered by hanging up. If it was something else, we shall hear it again.
                link = self._open(patience, resp3=False, is_ear=listens)
                self._speaks_resp3 = not isinstance(refused, redis.exceptions.ResponseError)
                if self._speaks_resp3:
                    self._probe_at = time.monotonic() + self._probe_pause
                return link
        return self._open(patience, resp3=False, is_ear=listens)

    def _open(self, patience: float, *, resp3: bool, is_ear: bool) -> Link:
        extra = self._target.prepare() if self._target.prepare else {}
        self._opening = self._target.connection(patience, {**extra, "protocol": 3} if resp3 else extra)
        try:
            self._opening.connect()
        except BaseException:
            self._opening.disconnect()  # redis-py does so only for errors of its own
            raise
        return Link(self._opening, resp3=resp3, is_ear=is_ear)

    def _regain_resp3(self) -> None:
        """Try HELLO on another connection, if it was cut before. If it is answered, that connection takes over."""
        if time.monotonic() < self._probe_at or any(link.asked for link in self._links.values()):
            return
        if self._line is None:
            self._probe_at = _NEVER  # the next connection is asked for RESP3 anyway
            return
        needed = self._board.is_needed()
        self._probe_pause = min(2 * self._probe_pause, _RAREST_PROBE)
        self._probe_at = time.monotonic() + (self._probe_pause if needed else _RAREST_PROBE)
        if not needed:
            return
        try:
            link = self._open(_PROBE_PATIENCE, resp3=True, is_ear=True)
        except Exception as error:  # redis-py, a credential provider, a custom connect function: anything
            if isinstance(error, redis.exceptions.ResponseError) and not refusal(error, self.address).retry:
                self._speaks_resp3, self._probe_at = False, _NEVER
            elif not self._untracked:
                self._untracked = True
                complain_of_no_resp3(f"connections to {self.address} were cut during HELLO")
            return
        for old in list(self._links.values()):
            self._lose(old, None)
        self._install(link, listens=True)
        self._board.look_again()  # which has everything watched again

    def _rearm(self) -> None:
        """A lost listener comes back by itself as long as anybody would miss it, else when it is asked for."""
        if self._rearm_at == _NEVER or self._board.armed or time.monotonic() < self._rearm_at:
            return
        if not self._board.is_needed():
            self._rearm_at = _NEVER
            return
        if self._rearming is not None and self._rearming.replies[0] is PENDING:
            self._rearming.left = self._doubt = True
        self._rearming = attempt = self._subscription(_LONGEST_PAUSE)
        self._queue.append(attempt)
        self._send_all()
        self._rearm_at = attempt.until if attempt.replies[0] is PENDING else time.monotonic() + self._rearm_pause
        self._rearm_pause = min(2 * self._rearm_pause, _LONGEST_PAUSE)

    def _wait(self) -> None:
        """Read what comes, until there is something else to do."""
        for link in list(self._links.values()):
            self._guarded(link, self._push_out)
        self._asleep = True
        # Whoever puts something into the queue from here on, or has a doubt, sees that we sleep, or is seen by us.
        wakes_at = self._rearm_at
        if not any(link.asked for link in self._links.values()):
            wakes_at = min(wakes_at, self._probe_at)
        if self._doubt:
            wakes_at = min(wakes_at, self._give_up_overdue())
        if self._queue and all(link.owing_since == _NEVER for link in self._links.values()):
            wakes_at = min(wakes_at, self._not_before)
        ready = self._poll.poll(None if wakes_at == _NEVER else max(0.0, wakes_at - time.monotonic()) * 1000)
        self._asleep = False
        for descriptor, _ in ready:
            ready_link = self._links.get(descriptor)
            if ready_link is not None:
                self._guarded(ready_link, self._take_in)
            elif self._waker is not None and descriptor == self._waker.fileno():
                self._waker.calm()

    def _guarded(self, link: Link, work: Callable[[Link], None]) -> None:
        try:
            work(link)
        except (OSError, hiredis.HiredisError) as error:
            self._lose(link, error)

    def _push_out(self, link: Link) -> None:
        if link.out:
            link.flush()
        events = select.POLLIN | select.POLLOUT if link.writing_waits or link.reading_waits else select.POLLIN
        if events != link.events:
            link.events = events
            self._poll.modify(link.sock, events)

    def _give_up_overdue(self) -> float:
        """Lose each connection on which a reply is overdue; when to look again."""
        self._doubt = False  # before looking: a caller that leaves meanwhile sets it again
        now, look_at = time.monotonic(), _NEVER
        for link in list(self._links.values()):
            if (due := link.look_for_overdue(now)) <= now:
                self._lose(link, TimeoutError("a reply is overdue"))
            else:
                look_at = min(look_at, due)
        self._doubt = self._doubt or look_at < _NEVER
        return look_at

    def _take_in(self, link: Link) -> None:
        now = self._now()
        for reply in link.read():
            if link.is_push(reply):
                self._hear(link, reply, now)
            elif link.asked:
                self._hand_over(link, *link.asked.popleft(), reply)
            elif isinstance(reply, hiredis.ReplyError):
                raise reply  # why it is about to close the connection
            else:
                raise hiredis.ProtocolError("a reply to nothing")
        if not link.asked:
            link.owing_since = _NEVER

    def _hand_over(self, link: Link, request: Request | None, place: int, reply: Any) -> None:
        if request is None:
            if place == _TRACKING[1] and isinstance(reply, hiredis.ReplyError):
                self._tracks = False
        elif is_noscript(reply) and not request.left and place not in request.resent:
            request.resent.add(place)
            self._write(link, request, place, pack(request.ops[place], with_source=True))
        elif request.listens and isinstance(reply, hiredis.ReplyError) and not refusal(reply, self.address).retry:
            self._rearm_at = _NEVER
            self._complain()
            request.answer(place, False)
        elif request.listens and not isinstance(reply, hiredis.ReplyError):
            link.asked.appendleft((request, place))
            raise hiredis.ProtocolError("a subscription is confirmed by a push, and by nothing else")
        else:
            request.answer(place, reply)
            if is_elsewhere(reply):
                self._lose(link, None)

    def _hear(self, link: Link, push: list[Any], now: float) -> None:
        try:
            kind, about = push[0], push[1]
            if kind == b"message":
                self._board.deliver(push[2], now)
            elif kind == b"invalidate":
                if about is None:
                    self._board.look_again()  # the whole keyspace was flushed
                for key in about or ():
                    self._board.touched(key.decode(errors="replace"))
            elif kind == b"subscribe":
                self._note_subscription(link, about)
        except (IndexError, TypeError, AttributeError) as error:
            raise hiredis.ProtocolError("a push that is none of Redis") from error

    def _note_subscription(self, link: Link, channel: bytes) -> None:
        """It is the answer to a SUBSCRIBE of ours, and to nothing else that is under way."""
        request, place = link.asked[0] if link.asked else (None, 0)
        if request is None or not request.listens or channel != self._board.channel.encode():
            raise hiredis.ProtocolError("a confirmation of a subscription that was not asked for")
        link.asked.popleft()
        self._board.armed = True
        self._rearm_at, self._rearm_pause = _NEVER, _FIRST_PAUSE
        request.answer(place, True)
        if self._missed:
            self._missed = False
            self._board.look_again()

    def _lose(self, link: Link, error: Exception | None) -> None:
        """The connection is of no more use."""
        if self._links.pop(link.sock.fileno(), None) is None:
            return  # that is known
        self._poll.unregister(link.sock)
        link.close()
        was_armed = link is self._ear and self._board.armed
        if link is self._line:
            self._line = None
        if link is self._ear:
            self._ear = None
            self._board.armed = False
        for request, place in link.asked:
            if request is not None:
                request.answer(place, lost_connection(self.address, error, tls=self._target.tls))
        link.asked.clear()
        if was_armed:
            self._missed = True
            self._rearm_at = time.monotonic() + _FIRST_PAUSE
        if (was_armed or link.tracking) and not self._closed:
            self._board.look_again()

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            complain_of_mute(self.address, self._board.channel)
