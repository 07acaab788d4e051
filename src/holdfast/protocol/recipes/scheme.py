"""What one lock of history is, apart from the object that people hold: how to try, how to give back, what its key says.

Invariant. A scheme is options and rules and nothing else. What happens in the course of one acquisition is kept in its
``Turn``, and everything that is sent is sent here and in the modules beside this one, word for word as the original
sends it. Nothing is made better on the way: whoever wants that has ``client.lock``.

Nothing is atomic but a command, or a MULTI. Of clocks each scheme assumes what its original did, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias

from holdfast.errors import InvalidConfig, rounded
from holdfast.lease import HELD, Hold, Terms
from holdfast.names import Keys
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import Command, Effects, StepFailed, call, call_on, close_link, open_link

__all__ = [
    "AGAIN",
    "LOST",
    "WON",
    "Leased",
    "Outcome",
    "Scheme",
    "Turn",
    "hang_up",
    "on_link",
    "one_of",
    "option",
    "pausing",
    "prefixed",
]

Outcome: TypeAlias = Literal["won", "lost", "again"]
WON: Final = "won"
LOST: Final = "lost"  # wait a little, and try again
AGAIN: Final = "again"  # try again at once

LONGEST: Final = 366 * 86_400.0
_NEVER: Final = float("inf")

FORKED: Final = "it was acquired in another process or event loop, and stayed there"


class Turn(Hold):
    """One acquisition by a lock of history. It is in nobody's book: nothing is renewed, and nothing is cleaned up."""

    species = "recipe"

    def __init__(self, keys: Keys, terms: Terms, gate: Gate, driver: Any, scheme: Scheme) -> None:
        super().__init__(keys, terms, gate)
        self.scheme = scheme
        self.value = ""  # what it has written to its key, where that is no token
        self.link: Any = None  # the connection that it has for itself at the moment
        self.since = 0.0  # when acquire returned
        self._driver = driver
        self._life = driver.life

    @property
    def key(self) -> str:
        return self.keys.main

    def begin(self, asked_at: float, now: float) -> None:
        self.since = now
        self.lasts = self.deadline = asked_at + self.scheme.lasts
        self.phase = HELD

    def end(self) -> bool:
        """Whether it is for this caller to give it back; True for exactly one."""
        ender = object()
        return self.__dict__.setdefault("ended_by", ender) is ender

    def is_abroad(self) -> bool:
        """Whether this is a forked child, or a new event loop, and the hold is not ours to give back."""
        return bool(self._life != self._driver.life)

    def valid(self, now: float) -> bool:
        return super().valid(now) and not self.is_abroad()

    def why_lost(self, now: float) -> str:
        return FORKED if self.phase is HELD and self.is_abroad() else super().why_lost(now)

    def why_over(self) -> str:
        return f"its ttl of {rounded(self.scheme.lasts)} s ran out, and a lock of history is not renewed"


# Options.


def option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """A field that is an option of the recipe: its default, and what is made of a value that somebody gives."""
    return field(default=default, metadata={"check": check})


def _shown(value: object) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an int with more digits than Python is willing to print
        return "a number too large to show"


def seconds(least: float) -> Callable[[str, Any], float]:
    def check(what: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LONGEST:
            raise InvalidConfig(
                f"{what}={_shown(value)}", f"give a number of seconds from {rounded(least)} to {rounded(LONGEST)}"
            )
        return float(value)

    return check


def _patience(what: str, value: Any) -> float | None:
    return None if value is None or value == _NEVER else seconds(0.0)(what, value)


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidConfig(f"{what}={_shown(value)}", "give a str")
    return value


def one_of(*choices: Any) -> Callable[[str, Any], Any]:
    def check(what: str, value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise InvalidConfig(f"{what}={_shown(value)}", f"give one of {', '.join(map(repr, choices))}")
        return value

    return check


def pausing(default: float) -> Any:
    return option(default, seconds(0.0))


def prefixed(default: str) -> Any:
    return option(default, _text)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A lock without a ttl; and what all of them have in common.

    wait: seconds that ``with`` waits (None: for ever). sleep: seconds between two tries. prefix: what comes before the
    name in the key.
    """

    pit: ClassVar[str]  # in a few words, for whoever is about to use it
    server: ClassVar[str] = "redis"
    forgiving: ClassVar[bool] = False  # an error is a failed try, and logged; so is one of release
    compares: ClassVar[bool] = False  # its release takes away what is its own, so it may be done twice

    wait: float | None = option(None, _patience)
    sleep: float = pausing(0.01)
    prefix: str = prefixed("")

    @property
    def lasts(self) -> float:
        """For how many seconds it excludes others, by whatever clock it uses."""
        return _NEVER

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        """One try."""
        raise NotImplementedError

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        """Give it back; False if it turns out that it was not ours any more. Most originals do not look."""
        yield from call(Command(("DEL", turn.key)), timeout, shielded=True)
        return True

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        return bool((yield from call(Command(("EXISTS", key)), timeout)))

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        """Until when a key with that value and expiry keeps others out, in microseconds since 1970; None: for ever."""
        return expires_us


@dataclass(frozen=True, kw_only=True)
class Leased(Scheme):
    """A lock that ends by itself after ``ttl`` seconds."""

    ttl: float = option(10.0, seconds(0.01))

    @property
    def lasts(self) -> float:
        return self.ttl

    @property
    def whole_seconds(self) -> int:
        """What EX and EXPIRE are given."""
        return math.ceil(self.ttl)


# Commands that need one and the same connection.


def on_link(turn: Turn, timeout: float, *commands: Command) -> Effects[list[Any]]:
    """The replies to commands on the connection of this turn, which is made if there is none."""
    if turn.link is None:
        turn.link = yield from open_link(timeout)
    try:
        replies = yield from call_on(turn.link, *commands, timeout=timeout)
    except StepFailed:
        yield from hang_up(turn)
        raise
    for reply in replies:
        if isinstance(reply, StepFailed):
            raise reply
    return replies


def hang_up(turn: Turn) -> Effects[None]:
    link, turn.link = turn.link, None
    if link is not None:
        yield from close_link(link)
