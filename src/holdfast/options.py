"""Options and their limits. They are checked where they are given, before anything is sent."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any, Final, Generic, TypeAlias, TypedDict, TypeVar

from holdfast.errors import InvalidConfig, rounded, shown
from holdfast.names import check_namespace
from holdfast.translations import OF_ACQUIRE, OF_CLIENTS, OF_LOCKS, unknown_options
from holdfast.untrusted import MOST_CHARACTERS

SHORTEST_TTL: Final = 0.01
LONGEST: Final = 366 * 86_400.0
# Fences set aside for a holder that may pass its lease on within its process; must match lua/include/fence.lua.
FENCES: Final = 64
MAX_FENCE_FLOOR: Final = 8 * 10**15  # fences are below 2**53; this leaves room for 10**15 revisions of etcd

OnLost = Callable[[Any], object] | str | None  # a str only under asyncio


class Default:
    """The value of an option that is not given. Its text is shown in signatures."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


OF_ENGINE: Final = Default("2.0 on one server, else None")
OF_CLIENT: Final = Default("that of the client")
OF_LOCK: Final = Default("that of the lock")
Seconds: TypeAlias = float | timedelta
OutageWait: TypeAlias = Seconds | Default | None
C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


class HoldKeywords(TypedDict, Generic[C], total=False):
    """The options of every hold. C is the type of on_lost."""

    ttl: Seconds
    renew: bool
    max_hold: Seconds | None
    on_lost: C
    label: str
    outage_wait: OutageWait


class LockKeywords(HoldKeywords[C], Generic[C], total=False):
    """The options of ``lock`` except ``wait``, on which the type of its result depends."""

    cohort: int


class CommonKeywords(LockKeywords[Any], total=False):
    """All options of ``lock``."""

    wait: Seconds | None


class ClientKeywords(TypedDict, Generic[C], total=False):
    """The options of ``connect``. C is the type of on_lost."""

    namespace: str
    timeout: Seconds
    outage_wait: OutageWait
    fence_retention: Seconds
    cohort: int
    replicas: int | None
    fence_floor: int | None
    on_lost: C


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of a lock, in seconds; and values that follow from them, computed once for many locks."""

    ttl: float = 30.0
    wait: float | None = None
    renew: bool = True
    max_hold: float | None = None
    on_lost: Callable[[Any], object] | str | None = None
    label: str = ""
    cohort: int = 64
    timeout: float = 5.0
    outage_wait: float | None = None  # how long after contact was lost a call with a bounded wait goes on
    fence_retention: float = 3600.0
    replicas: int = 0  # how many must have a grant before it counts
    passes: bool = True  # the server sets fences aside, so that a lease can be passed on within a process
    fenced: bool = True  # the server gives out fences
    cancels: bool = False  # a loss cancels the body of ``async with``, in addition to what on_lost does
    ttl_ms: int = field(init=False)
    fences: int = field(init=False)  # how many the server sets aside: one for each holder of a cohort
    wire_args: tuple[str, str, str] = field(init=False)  # ttl, retention and fences, as arguments of a step
    validity: float = field(init=False)  # how long a holder may rely on a fresh ttl
    renewed_with: float = field(init=False)  # how much of its validity is left when it is renewed
    call_timeout: float = field(init=False)  # timeout of one step, unless the caller's wait ends earlier
    first_try: float = field(init=False)  # timeout of the first try at a step, which is short: a reply may be lost
    answer_time: float = field(init=False)  # the same, for a call that ends early in an outage

    def __post_init__(self) -> None:
        ttl_ms, retention_ms = round(self.ttl * 1000), round(self.fence_retention * 1000)
        fences = min(self.cohort + 1, FENCES) if self.passes else 1
        for name, value in (
            ("ttl_ms", ttl_ms),
            ("fences", fences),
            ("wire_args", (str(ttl_ms), str(retention_ms), str(fences))),
            ("validity", self.ttl - drift(self.ttl)),
            ("renewed_with", self.ttl * 2 / 3),
            # There must be time for a round trip, even if the ttl is very short.
            ("call_timeout", max(min(self.ttl / 3, self.timeout), min(0.1, self.timeout))),
            ("first_try", max(min(self.ttl, self.timeout) / 3, min(0.1, self.timeout))),
            ("answer_time", max(min(self.ttl, self.timeout, self._outage_wait()) / 3, min(0.1, self.timeout))),
        ):
            object.__setattr__(self, name, value)

    def _outage_wait(self) -> float:
        return math.inf if self.outage_wait is None else self.outage_wait


def drift(ttl: float) -> float:
    """How far our clock and the server's may drift apart within a ttl, plus the rounding to milliseconds."""
    return ttl * 0.01 + 0.002


