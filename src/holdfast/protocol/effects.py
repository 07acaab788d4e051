"""What a protocol can ask for.

A protocol is a generator. It yields effects and is sent their results; a driver performs them: with threads, with
asyncio, or in the simulated world of the lab. The functions at the end of this module are the only ones that yield
to the driver; everything else reaches it by ``yield from``.

What a driver promises:

- ``Call`` runs one step on the server and sends its reply, or throws ``StepFailed``. It takes no longer than its
  timeout. A step that failed with ``sent`` may have taken effect, or may still do so.
- When the caller is interrupted (a cancelled task, Ctrl-C), ``Interrupted`` is thrown at the pending effect, at once,
  unless that is a shielded ``Call``: under asyncio it is allowed to finish, for its own (short) timeout, and the
  cancellation surfaces when the protocol ends. After ``Interrupted`` the protocol may still yield; what it yields
  to clean up is shielded. Then it raises ``Interrupted`` again, and the driver raises what the caller expects.
- ``Wait`` ends when the bell rings or the time has come; it does not say which, only what time it is then. Wake-ups
  are hints. A bell is waited at by one caller at a time, and a ring that nobody waited for is kept until the next wait
  or ``clear``.
- After ``Listen`` the server's bells reach this client's ``Switchboard``, and so does the next write of anybody else to
  the first key of a step that was sent with ``watch``, where the server offers that.
- A generator that is closed without a throw has crashed: no clean-up runs. So protocols catch ``STOPPED``, never
  BaseException.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Hashable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from holdfast.errors import HoldfastError, Unavailable
from holdfast.lease import Hold
from holdfast.protocol.replies import REPLIES, Malformed

__all__ = [
    "STOPPED",
    "Attach",
    "Attend",
    "Bell",
    "Call",
    "CallEach",
    "CallOn",
    "Caller",
    "CloseLink",
    "Command",
    "Detach",
    "Effect",
    "Effects",
    "Entrust",
    "Interrupted",
    "Listen",
    "NewToken",
    "Now",
    "OpenLink",
    "Step",
    "StepFailed",
    "Tell",
    "Wait",
    "Warn",
    "attach",
    "attend",
    "call",
    "call_each",
    "call_on",
    "caller",
    "clock",
    "close_link",
    "detach",
    "entrust",
    "is_begun",
    "is_over",
    "listen",
    "new_token",
    "open_link",
    "parsed",
    "tell",
    "wait",
    "wall_clock",
    "warn",
]

T = TypeVar("T")


class Step(NamedTuple):
    """One atomic step on the server: a script of ``lua/`` by name, its keys and arguments.

    ``watch``: from then on the server should tell us when anybody else writes a lock that is among the keys; once.
    """

    script: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    watch: bool = False

    def __repr__(self) -> str:
        return f"<step {self.script} on {self.keys[0]!r}>"  # the rest holds the token, and tracebacks may show locals


class Command(NamedTuple):
    """One plain command of the server, for what needs no script."""

    args: tuple[str | int, ...]


class StepFailed(Exception):
    """A step brought no reply.

    ``sent``: it may have taken effect all the same, or still will. ``retry``: another try may succeed. ``prompt``: the
    connection broke, which took no time, and another may be had at once. ``met``: this server has answered us before;
    one that never has is not worth more than the client's timeout. ``silent``: nothing came for as long as that was
    waited for.
    """

    def __init__(
        self,
        error: HoldfastError,
        *,
        sent: bool,
        retry: bool,
        prompt: bool = False,
        met: bool = True,
        silent: bool = False,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.sent = sent
        self.retry = retry
        self.prompt = prompt
        self.met = met
        self.silent = silent


class Interrupted(BaseException):
    """The caller was cancelled. A BaseException, so that no ``except Exception`` swallows it."""


# Whatever ends a protocol early, short of a crash. KeyboardInterrupt is here because a signal handler can raise it
# while the protocol's own code runs, where no driver stands between to turn it into Interrupted.
STOPPED: Final = (Exception, Interrupted, KeyboardInterrupt, SystemExit)


class Bell(Protocol):
    """Something to wait at. Ringing is idempotent until it is cleared.

    ``stir`` says that it will most likely be rung in a moment. Whoever waits may wake up for that, and find nothing.
    """

    def ring(self) -> None: ...
    def stir(self) -> None: ...
    def clear(self) -> None: ...


class Call(NamedTuple):
    """Run one step on the server."""

    step: Step | Command
    timeout: float
    shielded: bool


class CallEach(NamedTuple):
    """Run many steps in one go. The reply is a list with, for each, its reply or the StepFailed."""

    steps: Sequence[Step]
    timeout: float


class Wait(NamedTuple):
    """Sleep until the bell rings (if there is one) or the time has come. The reply: what time it is."""

    bell: Bell | None
    until: float


class Listen(NamedTuple):
    """Arm this client's listener, unless it is. The reply: whether bells can be heard on this server at all."""

    timeout: float


class Now(NamedTuple):
    """What time is it? Seconds on a clock that never steps back and does not stop while the machine sleeps.

    ``wall``: since 1970 instead, by whatever this machine believes. Only locks of history ask for that.
    """

    wall: bool = False


class OpenLink(NamedTuple):
    """A connection of one's own, for commands that need the same one (WATCH). The reply: something to name it by."""

    timeout: float


