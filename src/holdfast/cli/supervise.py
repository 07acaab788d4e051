"""``holdfast run NAME... -- COMMAND``: run a command while a lock is held, and end it before the lock is free.

The main thread runs one loop until the command ends. It wakes when a signal arrives, which it passes on, when the
command ends or stops, when the lease is lost, and at least every second, because a sleeping thread does not notice
that its machine was suspended. Each time it compares the rest of the lease with these margins:

    remaining < a third of the ttl (at most 10 s)    renewals have failed for a while: SIGTERM
    remaining < a tenth of the ttl (at most 1 s)     SIGKILL, so that the command is dead before its lock is free
    remaining < half of that                         the guard process kills, if this process has not done it

A lease that is renewed at a third of its ttl always has about half of it left or more, so a healthy lease reaches none
of the margins. If the key was taken or deleted, the lease is lost already: SIGTERM now, SIGKILL after a short grace.
At ``--max-hold`` the command gets SIGTERM, and the lock is renewed until the command has ended.

Several names are one lock with one lease (protocol/kinds/multi.py): all of them are acquired, or none. Messages show
all names, and the event ``acquired`` also has the fence of each.

Events of ``--json``: waiting, acquired, busy, unavailable, lost, exited, released, local (no server was named), left
(--at-least), suspended (Ctrl-Z), and unreleased (the server did not answer the release).
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
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from holdfast.blocking import Client, Lease, Lock
from holdfast.cli import BUSY, LOST, UNAVAILABLE, USAGE, Voice
from holdfast.cli.child import Child, Ended, Stopped
from holdfast.cli.margins import margins
from holdfast.cli.signals import Inbox, Signalled
from holdfast.drivers.clock import now
from holdfast.errors import HoldfastError, LeaseLost, NotAcquired, NotHeld, Unsupported, rounded
from holdfast.guard import stamp
from holdfast.holder import Holder
from holdfast.protocol.leases import leave_lease

TICK_S: Final = 1.0
GROUP_TICK_S: Final = 0.02
SAY_AFTER_S: Final = 0.5  # a free lock is acquired sooner, also on a cluster of etcd

# Events and exit codes report what is logged; a line of text would break the JSON output.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


class Termination(NamedTuple):
    """The command must end by this time."""

    kill_at: float
    silent: bool  # the server does not answer, so a release would only take time


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
        side: str = "",
        permits: int | None = None,
        busy_code: int = BUSY,
    ) -> None:
        self._client = client
        self._names = names
        self._argv = argv
        self._voice = voice
        self._wait = wait
        self._ttl = ttl
        self._margins = margins(ttl)
        self._at_least = at_least
        self._max_hold = max_hold
        # The lock comes first: an invalid name is refused before signal handlers are set.
        options: Any = {"ttl": ttl, "label": label, "on_lost": self._wake}
        self._lock: Lock[Any]
        if permits is not None:
            self._lock = client.semaphore(names[0], permits, **options)
        elif side:
            self._lock = getattr(client.rwlock(names[0], **options), side)
        else:
            self._lock = client.lock(*names, **options)
        self._busy_code = busy_code
        self._inbox = Inbox()
        self._lease: Lease  # set when the lock is acquired
        self._changes: dict[str, str | None] = dict(environment)  # to the command's environment; None removes
        self._held_since = 0.0
        self._started = False
        self._termination: Termination | None = None
        self._told_guard = 0.0

    def _wake(self, _: Lease) -> None:
        self._inbox.wake()

    def run(self, when_forked: Callable[[], object] = lambda: None) -> int:
        """Acquire, run the command, release; returns the exit code. Call it before other threads are started.

        ``when_forked`` is called as soon as threads may be started.
        """
        child = Child(self._argv)
        try:
            when_forked()
            code = self._acquire()
            return self._run(child) if code is None else code
        finally:
            child.dismiss()
            self._client.close()

    # Acquiring the lock ---------------------------------------------------------------------------------------------

    def _acquire(self) -> int | None:
        """Acquire the lock; returns None, or an exit code if it is not held."""
        try:
            with self._inbox.interrupting():
                code = self._acquire_within(self._wait)
        except Signalled as stopped:
            code = 128 + stopped.signum
        except HoldfastError as error:
            code = self._refused(error)
        if code is not None:
            # Release the lock, not a lease: an interrupted attempt may have acquired it without returning a lease.
            try:
                self._lock.release()
            except HoldfastError:
                pass  # not held; or the server is silent, and close() or the ttl ends the lease
        return code

    def _refused(self, error: HoldfastError) -> int:
        if isinstance(error, Unsupported):
            hint = ". Commands beside --shared need --exclusive" if "in use as a rwlock" in str(error) else ""
            self._voice.say("unavailable", f"{error}{hint}", error=True)
            return USAGE
        if isinstance(error, NotAcquired):
            self._voice.say("busy", str(error), name=error.name)
            return self._busy_code
        self._voice.say("unavailable", str(error), error=True)
        return UNAVAILABLE

    def _acquire_within(self, patience: float | None) -> int | None:
        started = now()
        lease = self._acquire_until(None if patience is None else started + patience)
        waited = round(now() - started, 3)
        if lease is None:
            holder = self._find_holder()
            self._voice.say(
                "busy",
                f"lock {self._lock.key!r} is held by {holder or 'another client'} (waited {rounded(waited)} s); "
                "wait longer with --wait, or try again later",
                name=self._lock.name,
                waited=waited,
                holder=None if holder is None else asdict(holder),
            )
            return self._busy_code
        self._lease = lease
        self._changes.update(_environment(lease))
        fences: dict[str, Any] = {"fences": lease.fences} if len(lease.fences) > 1 else {}
        self._voice.say("acquired", name=lease.name, fence=lease.fence, **fences, waited=waited)
        self._held_since = now()
        return None

    def _find_holder(self) -> Holder | None:
        """The holder of the first name that is held; None if it is free again, or this user may not look."""
        with suppress(HoldfastError):
            found = (self._client.inspect(name) for name in self._names)
            return next((info.holders[0] for info in found if info is not None and info.holders), None)
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
            pass  # no thread can be started: go on without the message
        try:
            return lock.acquire(timeout=-1 if left is None else left)
        finally:
            telling.cancel()

    def _say_that_it_waits(self, left: float | None) -> None:
        patience = "" if left is None else f", at most {rounded(left)} s"
        self._voice.say("waiting", f"waiting for lock {self._lock.key!r}{patience}", name=self._lock.name)

    # Running the command --------------------------------------------------------------------------------------------

    def _run(self, child: Child) -> int:
        self._inbox.begin_passing()
        self._termination = self._check_lease()  # this process may have been stopped since the acquire
        if self._termination is not None:
            self._release()
            return LOST
        self._tell_guard(child)
        try:
            child.start(self._changes)
        except OSError as error:
            return self._not_started(error)
        self._started = True
        code = self._watch(child)
        if self._termination is not None:
            self._clear_away(child)
        self._voice.say("exited", code=code)
        child.dismiss()
        if self._termination is not None:
            self._release()
            return LOST
        rest = self._held_since + self._at_least - now()
        lost = self._leave(rest) if rest > 0 and not self._lease.lost.is_set() else self._release()
        return LOST if lost else code

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
        """Supervise the command until it ends; returns its exit code."""
        tick = min(TICK_S, self._ttl / 10)
        while True:
            for signum in self._inbox.take():
                child.signal(signum)
            change = child.poll()
            if isinstance(change, Ended):
                if self._termination is None and change.code == 128 + signal.SIGKILL and now() >= self._told_guard:
                    reason = "it was not renewed in time, because holdfast was stopped or suspended"
                    self._termination = self._report_loss(reason, 0.0)
                return change.code
            if isinstance(change, Stopped):
                child.suspended(change.signum, self._announce_suspension)
                continue
            if self._termination is None:
                self._termination = self._check_lease()
                if self._termination is not None:
                    child.signal(signal.SIGTERM)
                    child.signal(signal.SIGCONT)  # a stopped command cannot handle SIGTERM
            self._tell_guard(child)
            next_look = now() + tick
            if self._termination is not None:
                if now() >= self._termination.kill_at:
                    child.signal(signal.SIGKILL)
                else:
                    next_look = min(next_look, self._termination.kill_at)
            elif self._max_hold is not None:
                next_look = min(next_look, self._held_since + self._max_hold)
            self._inbox.wait(next_look - now())

    def _check_lease(self) -> Termination | None:
        """Report a loss or the end of --max-hold, if there is one; returns when the command must end."""
        if self._lease.lost.is_set():
            return self._report_loss(_why_lost(self._lease), self._margins.grace)
        left = self._lease.remaining()
        if left < self._margins.notice:
            reason = f"it could not be renewed and ends in {rounded(left)} s (check the server)"
            return self._report_loss(reason, left - self._margins.last, silent=True)
        if self._max_hold is not None and now() >= self._held_since + self._max_hold:
            return self._report_loss(f"--max-hold of {rounded(self._max_hold)} s is over", self._margins.notice)
        return None

    def _report_loss(self, reason: str, grace: float, *, silent: bool = False) -> Termination:
        lease = self._lease
        if not self._started:
            what = "was not started; try again"
        elif grace > 0:
            what = f"got SIGTERM and is killed in {rounded(grace)} s; check what it left undone"
        else:
            what = "was killed; check what it left undone"
        self._voice.say(
            "lost",
            f"lock {lease.key!r} is lost: {reason}. The command {what}",
            error=True,
            name=lease.name,
            fence=lease.fence,
            reason=reason,
        )
        return Termination(now() + grace, silent)

    def _tell_guard(self, child: Child) -> None:
        if self._termination is not None:
            good_until = self._termination.kill_at + self._margins.last / 2
        else:
            good_until = now() + self._lease.remaining() - self._margins.last / 2
        if abs(good_until - self._told_guard) > 0.005:
            self._told_guard = good_until
            child.good_until(good_until)

    def _announce_suspension(self) -> None:
        left = self._lease.remaining()
        self._voice.say(
            "suspended",
            f"suspended: lock {self._lease.key!r} is not renewed meanwhile, and the command is killed in "
            f"{rounded(left)} s unless it is resumed",
            left=round(left, 3),
        )

    def _clear_away(self, child: Child) -> None:
        """After the command was ended: end the other processes of its group by the same time."""
        assert self._termination is not None
        while child.signal(0) and now() < self._termination.kill_at:
            self._inbox.wait(GROUP_TICK_S)
        child.signal(signal.SIGKILL)

    # Releasing the lock ---------------------------------------------------------------------------------------------

    def _leave(self, rest: float) -> bool:
        """Leave the lock behind for the rest of ``--at-least``; returns whether it was lost before."""
        return self._end(
            lambda: self._client._driver.run(leave_lease(self._lease, rest)),
            "left",
            f"the command has ended; lock {self._lease.key!r} stays taken for {rounded(rest)} s more",
            seconds=round(rest, 3),
        )

    def _release(self) -> bool:
        """Release the lock; returns whether it was lost before."""
        lease = self._lease
        if self._termination is not None and self._termination.silent and lease.remaining() < self._margins.notice:
            warnings.simplefilter("ignore", ResourceWarning)  # dropped on purpose: the lease ends by its ttl
            del lease, self._lease, self._lock  # else close() would wait for the silent server
            return False
        return self._end(lease.release, "released")

    def _end(self, act: Callable[[], object], event: str, message: str = "", **facts: Any) -> bool:
        """End the hold in that way, and say so; returns whether it was lost before."""
        lease = self._lease
        try:
            act()
        except LeaseLost as error:
            if self._termination is None:
                self._voice.say("lost", str(error), error=True, name=lease.name, fence=lease.fence, reason=error.reason)
            return True
        except HoldfastError as error:
            self._voice.say(
                "unreleased",
                f"lock {lease.key!r} was not released, and ends by its ttl within {rounded(self._ttl)} s: {error}",
                error=True,
                name=lease.name,
            )
        else:
            self._voice.say(event, message, name=lease.name, **facts)
        return False


def _environment(lease: Lease) -> dict[str, str | None]:
    """Changes to the command's environment. A guard.Stamp is made of name, fence and holder.

    On an engine without fences there is none, and no Stamp can be made.
    """
    fences = lease.fences
    fence: int | None = lease.fence
    return {
        "HOLDFAST_NAME": " ".join(fences),
        "HOLDFAST_FENCE": str(fence) if fence is not None else None,
        "HOLDFAST_FENCES": json.dumps(fences, ensure_ascii=False) if len(fences) > 1 else None,
        "HOLDFAST_HOLDER": stamp(lease, name=next(iter(fences))).holder if fence is not None else None,
    }


def _why_lost(lease: Lease) -> str:
    try:
        lease.check()
    except LeaseLost as error:
        return error.reason
    except NotHeld:
        pass
    return "it is no longer held"