def seconds(what: str, value: Any, *, least: float = 0.0, most: float = LONGEST) -> float:
    """A finite number of seconds within limits, also of a timedelta."""
    value = as_seconds(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidConfig(f"{what}={shown(value)}", "give a number of seconds, or a timedelta")
    if not least <= value <= most:  # NaN compares false
        limit = f"at most {rounded(most)}" if value > most else f"at least {rounded(least)}"
        raise InvalidConfig(f"{what}={shown(value)}", f"give {limit} seconds")
    return float(value)


def as_seconds(value: Any) -> Any:
    """The seconds of a timedelta; anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def seconds_or_forever(what: str, value: Any) -> float | None:
    """The same; None if there is no limit, which may also be written as infinity."""
    return None if value is None or value == math.inf else seconds(what, value)


def keywords_of(check: Callable[..., Any]) -> list[str]:
    """The names of its keyword-only arguments."""
    return [name for name, one in signature(check).parameters.items() if one.kind is Parameter.KEYWORD_ONLY]


def with_options_of(check: Callable[..., Any], *, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Show the keyword arguments of ``check`` in place of a method's ``**options``, in help() and inspect.signature."""

    def decorate(method: F) -> F:
        own = signature(method)
        named = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        hidden = {*own.parameters, *without}
        options = [signature(check).parameters[name] for name in keywords_of(check) if name not in hidden]
        method.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return method

    return decorate


def lock_options(
    shared: LockOptions,
    choices: tuple[str, ...],
    /,
    *,
    ttl: Seconds = 30.0,
    wait: Seconds | None = None,
    renew: bool = True,
    max_hold: Seconds | None = None,
    on_lost: OnLost = None,
    label: str = "",
    cohort: int = 64,
    outage_wait: OutageWait = OF_CLIENT,
    **unknown: Any,
) -> LockOptions:
    """The checked options of one lock. All locks of a client share ``shared``; on_lost may be one of ``choices``."""
    if unknown:
        raise unknown_options("a lock", unknown, keywords_of(lock_options), OF_LOCKS)
    own, default = _check_on_lost(on_lost, choices), shared.on_lost
    return LockOptions(
        ttl=seconds("ttl", ttl, least=SHORTEST_TTL),
        wait=seconds_or_forever("wait", wait),
        renew=_yes_or_no("renew", renew),
        max_hold=None if max_hold is None else seconds("max_hold", max_hold, least=SHORTEST_TTL),
        on_lost=default if own is None else own,
        label=checked_label(label),
        cohort=min(shared.cohort, whole("cohort", cohort)),
        timeout=shared.timeout,
        outage_wait=checked_outage_wait(outage_wait, shared.outage_wait),
        fence_retention=shared.fence_retention,
        replicas=shared.replicas,
        passes=shared.passes,
        fenced=shared.fenced,
        cancels=own == "cancel" or (own is None and "cancel" in choices and default != "ignore"),
    )


def _yes_or_no(what: str, value: Any) -> bool:
    if not isinstance(value, bool | int):
        raise InvalidConfig(f"{what}={shown(value)}", "give True or False")
    return bool(value)


def checked_outage_wait(given: Any, default: float | None) -> float | None:
    return default if isinstance(given, Default) else seconds_or_forever("outage_wait", given)


def checked_label(label: str) -> str:
    if not isinstance(label, str) or len(label) > MOST_CHARACTERS:
        raise InvalidConfig(f"label={shown(label)}", f"give a text of at most {MOST_CHARACTERS} characters")
    if any("\ud800" <= char <= "\udfff" for char in label):
        raise InvalidConfig(f"label={shown(label)}", "give a text without lone surrogates")
    return label


def _check_on_lost(on_lost: Any, choices: tuple[str, ...]) -> Any:
    if iscoroutinefunction(on_lost) and not choices:
        raise InvalidConfig(f"on_lost={shown(on_lost)}", "a coroutine function never runs here: use holdfast.aio")
    if callable(on_lost) or on_lost in (None, *choices):
        return on_lost
    valid = "a callable that takes the lease" + "".join(f", or {one!r}" for one in choices)
    raise InvalidConfig(f"on_lost={shown(on_lost)}", f"give {valid}")


def client_options(
    *,
    namespace: str = "",
    timeout: Seconds = 5.0,
    outage_wait: OutageWait = OF_ENGINE,
    fence_retention: Seconds = 3600.0,
    cohort: int = 64,
    replicas: int | None = None,
    fence_floor: int | None = None,
    on_lost: Any = None,
    passes: bool = True,
    fenced: bool = True,
    choices: tuple[str, ...] = (),
) -> LockOptions:
    """The checked options of ``connect`` that all locks of a client share; the others are only checked.

    The last three are facts of the engine and of the face.
    """
    check_namespace(namespace)
    if fence_floor is not None:
        whole("fence_floor", fence_floor, most=MAX_FENCE_FLOOR)
    return LockOptions(
        on_lost=_check_on_lost(on_lost, choices),
        cohort=whole("cohort", cohort),
        timeout=seconds("timeout", timeout, least=0.01, most=3600.0),
        outage_wait=checked_outage_wait(outage_wait, None),
        fence_retention=seconds("fence_retention", fence_retention, least=1.0),
        replicas=0 if replicas is None else whole("replicas", replicas),
        passes=passes,
        fenced=fenced,
    )


def with_fixed(subject: str, given: Mapping[str, Any], **fixed: Any) -> dict[str, Any]:
    """The options of a lock, some of which are ``fixed``: for the caller these do not exist."""
    if unknown := {name: value for name, value in given.items() if name in fixed}:
        known = [name for name in keywords_of(lock_options) if name not in fixed]
        raise unknown_options(subject, unknown, known)
    return {**given, **fixed}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise UnknownOption if ``connect`` does not have one of these options."""
    known = ClientKeywords.__annotations__
    if unknown := {name: value for name, value in options.items() if name not in known}:
        raise unknown_options("connect()", unknown, [*known, "on_event"], OF_CLIENTS)


def whole(what: str, value: Any, *, least: int = 0, most: int = 1_000_000) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidConfig(f"{what}={shown(value)}", f"give a whole number from {least} to {most}")
    return value


def patience(
    blocking: bool,
    timeout: Seconds,
    own: float | None,
    /,
    *,
    wait: Seconds | Default | None = OF_LOCK,
    **unknown: Any,
) -> float | None:
    """Seconds that ``acquire(blocking, timeout)`` waits (None: forever), checked as threading.Lock does.

    Without a timeout, that is the lock's ``own`` wait. ``wait`` replaces both: it is that of ``lock``.
    """
    if unknown:
        known = ["blocking", "timeout", *keywords_of(patience)]
        raise unknown_options("acquire()", unknown, known, OF_ACQUIRE)
    if wait is not OF_LOCK:
        if not blocking or timeout != -1:
            raise InvalidConfig(f"acquire(wait={shown(wait)}) with blocking or timeout", "give wait alone")
        return seconds_or_forever("wait", wait)
    if timeout == -1:
        return own if blocking else 0.0
    if not blocking:
        raise InvalidConfig(f"acquire(blocking=False, timeout={shown(timeout)})", "give one of the two")
    limit: float = as_seconds(timeout)
    if not limit >= 0:
        raise InvalidConfig(
            f"acquire(timeout={shown(limit)})", "give at least 0 seconds, or -1 for the lock's own wait"
        )
    if limit > threading.TIMEOUT_MAX:
        raise OverflowError(f"timeout={shown(limit)} is more than threading.TIMEOUT_MAX")
    return float(limit)
