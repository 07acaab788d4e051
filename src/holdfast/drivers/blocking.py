"""Runs protocols with threads.

``run`` is the whole driver: it performs one effect after the other in the calling thread. The keeper is the same loop
in a daemon thread. Its steps go over the wire, like those that watch a key, because the server tells a connection of
what others write, and not of what it writes itself.
"""

from __future__ import annotations

import _thread
import logging
import queue
import sys
import threading
import time
from secrets import token_hex
from typing import Any, TypeVar

from holdfast.drivers import clock, forks
from holdfast.drivers.traces import cut_short
from holdfast.engines import greenlets
from holdfast.engines.redis import Engine
from holdfast.engines.redis_wire import Wire
from holdfast.engines.target import Target
from holdfast.errors import HoldfastError
from holdfast.lease import Hold
from holdfast.protocol import effects as fx
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.cohort import Cohorts
from holdfast.protocol.keepalive import Book, keep

__all__ = ["Bell", "Driver", "Owner"]

T = TypeVar("T")
log = logging.getLogger("holdfast")

# Waiters' steps under way at once: each needs a connection, and a turn of the interpreter (benchmarks.crowd).
_MOST_ASKS = 32
_SPREAD = 0.3  # seconds: tasks of an event loop give up one after the other anyway, threads all at once
_COMPLAINS_EVERY = 60.0  # seconds
_MOST_NAMED = 5  # locks in one line of the log


class Owner:
    """A thread, as the owner of what it acquires. (Its number is given to another thread after it has ended.)"""

    __slots__ = ("__weakref__",)


