"""Notification, waiter and pass budget: what a hold has only while it waits, and how long it may be passed on.

Invariant. A ``Waiter`` is in one of four states:

    WAITING    in the local queue of its client
    PROMOTED   another hold has made it the active one; its caller may not know yet
    ACTIVE     it talks to the server; a hold that does not wait has the shared waiter NOT_WAITING, which is ACTIVE
    LEFT       it left the local queue before it was promoted

WAITING becomes PROMOTED or LEFT by one ``setdefault`` on the dictionary ``decided``, which has at most one key and
serves as a cell that is written once: two threads never both decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.options import LockOptions

if TYPE_CHECKING:
    from holdfast.protocol.effects import Wakeup
    from holdfast.protocol.replies import Refused

WAITING: Final = "waiting"
PROMOTED: Final = "promoted"
ACTIVE: Final = "active"
LEFT: Final = "left"

PASS_WINDOW: Final = 0.1  # seconds for which a client may pass a lease on
POLLING_REMEMBERED: Final = 60.0  # seconds for which a polling client is remembered; must match lua/include/grant.lua

_NEVER: Final = float("inf")


class Notification(NamedTuple):
    """A message of the server: this waiter was granted the lock, or should ask for it again after a pause."""

    fence: int  # of the grant; 0: nothing was granted, ask again
    at_us: int  # when it was sent, by the server's clock
    heard_at: float  # when it was received, by our clock
    slot: int = -1  # the permit that was granted, if it is a numbered one
    pause_ms: int = 0  # before asking again


class PassBudget(NamedTuple):
    """How long a client may pass a lease on, and how long it has kept the lock from other clients.

    Every hold of a run of passes has the same budget. What is left of it follows from the fence of the hold, which is
    greater by one after each pass.
    """

    first_fence: int = 0  # of the grant; 0: not granted yet
    last_fence: int = 0  # the greatest fence that a pass may reach
    until: float = 0.0
    run_since: float = 0.0  # start of the current run of holds of this client; 0 if another client held it since
    run_turns: int = 0  # holds in that run before the grant
    polling_seen_at: float = -_NEVER  # when a client of another library was last seen to have the lock

    def refilled(self, fence: int, options: LockOptions, now: float, run_since: float) -> PassBudget:
        """After a grant. If polling clients were seen lately, the time to pass the lease on is short and irregular."""
        polled = now - self.polling_seen_at <= POLLING_REMEMBERED
        window = PASS_WINDOW * (0.1 + now * 1e6 % 1000 / 2000) if polled else PASS_WINDOW
        last_fence = fence + options.fences - 1
        return PassBudget(fence, last_fence, now + window, run_since, self.run_turns, self.polling_seen_at)

    def ended(self) -> PassBudget:
        """After the end of a run: the lock is left to polling clients for a yield window."""
        return self._replace(run_since=0.0, run_turns=0)

    def allows_pass(self, fence: int, now: float) -> bool:
        """Whether the hold with that fence may be passed on."""
        return now < self.until and fence < self.last_fence


class Waiter:
    """What a hold has only while it waits."""

    __slots__ = (  # a dict for each would make garbage collection slower (benchmarks.crowd)
        "asked",
        "crowded",
        "decided",
        "notification",
        "notified",
        "queued",
        "refused",
        "report_at",
        "seen",
        "since",
        "wakeup",
    )

    def __init__(self, wakeup: Wakeup | None, decided: dict[None, object]) -> None:
        self.wakeup = wakeup
        self.decided = decided  # set once, by setdefault: the hold that promoted it, or LEFT; then ACTIVE
        self.notified = False  # it was promoted, and woken for that
        self.notification: Notification | None = None  # the last one that was received
        self.asked = (0.0, 0)  # our time before, and the server's time at, the last step that the server answered
        self.seen = (0.0, 0)  # the same for the last step by which the keeper has shown that it is alive
        self.refused: Refused | None = None  # the last refusal
        self.queued = False  # it is in the server's queue, as far as we know
        self.crowded = False  # it waits as one of very many: the keeper cleans up after it
        self.since = 0.0  # when it joined the local queue
        self.report_at = 0.0  # when to report that it still waits there; 0: after LONG_WAIT

    def wake(self) -> None:
        if self.wakeup is not None:
            self.wakeup.wake()

    def notify(self, notification: Notification) -> None:
        """Receive it. If there is no wake-up yet, the caller looks at ``notification`` before it sleeps."""
        if self is not NOT_WAITING:
            self.notification = notification
            self.wake()

    def show(self, seen: tuple[float, int]) -> None:
        """The keeper has shown the server that it is alive: our time, and the server's."""
        if self is not NOT_WAITING:
            self.seen = seen

    @property
    def state(self) -> str:
        decided = self.decided.get(None)
        if decided is None:
            return WAITING
        return decided if isinstance(decided, str) else PROMOTED


IS_ACTIVE: Final[dict[None, object]] = {None: ACTIVE}  # shared: setdefault never changes it
NOT_WAITING: Final = Waiter(None, IS_ACTIVE)  # of every hold that does not wait; never written to
