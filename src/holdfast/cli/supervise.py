"""``holdfast run NAME... -- COMMAND``: a command that runs while it holds a lock, and not a moment longer.

Theory of operation. The main thread sits in one loop until the command ends. It wakes for signals, which it passes
on; for news of the command; for the loss of a lease; and at least every second, because a sleeping thread does not
notice that its machine was suspended. Each time round it compares what is left of the lease with two margins:

    remaining < a third of the ttl (at most 10 s)    renewal has been failing for a while: SIGTERM
    remaining < a tenth of the ttl (at most 1 s)     SIGKILL, so that the command is dead before its lock is free
    remaining < half of that                         the guard's turn, should we not have got round to it

A lease that is renewed at a third of its ttl never has less than about half of it left, so a healthy one is far from
all of them. A lease whose key was taken or deleted is lost already: SIGTERM at once, SIGKILL after a short grace.
At ``--max-hold`` the command gets SIGTERM, and the lock is renewed until it has really ended.

Several names are one lock (protocol/multi.py): all of them or none, and none is held while another is waited for. So
there is one lease, and what is said of it names all of them; ``acquired`` then has the fence of each, too.

What ``--json`` says: waiting, acquired, busy, unavailable, lost, exited and released; and, where people are told more,
local (no server was named), keeping (--at-least), suspended (Ctrl-Z) and unreleased (the server was gone at the end).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.blocking import Client, Lease
from holdfast.cli import BUSY, LOST, UNAVAILABLE, USAGE, Voice
from holdfast.cli.child import Child, Ended, Stopped
from holdfast.cli.signals import ENDING, Inbox, Signalled
from holdfast.drivers.clock import now
from holdfast.errors import HoldfastError, LeaseLost, NotAcquired, NotHeld, Unsupported, rounded
from holdfast.guard import stamp

__all__ = ["Margins", "Run", "margins"]

TICK_S: Final = 1.0
GROUP_TICK_S: Final = 0.02
LONGEST_NOTICE_S: Final = 10.0
LONGEST_GRACE_S: Final = 2.0
SAY_AFTER_S: Final = 0.1  # a lock that is free is had sooner

# What the log says is told by an event or an exit code; a line of text has no place between lines of JSON.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


class Margins(NamedTuple):
    """How many seconds before the end of the lease what is done about it."""

    notice: float  # SIGTERM
    last: float  # SIGKILL
    grace: float  # between the two where the lease is gone already


def margins(ttl: float) -> Margins:
    return Margins(min(ttl / 3, LONGEST_NOTICE_S), min(ttl / 10, 1.0), min(ttl / 3, LONGEST_GRACE_S))


class Doom(NamedTuple):
    """The command must end, and by when."""

    kill_at: float
    silent: bool  # the server does not answer, so a release would only cost time


class Run:
    """One ``holdfast run``."""

    def __init__(
        self,
        client: Client,
        names: Sequence[str],
        argv: Sequence[str],
        voice: Voice,
        *,
        wait: float | None,
        ttl: float,
        at_least: float,
        max_hold: float | None,
        label: str,
        environment: Mapping[str, str | None],
    ) -> None:
        self._client = client
        self._argv = argv
        self._voice = voice
        self._wait = wait
        self._ttl = ttl
        self._margins = margins(ttl)
        self._at_least = at_least
        self._max_hold = max_hold
        # The lock first: a name that cannot be used is refused before anything of this process is changed.
        self._lock = client.lock(*names, ttl=ttl, label=label, on_lost=self._wake)
        self._inbox = Inbox()
        self._lease: Lease  # from when it is held
        self._changes: dict[str, str | None] = dict(environment)  # to the command's environment; None removes
        self._held_since = 0.0
        self._started = False
        self._doom: Doom | None = None
        self._told_guard = 0.0

    def _wake(self, _: Lease) -> None:
        self._inbox.ring()

    def run(self, when_forked: Callable[[], object] = lambda: None) -> int:
        """Do it all; the exit code. To be called in the main thread, which must be the only one.

        ``when_forked`` is called when threads may be started.
        """
        child = Child(self._argv)
        try:
            when_forked()
            code = self._acquire()
            return self._run(child) if code is None else code
        finally:
            child.dismiss()
            self._client.close()

    # Taking the lock ------------------------------------------------------------------------------------------------

    def _acquire(self) -> int | None:
        """Take it; an exit code if that was in vain, and nothing is held then."""
        try:
            with self._inbox.interrupting():
                code = self._acquire_within(self._wait)
        except Signalled as stopped:
            code = 128 + stopped.signum
        except HoldfastError as error:
            code = self._refused(error)
        if code is not None:
            # Asked of the lock, because an attempt may have succeeded as it was interrupted, before we heard of it.
            try:
                self._lock.release()
            except HoldfastError:
                pass  # not held, or out of reach; then the keeper's last try or the ttl ends it
        return code

    def _refused(self, error: HoldfastError) -> int:
        if isinstance(error, Unsupported):
            self._voice.say("unavailable", str(error), error=True)
            return USAGE
        if isinstance(error, NotAcquired):
            self._voice.say("busy", str(error), name=error.name)
            return BUSY
        self._voice.say("unavailable", str(error), error=True)
        return UNAVAILABLE

    def _acquire_within(self, patience: float | None) -> int | None:
        started = now()
        lease = self._acquire_until(None if patience is None else started + patience)
        waited = round(now() - started, 3)
        if lease is None:
            self._voice.say(
                "busy",
                f"lock {self._lock.name!r} is held by someone else (waited {rounded(waited)} s); "
                "wait longer with --wait, or come back later",
                name=self._lock.name,
                waited=waited,
            )
            return BUSY
        self._lease = lease
        self._changes.update(_environment(lease))
        fences: dict[str, Any] = {"fences": lease.fences} if len(lease.fences) > 1 else {}
        self._voice.say("acquired", name=lease.name, fence=lease.fence, **fences, waited=waited)
        self._held_since = now()
        return None

    def _acquire_until(self, until: float | None) -> Lease | None:
        lock = self._lock
        left = None if until is None else until - now()
        if left is not None and left <= 0:
            return lock.acquire(blocking=False)
        telling = threading.Timer(SAY_AFTER_S, self._say_that_it_waits, (left,))
        telling.daemon = True
        try:
            telling.start()
        except RuntimeError:
            pass  # no thread can be started: the lock matters more than the message
        try:
            return lock.acquire(timeout=-1 if left is None else left)
        finally:
            telling.cancel()

    def _say_that_it_waits(self, left: float | None) -> None:
        patience = "" if left is None else f", at most {rounded(left)} s"
        self._voice.say("waiting", f"waiting for lock {self._lock.name!r}{patience}", name=self._lock.name)

    # Running the command --------------------------------------------------------------------------------------------

    def _run(self, child: Child) -> int:
        self._inbox.begin_passing()
        self._doom = self._judge()  # we may have been stopped on the way here
        if self._doom is not None:
            self._release()
            return LOST
        self._tell_guard(child)
        try:
            child.start(self._changes)
        except OSError as error:
            return self._not_started(error)
        self._started = True
        code = self._watch(child)
        if self._doom is not None:
            self._clear_away(child)
        self._voice.say("exited", code=code)
        child.dismiss()
        if self._doom is not None:
            self._release()
            return LOST
        lingered = self._linger()
        lost = self._release()
        return LOST if lost and not lingered else code

    def _not_started(self, error: OSError) -> int:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        code = NOT_FOUND if missing else NOT_EXECUTABLE
        advice = "check its spelling and PATH" if missing else "check its permissions and its first line (#!)"
        self._voice.say(
            "exited",
            f"{self._argv[0]!r} cannot be run: {os.strerror(error.errno or 0)}; {advice}",
            error=True,
            code=code,
        )
        self._release()
        return code

    def _watch(self, child: Child) -> int:
        """Stay with the command until it ends; its exit code."""
        tick = min(TICK_S, self._ttl / 10)
        while True:
            for signum in self._inbox.take():
                child.signal(signum)
            change = child.poll()
            if isinstance(change, Ended):
                if self._doom is None and change.code == 128 + signal.SIGKILL and now() >= self._told_guard:
                    reason = "it was not renewed in time, because holdfast was stopped or suspended"
                    self._doom = self._pronounce(reason, 0.0)
                return change.code
            if isinstance(change, Stopped):
                child.suspended(change.signum, self._announce_suspension)
                continue
            if self._doom is None:
                self._doom = self._judge()
                if self._doom is not None:
                    child.signal(signal.SIGTERM)
                    child.signal(signal.SIGCONT)  # a stopped command could not heed it
            self._tell_guard(child)
            next_look = now() + tick
            if self._doom is not None:
                if now() >= self._doom.kill_at:
                    child.signal(signal.SIGKILL)
                else:
                    next_look = min(next_look, self._doom.kill_at)
            elif self._max_hold is not None:
                next_look = min(next_look, self._held_since + self._max_hold)
            self._inbox.wait(next_look - now())

    def _judge(self) -> Doom | None:
        """Whether the command must end; if so, say why."""
        if self._lease.lost.is_set():
            return self._pronounce(_why_lost(self._lease), self._margins.grace)
        left = self._lease.remaining()
        if left < self._margins.notice:
            reason = f"it could not be renewed and ends in {rounded(left)} s (see whether the server is well)"
            return self._pronounce(reason, left - self._margins.last, silent=True)
        if self._max_hold is not None and now() >= self._held_since + self._max_hold:
            return self._pronounce(f"--max-hold of {rounded(self._max_hold)} s is over", self._margins.notice)
        return None

    def _pronounce(self, reason: str, grace: float, *, silent: bool = False) -> Doom:
        lease = self._lease
        if not self._started:
            what = "was not started; try again"
        elif grace > 0:
            what = f"was told to end and is killed in {rounded(grace)} s; see what it left undone"
        else:
            what = "was killed; see what it left undone"
        self._voice.say(
            "lost",
            f"lock {lease.name!r} is lost: {reason}. The command {what}",
            error=True,
            name=lease.name,
            fence=lease.fence,
            reason=reason,
        )
        return Doom(now() + grace, silent)

    def _tell_guard(self, child: Child) -> None:
        if self._doom is not None:
            good_until = self._doom.kill_at + self._margins.last / 2
        else:
            good_until = now() + self._lease.remaining() - self._margins.last / 2
        if abs(good_until - self._told_guard) > 0.005:
            self._told_guard = good_until
            child.good_until(good_until)

    def _announce_suspension(self) -> None:
        left = self._lease.remaining()
        self._voice.say(
            "suspended",
            f"suspended: lock {self._lease.name!r} is not renewed meanwhile, and the command is killed in "
            f"{rounded(left)} s",
            left=round(left, 3),
        )

    def _clear_away(self, child: Child) -> None:
        """The command has ended because it had to; what it started must end by the same time."""
        assert self._doom is not None
        while child.signal(0) and now() < self._doom.kill_at:
            self._inbox.wait(GROUP_TICK_S)
        child.signal(signal.SIGKILL)

    # Giving the lock back -------------------------------------------------------------------------------------------

    def _linger(self) -> bool:
        """Keep the lock for ``--at-least`` so long, or until a signal; whether that took any time."""
        until, lease = self._held_since + self._at_least, self._lease
        if now() >= until or lease.lost.is_set():
            return False
        self._inbox.take()  # those were for the command
        self._voice.say(
            "keeping", f"the command has ended; lock {lease.name!r} is kept for {rounded(until - now())} s more"
        )
        while now() < until and not any(signum in ENDING for signum in self._inbox.take()):
            if lease.lost.is_set():
                break
            self._inbox.wait(min(until - now(), TICK_S))
        return True

    def _release(self) -> bool:
        """Give it back; whether it turned out to be lost."""
        lease = self._lease
        if self._doom is not None and self._doom.silent and lease.remaining() < self._margins.notice:
            warnings.simplefilter("ignore", ResourceWarning)  # it is dropped on purpose: it ends by itself
            del lease, self._lease, self._lock  # else close() would wait for the silent server to take it back
            return False
        try:
            lease.release()
        except LeaseLost as error:
            if self._doom is None:
                self._voice.say("lost", str(error), error=True, name=lease.name, fence=lease.fence, reason=error.reason)
            return True
        except HoldfastError as error:
            self._voice.say(
                "unreleased",
                f"lock {lease.name!r} was not given back, and ends by itself within {rounded(self._ttl)} s: {error}",
                error=True,
                name=lease.name,
            )
        else:
            self._voice.say("released", name=lease.name)
        return False


def _environment(lease: Lease) -> dict[str, str | None]:
    """What changes in the command's. Name, fence and holder are what a guard.Stamp is made of."""
    fences = lease.fences
    return {
        "HOLDFAST_NAME": " ".join(fences),
        "HOLDFAST_FENCE": str(lease.fence),
        "HOLDFAST_FENCES": json.dumps(fences, ensure_ascii=False) if len(fences) > 1 else None,
        "HOLDFAST_HOLDER": stamp(lease, name=next(iter(fences))).holder,
    }


def _why_lost(lease: Lease) -> str:
    try:
        lease.check()
    except LeaseLost as error:
        return error.reason
    except NotHeld:
        pass
    return "it is no longer held"