class Bell:
    """A lock that is held as long as the bell has not rung.

    Ringing is one operation, so it may be done from any thread and from a signal handler that strikes the very thread
    that waits. threading.Event is neither that (it has a lock of its own) nor quick.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = _thread.allocate_lock()
        self._silent.acquire()

    def ring(self) -> None:
        if self._silent.locked():  # else it has rung already, and nobody has heard it yet
            try:
                self._silent.release()
            except RuntimeError:
                pass  # likewise, since just now

    # A thread takes its time to wake up, and its core too. Meanwhile we can do what is left to do before it may go on.
    stir = ring

    def clear(self) -> None:
        self._silent.acquire(blocking=False)

    def wait(self, seconds: float) -> None:
        """For one caller at a time. A ring is heard once."""
        if seconds > threading.TIMEOUT_MAX:
            self._silent.acquire()  # a timer that never goes off would have to be set all the same
        elif seconds > 0:
            self._silent.acquire(timeout=seconds)
        else:
            self._silent.acquire(blocking=False)


class Driver:
    """Runs protocols for one client: its engine, its wire, its keeper and its book."""

    speaks = "redis"

    def __init__(self, target: Target, *, namespace: str = "") -> None:
        self.address = target.address
        self.engine = Engine(target)
        self.book = Book(Bell())
        self.board = Switchboard(self.book, Bell, _MOST_ASKS)
        self.book.crowd.spread_over = _SPREAD
        self.cohorts = Cohorts(Bell)
        self.engine.spare = self.wire = Wire(target, self.board, clock.now, self.engine)
        self.now = clock.now
        self.life = 0  # counts forks
        self._namespace = namespace
        self._keeper: threading.Thread | None = None
        self._teller: threading.Thread | None = None
        self._news: queue.SimpleQueue[Hold | None] = queue.SimpleQueue()  # of losses, to be told
        self._starting = threading.Lock()
        self._marks: list[greenlets.Mark] = []
        self._complain_at = 0.0  # when to say again that leases are not renewed
        self._here = threading.local()  # made here, since gevent may have replaced it after our import
        self._name_channel()
        forks.watch(self)

    def _name_channel(self) -> None:
        self.board.channel = f"{self._namespace}holdfast:bell:{token_hex(8)}"

    def caller(self) -> Owner:
        """The calling thread; under gevent, the calling greenlet."""
        try:
            owner: Owner = self._here.owner
        except AttributeError:
            owner = self._here.owner = Owner()
        return owner

    def run(self, protocol: fx.Effects[T], engine: Engine | Wire | None = None) -> T:
        try:
            return self._drive(protocol, engine, protocol.send, None)
        except BaseException as error:
            # Ctrl-C between two effects can hit the driver itself; the protocol must still have its clean-up.
            if fx.is_over(protocol):
                if isinstance(error, HoldfastError):
                    cut_short(error)
                raise
            if not fx.is_begun(protocol):
                protocol.send(None)  # what has not begun cannot clean up: let it come to its first effect
            return self._drive(protocol, engine, protocol.throw, error)

    def _drive(self, protocol: fx.Effects[T], engine: Engine | Wire | None, advance: Any, value: Any) -> T:
        call = (engine or self.engine).call
        interrupt: BaseException | None = None
        send, now = protocol.send, clock.now
        if isinstance(value, BaseException):
            interrupt, value = value, fx.Interrupted()
        try:
            while True:
                try:
                    while True:
                        effect = advance(value)
                        advance = send
                        kind = type(effect)
                        if kind is fx.Now:
                            value = time.time() if effect.wall else now()
                        elif kind is fx.Call:
                            step = effect.step
                            if type(step) is fx.Step and step.watch:
                                value = self.wire.call(step, effect.timeout)
                            else:
                                value = call(step, effect.timeout)
                        elif kind is fx.Caller:
                            value = self.caller()
                        elif kind is fx.NewToken:
                            value = clock.new_token(effect.label)
                        elif kind is fx.Wait:
                            if self._keeper is None and (self.book.holds or self.book.chores):
                                self.keep()  # an earlier attempt to start it has failed
                            value = _wait(effect.bell, effect.until)
                        elif kind is fx.Attach:
                            value = self.caller(), None  # a thread cannot be cancelled; its body has lost and check()
                        else:
                            value = self._perform(effect, engine)
                except StopIteration as done:
                    if interrupt is not None:
                        raise interrupt from None
                    result: T = done.value
                    return result
                except BaseException as error:
                    if fx.is_over(protocol):  # that was its own last word
                        if error.__suppress_context__:
                            error.__context__ = None  # a StepFailed, which knows this very error
                        raise interrupt or error from (error.__cause__ if interrupt is None else None)
                    advance, value = protocol.throw, error
                    if not isinstance(error, Exception):  # Ctrl-C, or whatever a signal handler raises, here or there
                        interrupt, value = error, fx.Interrupted()
        finally:
            value = interrupt = None  # an error keeps alive the frames that it went through, and this is one of them

    def _perform(self, effect: fx.Effect, engine: Engine | Wire | None) -> Any:
        if isinstance(effect, fx.CallEach):
            return (engine or self.engine).call_each(effect.steps, effect.timeout)
        if isinstance(effect, fx.Listen):
            return self.wire.listen(effect.timeout)
        if isinstance(effect, fx.Entrust):
            self.book.entrust(effect.hold, clock.now())
            return self.keep()
        if isinstance(effect, fx.Attend):
            self.book.attend(effect.hold, clock.now())
            return self.keep()
        if isinstance(effect, fx.CallOn):
            return self.engine.call_on(effect.link, effect.commands, effect.timeout)
        if isinstance(effect, fx.OpenLink):
            return self.engine.open_link(effect.timeout)
        if isinstance(effect, fx.CloseLink):
            return self.engine.close_link(effect.link)
        if isinstance(effect, fx.Warn):
            return log.warning("%s", effect.message)
        assert isinstance(effect, fx.Tell)
        return self._tell(effect.hold)

    def admit(self, hold: Hold) -> None:
        """A hold begins: the keeper looks after it from now on."""
        self.book.enter(hold)
        if self._keeper is None:
            self.keep()

    def keep(self) -> None:
        """See to it that the keeper runs."""
        if self._keeper is not None:
            return
        try:
            with self._starting:
                if self._keeper is None and not self.book.closed:
                    keeper = threading.Thread(target=self._keep, name="holdfast-keeper", daemon=True)
                    keeper.start()
                    self._keeper = keeper
                    self.wire.start()  # the keeper will need it soon; count it among our threads from now on
        except RuntimeError as error:
            if not _is_exiting(error):  # else the lease ends, too, by its ttl
                self._complain(error)

    def _complain(self, error: RuntimeError) -> None:
        """Log that leases are not renewed; once a minute, for every acquire and every wait tries again."""
        if (now := clock.now()) < self._complain_at:
            return
        self._complain_at = now + _COMPLAINS_EVERY
        names = [repr(hold.name) for hold in list(self.book.holds)[:_MOST_NAMED]]
        log.error(
            "leases of %s are not renewed and end with their ttl (%s), because no thread can be started: %s. Let other "
            "threads end, or raise the limit (ulimit -u, or that of the container); the next acquire tries again",
            self.engine.address,
            ", ".join(names) or "none is held now",
            error,
        )

    def _keep(self) -> None:
        self._marks += greenlets.mark()
        while not self.book.closed:
            try:
                self.run(keep(self.book), self.wire)
            except Exception:
                log.exception("the keeper of %s stumbled and starts again", self.engine.address)
                time.sleep(1.0)

    def _tell(self, hold: Hold) -> None:
        """Call on_lost, in a thread for that: what it does must not hold up the renewal of other leases."""
        if hold.notify is None:
            return
        try:
            with self._starting:
                if self._teller is None:
                    teller = threading.Thread(target=self._tell_all, name="holdfast-on-lost", daemon=True)
                    teller.start()
                    self._teller = teller
        except RuntimeError as error:
            if not _is_exiting(error):  # else on_lost can run nowhere
                log.error(
                    "on_lost of the lock %r runs in the thread that found the loss, because no other can be started: "
                    "%s. Renewals may have to wait for it",
                    hold.name,
                    error,
                )
                _call_on_lost(hold)
            return
        self._news.put(hold)

    def _tell_all(self) -> None:
        self._marks += greenlets.mark()
        while (hold := self._news.get()) is not None:
            _call_on_lost(hold)
            del hold  # which may be the last to know of its lease

    def close(self, timeout: float) -> None:
        """Tell the holders that their leases are lost, give these back, and let go of connections and threads."""
        until = clock.now() + timeout
        try:
            lost = self.run(lose_all(self.book))
            self._news.put(None)  # the thread that calls on_lost ends after the last of them
            for thread in (self._teller, self._keeper):
                if thread is not None and thread is not threading.current_thread():
                    thread.join(max(0.0, until - clock.now()))
            self.run(give_back(lost, self.book, self.cohorts, until))
        finally:
            for hold in list(self.book.holds.values()):
                self.cohorts.leave(hold)
            self.engine.close()
            self.wire.close()
            self.board.look_again()  # wake all waiters, so that they see that the client is closed

    def forget(self) -> None:
        """In a forked child: threads are gone, and sockets, locks and leases are the parent's."""
        self.life += 1
        while self._marks:
            self._marks.pop().end()
        self.engine.forget()
        self.wire.forget()
        self.book.disown("this process was forked from the holder; the hold stayed with the parent")
        self.book.bell = Bell()
        self.board.forget()
        self.cohorts.forget()
        self._name_channel()
        self._keeper = self._teller = None
        self._news = queue.SimpleQueue()
        self._starting = threading.Lock()


def _is_exiting(error: RuntimeError) -> bool:
    """Whether a thread could not be started because the interpreter is exiting, and not because there are too many."""
    return sys.is_finalizing() or "shutdown" in str(error)


def _call_on_lost(hold: Hold) -> None:
    try:
        if hold.notify is not None:
            hold.notify()
    except Exception:
        log.exception("on_lost of the lock %r failed", hold.name)


def _wait(bell: fx.Bell | None, until: float) -> float:
    left = until - clock.now()
    if isinstance(bell, Bell):
        bell.wait(left)
    elif left > 0:
        time.sleep(min(left, threading.TIMEOUT_MAX))
    return clock.now()