class CallOn(NamedTuple):
    """Send commands over a link, in one go. The reply: a list with the reply of each; an error is a StepFailed in it.

    If the link is lost, StepFailed is thrown, and whatever the server remembered of the link is gone with it.
    """

    link: Any
    commands: tuple[Command, ...]
    timeout: float


class CloseLink(NamedTuple):
    """Give the link up. No reply."""

    link: Any


class NewToken(NamedTuple):
    """A token that nobody can guess, with a readable part."""

    label: str


class Caller(NamedTuple):
    """Who is asking: the thread, or the asyncio task."""


class Entrust(NamedTuple):
    """Let the keeper see to it that this hold leaves nothing behind on the server."""

    hold: Hold


class Attend(NamedTuple):
    """Let the keeper show the server that this waiter is alive, and wake it when it should ask."""

    hold: Hold


class Tell(NamedTuple):
    """Let the holder know that its lease is lost."""

    hold: Hold


class Warn(NamedTuple):
    """Let people know, in the log."""

    message: str


class Attach(NamedTuple):
    """A block begins that relies on this hold. The reply: who runs it, and what the driver would cancel on loss."""

    hold: Hold


class Detach(NamedTuple):
    """The block ends, with that error. The reply: the error, less a cancellation of the driver's, and if that was."""

    hold: Hold
    block: Any
    error: BaseException | None


Effect: TypeAlias = (
    Call
    | CallEach
    | Wait
    | Listen
    | Now
    | NewToken
    | Caller
    | Entrust
    | Attend
    | Tell
    | Warn
    | Attach
    | Detach
    | OpenLink
    | CallOn
    | CloseLink
)
Effects: TypeAlias = Generator[Effect, Any, T]

_NOW: Final = Now()
_WALL: Final = Now(wall=True)
_CALLER: Final = Caller()


def is_over(protocol: Effects[Any]) -> bool:
    """Whether it has ended, so that an exception seen by a driver is its own and not that of an effect."""
    return getattr(protocol, "gi_frame", None) is None


def is_begun(protocol: Effects[Any]) -> bool:
    """Whether any of its code has run."""
    return inspect.getgeneratorstate(protocol) != inspect.GEN_CREATED


def parsed(step: Step | Command, reply: Any) -> Any:
    """A raw reply as the value that its step declares in ``replies``; StepFailed if it is none."""
    name: Any = step[0] if type(step) is Step else step[0][0]  # the script, or the first word of a Command
    parse = REPLIES.get(name)
    if parse is None:
        return reply
    try:
        return parse(reply)
    except Malformed:
        error = Unavailable(
            {"the server": f"it answered {name!r} with something that is no reply to that"},
            "Check that a Redis or Valkey server is there, and that no proxy changes what it answers",
        )
        # What the step did is not known. Another try may find a connection that is in order, but not for ever.
        raise StepFailed(error, sent=True, retry=True, met=False) from None


# As a NamedTuple makes itself, less the sorting out of its arguments, which takes longer than the making.
_make: Final[Any] = tuple.__new__


def call(step: Step | Command, timeout: float, *, shielded: bool = False) -> Effects[Any]:
    """The reply to that step, parsed; StepFailed if there is none, or if it is no reply to that step."""
    return parsed(step, (yield _make(Call, (step, timeout, shielded))))


def call_each(steps: Sequence[Step], timeout: float) -> Effects[list[Any]]:
    """For each step its reply, parsed, or its StepFailed."""
    replies: list[Any] = yield CallEach(steps, timeout)
    return [_parsed_or_failed(step, reply) for step, reply in zip(steps, replies, strict=True)]


def _parsed_or_failed(step: Step, reply: Any) -> Any:
    try:
        return reply if isinstance(reply, StepFailed) else parsed(step, reply)
    except StepFailed as failed:
        return failed


def wait(bell: Bell | None, until: float) -> Effects[float]:
    now: float = yield _make(Wait, (bell, until))
    return now


def listen(timeout: float) -> Effects[bool]:
    heard: bool = yield Listen(timeout)
    return heard


def clock() -> Effects[float]:
    now: float = yield _NOW
    return now


def wall_clock() -> Effects[float]:
    now: float = yield _WALL
    return now


def open_link(timeout: float) -> Effects[Any]:
    link: Any = yield OpenLink(timeout)
    return link


def call_on(link: Any, *commands: Command, timeout: float) -> Effects[list[Any]]:
    replies: list[Any] = yield CallOn(link, commands, timeout)
    return replies


def close_link(link: Any) -> Effects[None]:
    yield CloseLink(link)


def new_token(label: str) -> Effects[str]:
    token: str = yield _make(NewToken, (label,))
    return token


def caller() -> Effects[Hashable]:
    who: Hashable = yield _CALLER
    return who


def entrust(hold: Hold) -> Effects[None]:
    yield Entrust(hold)


def attend(hold: Hold) -> Effects[None]:
    yield Attend(hold)


def tell(hold: Hold) -> Effects[None]:
    yield Tell(hold)


def warn(message: str) -> Effects[None]:
    yield Warn(message)


def attach(hold: Hold) -> Effects[tuple[Hashable, Any]]:
    block: tuple[Hashable, Any] = yield _make(Attach, (hold,))
    return block


def detach(hold: Hold, block: Any, error: BaseException | None) -> Effects[tuple[BaseException | None, bool]]:
    left: tuple[BaseException | None, bool] = yield _make(Detach, (hold, block, error))
    return left
