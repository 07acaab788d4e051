"""The algorithm of a recipe, apart from the lock object: how to acquire, how to release, what its key says.

Invariant. An algorithm is only options and rules. The state of one acquisition is in its ``RecipeHold``. Commands are
sent only here and in the modules beside this one, exactly as the original sends them. Nothing is improved: for that
there is ``client.lock``.

Atomic: a command, or a MULTI. Clocks: as the original assumed, which each module says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeAlias

from holdfast.errors import InvalidConfig, rounded, shown
from holdfast.names import Keys
from holdfast.options import SHORTEST_TTL, LockOptions, seconds, seconds_or_forever
from holdfast.protocol.effects import Command, Effects, StepFailed, call, call_on, close_connection, open_connection
from holdfast.protocol.hold import HELD, Hold
from holdfast.protocol.wait.cohort import ObjectSlot

Outcome: TypeAlias = Literal["won", "lost", "again"]
WON: Final = "won"
LOST: Final = "lost"  # wait a little, and try again
AGAIN: Final = "again"  # try again at once

_NEVER: Final = float("inf")

FORKED: Final = "it was acquired in another process or event loop, and stayed there"


class RecipeHold(Hold):
    """One acquisition of a recipe. It is in no lease registry: it is neither renewed nor cleaned up."""

    kind = "recipe"

    def __init__(self, keys: Keys, options: LockOptions, slot: ObjectSlot, driver: Any, rules: Algorithm) -> None:
        super().__init__(keys, options, slot)
        self.algorithm = rules
        self.value = ""  # what it wrote to its key, if that is no token
        self.connection: Any = None  # its dedicated connection, if it has one
        self.since = 0.0  # when acquire returned
        self._driver = driver
        self._generation = driver.generation

    @property
    def public_fence(self) -> None:
        return None

    def begin(self, asked_at: float, now: float) -> None:
        self.since = now
        self.lasts_until = self.deadline = asked_at + self.algorithm.valid_for
        self.phase = HELD

    def claim_release(self) -> bool:
        """Whether this caller is the one to release it; True for exactly one."""
        ender = object()
        return self.__dict__.setdefault("ended_by", ender) is ender

    def is_inherited(self) -> bool:
        """Whether it was acquired before a fork or in another event loop, so that it is not ours to release."""
        return bool(self._generation != self._driver.generation)

    def valid(self, now: float) -> bool:
        return super().valid(now) and not self.is_inherited()

    def why_lost(self, now: float) -> str:
        return FORKED if self.phase is HELD and self.is_inherited() else super().why_lost(now)

    def why_over(self) -> str:
        return f"its ttl of {rounded(self.algorithm.valid_for)} s ran out, and a recipe is not renewed"


# Options.


def option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """A field that is an option of the recipe: its default, and a check that converts a given value."""
    return field(default=default, metadata={"check": check})


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidConfig(f"{what}={shown(value)}", "give a str")
    return value


def one_of(*choices: Any) -> Callable[[str, Any], Any]:
    def check(what: str, value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise InvalidConfig(f"{what}={shown(value)}", f"give one of {', '.join(map(repr, choices))}")
        return value

    return check


def pause(default: float) -> Any:
    return option(default, seconds)


def prefixed(default: str) -> Any:
    return option(default, _text)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A lock without a ttl, and what all recipes have in common.

    wait: seconds that ``with`` waits (None: forever). sleep: seconds between two tries. prefix: of the key.
    """

    pitfall: ClassVar[str]  # shown by UnsafeRecipeWarning
    server: ClassVar[str] = "redis"
    logs_errors: ClassVar[bool] = False  # errors of acquire and release are logged; an acquire tries again
    checks_owner: ClassVar[bool] = False  # its release deletes only its own key, so it may be repeated

    wait: float | None = option(None, seconds_or_forever)
    sleep: float = pause(0.01)
    prefix: str = prefixed("")

    @property
    def valid_for(self) -> float:
        """For how many seconds it excludes others, by the clock that it uses."""
        return _NEVER

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        """Try once to acquire it."""
        raise NotImplementedError

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        """Release it; False if it was no longer ours. Most originals do not check that."""
        yield from call(Command(("DEL", hold.key)), timeout, shielded=True)
        return True

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        return bool((yield from call(Command(("EXISTS", key)), timeout)))

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        """Until when a key with that value and expiry excludes others, in microseconds since 1970; None: forever."""
        return expires_us


@dataclass(frozen=True, kw_only=True)
class Leased(Algorithm):
    """A lock that ends by itself after ``ttl`` seconds."""

    ttl: float = option(10.0, partial(seconds, least=SHORTEST_TTL))

    @property
    def valid_for(self) -> float:
        return self.ttl


@dataclass(frozen=True, kw_only=True)
class LeasedInSeconds(Leased):
    """The same, where the ttl is whole seconds, rounded up."""

    @property
    def whole_seconds(self) -> int:
        """The ttl as EX and EXPIRE take it."""
        return math.ceil(self.ttl)

    @property
    def valid_for(self) -> float:
        return self.whole_seconds


# Commands that need a dedicated connection.


def on_connection(hold: RecipeHold, timeout: float, *commands: Command) -> Effects[list[Any]]:
    """The replies to commands on the dedicated connection of this hold, which is opened if there is none."""
    if hold.connection is None:
        hold.connection = yield from open_connection(timeout)
    try:
        replies = yield from call_on(hold.connection, *commands, timeout=timeout)
    except StepFailed:
        yield from disconnect(hold)
        raise
    for reply in replies:
        if isinstance(reply, StepFailed):
            raise reply
    return replies


def disconnect(hold: RecipeHold) -> Effects[None]:
    connection, hold.connection = hold.connection, None
    if connection is not None:
        yield from close_connection(connection)
