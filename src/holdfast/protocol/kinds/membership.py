"""Membership of permit pools: a holder learns soon that its permit was taken away.

Invariant. As long as a client has a hold in a pool that is older than a tenth of a second, either the server will
notify it of the next write to the pool (the pool is *watched*), or a check is due. A check is one request, which asks
about all holds that the client has there, changes nothing, and has the pool watched again.

Why not renew what was written, as the mutex does? A pool is written by every acquire and release, and tracking ends
with the first push, so each of them would wake all clients inside, each with a request per hold. Therefore checks are
rationed: a few at once, and then one a second for each client and pool; those of many pools go together. In a quiet
pool a theft is known in milliseconds, in a busy one within about a second, and the cost has a bound.

Our own writes over the tracked connection are not pushed to us, but they also end the watch. So a check is due, too,
when a hold of ours begins, ends or is renewed. Other writes of ours (an attempt that finds an ended lease) are rare; a
check follows the next renewal.

Clocks: our own, and only for when to check. The server says which tokens are inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from holdfast.protocol.effects import Step
from holdfast.protocol.hold import CHECK_AFTER, HELD, Hold
from holdfast.protocol.wait.waiter import Notification

PAUSE: Final = 1.0  # seconds between two checks of a pool
REST: Final = 0.03  # seconds between two rounds of checks, for any number of pools
AT_ONCE: Final = 3  # checks that may come without a pause, after a quiet time
SETTLE: Final = 0.1  # seconds from the start or end of a hold of ours to the check; its own write is over by then
MOST: Final = 1000  # tokens in one request

_NEVER: Final = float("inf")


class SharedHold(Hold):
    """A hold on a permit pool, which other clients hold at the same time, in the same keys."""

    pool: tuple[str, ...] = ()  # the keys; first the one with the tokens of the holders
    old_at = _NEVER  # when its first check is due; shorter holds are never checked
    monitors: MembershipMonitors | None = None  # of its client, once it is registered

    def grant(self, fence: int, asked_at: float, slot: int = -1) -> None:
        super().grant(fence, asked_at, slot)
        self.old_at, self.check_at = self.check_at, _NEVER

    def accept(self, notification: Notification, now: float) -> bool:
        granted = super().accept(notification, now)
        if granted:
            self.old_at = now + CHECK_AFTER
        return granted

    def prolong(self, ttl: float, asked_at: float) -> None:
        super().prolong(ttl, asked_at)
        if self.monitors is not None:
            self.monitors.recheck(self.pool[0])


class MembershipMonitor:
    """One permit pool that this client has watched."""

    __slots__ = ("check_at", "free_at", "moved")

    def __init__(self) -> None:
        self.check_at = 0.0  # when a check is due; infinite while the pool is watched and was not written
        self.free_at = -_NEVER  # no check before this time
        self.moved = False  # a hold of ours has begun, or is about to end

    def begin(self, now: float) -> None:
        """A check begins now. Every change from now on needs another check."""
        self.check_at = _NEVER
        self.free_at = max(self.free_at, now - (AT_ONCE - 1) * PAUSE) + PAUSE


class MembershipMonitors:
    """The pools that a client has watched, by key. The keeper adds and forgets them; any thread may call the rest."""

    def __init__(self, wake_the_keeper: Callable[[], None]) -> None:
        self.monitored: dict[str, MembershipMonitor] = {}
        self.rests_until = -_NEVER  # when the keeper begins the next round, without being woken
        self.resting = False
        self.in_use = False  # whether this client ever had a hold on a pool; most clients have none, and skip checks
        self._wake_the_keeper = wake_the_keeper

    def recheck(self, key: str) -> None:
        """The pool with that key was written: check it."""
        monitor = self.monitored.get(key)
        if monitor is not None and monitor.check_at > 0.0:
            monitor.check_at = 0.0
            self._call_the_keeper()

    def recheck_all(self) -> None:
        for key in list(self.monitored):
            self.recheck(key)

    def move(self, hold: SharedHold) -> None:
        """A hold of ours has come, or is about to go: check soon."""
        monitor = self.monitored.get(hold.pool[0])
        if monitor is not None and not monitor.moved:
            monitor.moved = True
            self._call_the_keeper()

    def _call_the_keeper(self) -> None:
        if not self.resting:
            self._wake_the_keeper()


class MembershipCheck(NamedTuple):
    """Which pool to check, and for which holds."""

    key: str
    holds: list[SharedHold]


def plan_checks(holds: Iterable[Hold], monitors: MembershipMonitors, now: float) -> tuple[list[MembershipCheck], float]:
    """Which pools to check now, and when to plan again. Pools without a hold of ours are forgotten."""
    if now < monitors.rests_until:
        return [], monitors.rests_until
    monitors.resting = False  # before the monitors are read: every later change wakes the keeper
    inside: dict[str, list[SharedHold]] = {}
    for hold in holds:
        if isinstance(hold, SharedHold) and hold.phase is HELD:
            inside.setdefault(hold.pool[0], []).append(hold)
    looks: list[MembershipCheck] = []
    wakes_at = _NEVER
    for key, ours in inside.items():
        when = min(hold.old_at for hold in ours)
        monitor = monitors.monitored.get(key)
        if monitor is not None:
            if monitor.moved and monitor.check_at == _NEVER:
                monitor.moved = False
                monitor.check_at = now + SETTLE
            when = max(when, monitor.check_at, monitor.free_at)
        if when <= now:
            looks.append(MembershipCheck(key, ours))
        else:
            wakes_at = min(wakes_at, when)
    for key, monitor in list(monitors.monitored.items()):
        if key not in inside and now >= monitor.free_at:  # not earlier: a new monitor could check without a pause
            monitors.monitored.pop(key, None)
    if looks:
        monitors.rests_until = now + REST
        monitors.resting = True
    return looks, wakes_at


def check_steps(look: MembershipCheck) -> list[tuple[Step, list[SharedHold]]]:
    """The steps of a check, each with the holds that it asks about."""
    parts = (look.holds[start : start + MOST] for start in range(0, len(look.holds), MOST))
    return [(Step("pool_find", part[0].pool, tuple(hold.token for hold in part), watch=True), part) for part in parts]
