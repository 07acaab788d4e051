"""Looking after rooms: whoever holds a place in one learns soon that it was taken away.

Invariant. As long as a client has a hold in a room that is older than a tenth of a second, either the server will tell
it of the next write to the room (the room is *watched*), or it is going to look. A look is one request, which asks
about all the holds that the client has there, changes nothing, and has the room watched again.

Why not renew what was touched, as the mutex does? A room is written with every coming and going, tracking ends with the
first push, and so each visit would wake all clients inside, each with a request per hold. Therefore looks are rationed:
a few at once, and after these one a second for each client and room; and those of many rooms go together. In a quiet
room a theft is known in milliseconds, in a busy one within about a second, and what that costs has a bound.

Our own writes are not pushed to us where they go over the connection that is told, and yet they end the watch. So a
hold of ours that comes, goes or is renewed is a reason to look as well. What else writes there (an attempt of ours that
finds a lease over) is rare, and is made up for by the next renewal, which is followed by a look.

Clocks: our own, and only for when to look. Who is inside is for the server to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from holdfast.lease import HELD, LOOK_AFTER, Hold, Word
from holdfast.protocol.effects import Step

__all__ = ["Look", "Lookout", "Lookouts", "SharedHold", "look_steps", "plan_looks"]

PAUSE: Final = 1.0  # between two looks at a room
REST: Final = 0.03  # between two rounds of looks, however many rooms there are
AT_ONCE: Final = 3  # looks that may come without one, after a time of quiet
SETTLE: Final = 0.1  # for so long one of ours is on its way in or out: then there is something to be seen
MOST: Final = 1000  # tokens in one request

_NEVER: Final = float("inf")


class SharedHold(Hold):
    """A hold on what others hold as well, at the same time, and in the same keys."""

    room: tuple[str, ...] = ()  # the keys, first the one that says who is inside
    old_at = _NEVER  # from when on it is looked after; shorter holds pay nothing
    lookouts: Lookouts | None = None  # of its client, once it is in the book

    def grant(self, fence: int, asked_at: float) -> None:
        super().grant(fence, asked_at)
        self.old_at, self.look_at = self.look_at, _NEVER

    def rung(self, word: Word, now: float) -> bool:
        granted = super().rung(word, now)
        if granted:
            self.old_at = now + LOOK_AFTER
        return granted

    def prolong(self, ttl: float, asked_at: float) -> None:
        super().prolong(ttl, asked_at)
        if self.lookouts is not None:
            self.lookouts.stir(self.room[0])


class Lookout:
    """One room that this client has watched."""

    __slots__ = ("free_at", "look_at", "moved")

    def __init__(self) -> None:
        self.look_at = 0.0  # from when on there is reason to look; never, as long as it is watched and all is quiet
        self.free_at = -_NEVER  # from when on another look may be had
        self.moved = False  # one of ours comes or goes

    def begin(self, now: float) -> None:
        """Look. Whatever happens from here on is reason for another."""
        self.look_at = _NEVER
        self.free_at = max(self.free_at, now - (AT_ONCE - 1) * PAUSE) + PAUSE


class Lookouts:
    """The rooms that a client has watched, by key. The keeper adds and forgets them; any thread may call the rest."""

    def __init__(self, wake_the_keeper: Callable[[], None]) -> None:
        self.rooms: dict[str, Lookout] = {}
        self.rests_until = -_NEVER  # when the keeper comes for the next round, without being asked
        self.resting = False
        self.in_use = False  # whether this client has ever had such a hold: most have none among thousands of others
        self._wake_the_keeper = wake_the_keeper

    def stir(self, key: str) -> None:
        """Something was written there: look."""
        lookout = self.rooms.get(key)
        if lookout is not None and lookout.look_at > 0.0:
            lookout.look_at = 0.0
            self._call_the_keeper()

    def stir_all(self) -> None:
        for key in list(self.rooms):
            self.stir(key)

    def move(self, hold: SharedHold) -> None:
        """One of ours has come, or is about to go: look in a moment."""
        lookout = self.rooms.get(hold.room[0])
        if lookout is not None and not lookout.moved:
            lookout.moved = True
            self._call_the_keeper()

    def _call_the_keeper(self) -> None:
        if not self.resting:
            self._wake_the_keeper()


class Look(NamedTuple):
    """At which room to look, and for whom."""

    key: str
    holds: list[SharedHold]


def plan_looks(holds: Iterable[Hold], lookouts: Lookouts, now: float) -> tuple[list[Look], float]:
    """At which rooms to look now, and when to think of it again. Rooms in which we have nobody are forgotten."""
    if now < lookouts.rests_until:
        return [], lookouts.rests_until
    lookouts.resting = False  # before anything is read: what is written from here on rings the bell
    inside: dict[str, list[SharedHold]] = {}
    for hold in holds:
        if isinstance(hold, SharedHold) and hold.phase is HELD:
            inside.setdefault(hold.room[0], []).append(hold)
    looks: list[Look] = []
    wakes_at = _NEVER
    for key, ours in inside.items():
        when = min(hold.old_at for hold in ours)
        lookout = lookouts.rooms.get(key)
        if lookout is not None:
            if lookout.moved and lookout.look_at == _NEVER:
                lookout.moved = False
                lookout.look_at = now + SETTLE
            when = max(when, lookout.look_at, lookout.free_at)
        if when <= now:
            looks.append(Look(key, ours))
        else:
            wakes_at = min(wakes_at, when)
    for key, lookout in list(lookouts.rooms.items()):
        if key not in inside and now >= lookout.free_at:  # not before: who comes back at once has had its looks
            lookouts.rooms.pop(key, None)
    if looks:
        lookouts.rests_until = now + REST
        lookouts.resting = True
    return looks, wakes_at


def look_steps(look: Look) -> list[tuple[Step, list[SharedHold]]]:
    """What to ask, and about whom."""
    parts = (look.holds[start : start + MOST] for start in range(0, len(look.holds), MOST))
    return [(Step("room_find", part[0].room, tuple(hold.token for hold in part), watch=True), part) for part in parts]
