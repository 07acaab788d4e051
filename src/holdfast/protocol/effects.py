"""What a protocol can ask for.

A protocol is a generator that yields effects. A driver performs each effect, with threads, with asyncio or in the lab,
and sends the result back. Only the functions at the end of this module yield to it; all else uses ``yield from``.

What a driver promises:

- ``Call`` runs one step on the server and sends its reply, or throws ``StepFailed``. It takes no longer than its
  timeout. A step that failed with ``sent`` may have taken effect, or may still do so.
- When the caller is interrupted (a cancelled task, Ctrl-C), ``Interrupted`` is thrown at once at the pending effect.
  Under asyncio a shielded ``Call`` may first finish, for 0.25 s at most; the cancellation is raised when the protocol
  ends. After ``Interrupted`` the protocol may still yield effects to clean up, which are shielded. Then it raises
  ``Interrupted`` again, and the driver raises what the caller expects.
- ``Wait`` ends at a wake-up or at ``until``. It does not say which, only what time it is then. Wake-ups are hints. One
  caller at a time waits for a Wakeup. A wake-up that comes before the wait is kept until the wait, or until ``clear``.
- ``Start`` runs another protocol beside this one. A protocol that waits long goes there, so that it delays no other.
- After ``Listen`` notifications reach this client's ``NotificationRouter``. So does the next write of another client to
  the lock of a step that was sent with ``watch``, if the server supports client tracking.
- Closing the generator without a throw simulates a crash: no clean-up may run. So protocols catch ``STOPPED``, never
  BaseException.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from holdfast.errors import HoldfastError, Unavailable
from holdfast.events import Event
from holdfast.protocol.replies import REPLIES, Malformed

if TYPE_CHECKING:
    from holdfast.protocol.hold import Hold

SCANNED: Final = 1000  # keys that one part of a scan looks at

T = TypeVar("T")


class Step(NamedTuple):
    """One atomic step on the server: a script of ``lua/`` by name, its keys and arguments.

    ``watch``: the server should report the next write of another client to a lock among the keys (client tracking).
    """

    script: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    watch: bool = False

    def __repr__(self) -> str:
        return f"<step {self.script} on {self.keys[0]!r}>"  # without the token: tracebacks may show locals


class Command(NamedTuple):
    """One plain command of the server, for what needs no script."""

    args: tuple[str | int, ...]


class StepFailed(Exception):
    """A step has no reply that can be used.

    ``sent``: it may have taken effect, or still may. ``retry``: another try may succeed. ``connection_broke``: no time
    was lost. ``ever_answered``: this server has answered before, else protocols wait for the client's timeout at most.
    ``silent``: no reply came in time. Set later: ``answered``, with an error; ``part`` of the step that failed.
    """

    def __init__(
        self,
        error: HoldfastError,
        *,
        sent: bool,
        retry: bool,
        connection_broke: bool = False,
        ever_answered: bool = True,
        silent: bool = False,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.sent = sent
        self.retry = retry
        self.connection_broke = connection_broke
        self.ever_answered = ever_answered
        self.silent = silent
        self.answered = False
        self.part: Step | Command | None = None


class Interrupted(BaseException):
    """The caller was cancelled. A BaseException, so that no ``except Exception`` swallows it."""


# Everything that can end a protocol early, except a crash. KeyboardInterrupt is here because a signal handler can raise
# it while the protocol's own code runs, where no driver can turn it into Interrupted.
STOPPED: Final = (Exception, Interrupted, KeyboardInterrupt, SystemExit)


class Wakeup(Protocol):
    """One caller sleeps on it; ``wake`` ends that sleep, or the next one if there is none.

    ``prewake`` says that ``wake`` will most likely follow at once. The caller may wake up for it, and find nothing.
    """

    caller: Hashable  # a weak reference to the thread or task that sleeps on it

    def wake(self) -> None: ...
    def prewake(self) -> None: ...
    def clear(self) -> None: ...


class Call(NamedTuple):
    """Run one step on the server."""

    step: Step | Command
    timeout: float
    shielded: bool


class CallEach(NamedTuple):
    """Run many steps in one go. The reply is a list with one entry per step: its reply, or its StepFailed."""

    steps: Sequence[Step | Command]
    timeout: float


class Scan(NamedTuple):
    """Find keys that match a pattern (as SCAN does), a part at a time, with bounded work for the server.

    ``cursor``: "" for the first part, then that of the last reply. The reply: the next cursor ("" after the last part),
    and the keys. A key that exists all the time is found at least once.
    """

    cursor: str
    pattern: str
    timeout: float

    @property
    def step(self) -> Command:
        return Command(("SCAN", self.cursor or "0", "MATCH", self.pattern, "COUNT", SCANNED))


class Wait(NamedTuple):
    """Sleep until the wake-up (if there is one) or until that time. The reply: what time it is."""

    wakeup: Wakeup | None
    until: float


class Listen(NamedTuple):
    """Start this client's subscriber, unless it is up. The reply: whether the server allows pub/sub.

    ``keys``: those of the lock that is waited for. In a cluster they say on which node to subscribe.
    """

    timeout: float
    keys: tuple[str, ...] = ()


class Now(NamedTuple):
    """What time is it? Seconds on a clock that never steps back and does not stop while the machine sleeps."""

    wall: bool = False  # since 1970 instead, by this machine's clock; only recipes rely on that


class OpenConnection(NamedTuple):
    """An exclusive connection, for commands that depend on each other (WATCH). The reply: its handle."""

    timeout: float


class CallOn(NamedTuple):
    """Send commands over a connection of OpenConnection, in one go. The reply: a list of replies and StepFaileds.

    If the connection is lost, StepFailed is thrown, and what the server remembered of it is gone.
    """

    connection: Any
    commands: tuple[Step | Command, ...]
    timeout: float


class CloseConnection(NamedTuple):
    """Close or return the connection. No reply."""

    connection: Any


class NewToken(NamedTuple):
    """A random token, with a readable part."""

    label: str


class Caller(NamedTuple):
    """The thread or asyncio task that runs this protocol."""


class DeferCleanup(NamedTuple):
    """Let the keeper remove what this hold may have left on the server."""

    hold: Hold


class ShowPresence(NamedTuple):
    """Let the keeper show the server that this waiter is alive, and wake the waiter when it should ask."""

    hold: Hold


class ReportLoss(NamedTuple):
    """Report to the holder that its lease is lost."""

    hold: Hold


class Start(NamedTuple):
    """Run that protocol beside this one, after those that were started with the same ``place``. No reply."""

    protocol: Effects[None]
    place: str


class Warn(NamedTuple):
    """Write a warning to the log."""

    message: str


class Report(NamedTuple):
    """Report an event to the log and to the hooks of ``on_event``."""

    event: Event


class Attach(NamedTuple):
    """A block that relies on this hold begins. The reply: its thread or task, and what the driver cancels on a loss."""

    hold: Hold


class Detach(NamedTuple):
    """The block ends with that error. The reply: the error without the driver's own cancellation, and whether the
    driver's cancellation ended the block."""

    hold: Hold
    block: Any
    error: BaseException | None


Effect: TypeAlias = (
    Call
    | CallEach
    | Scan
    | Wait
    | Listen
    | Now
    | NewToken
    | Caller
    | DeferCleanup
    | ShowPresence
    | ReportLoss
    | Start
    | Warn
    | Report
    | Attach
    | Detach
    | OpenConnection
    | CallOn
    | CloseConnection
)
Effects: TypeAlias = Generator[Effect, Any, T]

_NOW: Final = Now()
_WALL: Final = Now(wall=True)
_CALLER: Final = Caller()


def parsed(step: Step | Command, reply: Any) -> Any:
    """A raw reply as the value that its step declares in ``replies``; StepFailed if it does not have that shape."""
    name: Any = step[0] if type(step) is Step else step[0][0]  # the script, or the first word of a Command
    parse = REPLIES.get(name)
    if parse is None:
        return reply
    try:
        return parse(reply)
    except Malformed:
        error = Unavailable(
            {"the server": f"it sent an unexpected reply to {name!r}"},
            "Check that a Redis or Valkey server is there, and that no proxy changes what it answers",
        )
        # The outcome of the step is unknown. Another try may get a connection that works, so retry, but only for the
        # client's timeout (ever_answered=False).
        raise StepFailed(error, sent=True, retry=True, ever_answered=False) from None


def call(step: Step | Command, timeout: float, *, shielded: bool = False) -> Effects[Any]:
    """The reply to that step, parsed; StepFailed if there is no reply, or a malformed one."""
    return parsed(step, (yield Call(step, timeout, shielded)))


def call_each(steps: Sequence[Step | Command], timeout: float) -> Effects[list[Any]]:
    """For each step its reply, parsed, or its StepFailed."""
    replies: list[Any] = yield CallEach(steps, timeout)
    return [parsed_or_failed(step, reply) for step, reply in zip(steps, replies, strict=True)]


def parsed_or_failed(step: Step | Command, reply: Any) -> Any:
    try:
        return reply if isinstance(reply, StepFailed) else parsed(step, reply)
    except StepFailed as failed:
        return failed


def scan(cursor: str, pattern: str, timeout: float) -> Effects[tuple[str, list[bytes]]]:
    found: tuple[str, list[bytes]] = yield Scan(cursor, pattern, timeout)
    return found


def wait(wakeup: Wakeup | None, until: float) -> Effects[float]:
    now: float = yield Wait(wakeup, until)
    return now


def listen(timeout: float, keys: tuple[str, ...]) -> Effects[bool]:
    heard: bool = yield Listen(timeout, keys)
    return heard


def clock() -> Effects[float]:
    now: float = yield _NOW
    return now


def wall_clock() -> Effects[float]:
    now: float = yield _WALL
    return now


def open_connection(timeout: float) -> Effects[Any]:
    connection: Any = yield OpenConnection(timeout)
    return connection


def call_on(connection: Any, *commands: Step | Command, timeout: float) -> Effects[list[Any]]:
    replies: list[Any] = yield CallOn(connection, commands, timeout)
    return replies


def close_connection(connection: Any) -> Effects[None]:
    yield CloseConnection(connection)


def new_token(label: str) -> Effects[str]:
    token: str = yield NewToken(label)
    return token


def caller() -> Effects[Hashable]:
    found: Hashable = yield _CALLER
    return found


def defer_cleanup(hold: Hold) -> Effects[None]:
    yield DeferCleanup(hold)


def show_presence(hold: Hold) -> Effects[None]:
    yield ShowPresence(hold)


def report_loss(hold: Hold) -> Effects[None]:
    yield ReportLoss(hold)


def start(protocol: Effects[None], place: str) -> Effects[None]:
    yield Start(protocol, place)


def warn(message: str) -> Effects[None]:
    yield Warn(message)


def report(event: Event) -> Effects[None]:
    yield Report(event)


def ask_server(command: Command) -> Generator[Command, Any, Any]:
    """The reply to one command of a step that consists of several: see memcached.py. The engine sends the command."""
    return (yield command)


def attach(hold: Hold) -> Effects[tuple[Hashable, Any]]:
    block: tuple[Hashable, Any] = yield Attach(hold)
    return block


def detach(hold: Hold, block: Any, error: BaseException | None) -> Effects[tuple[BaseException | None, bool]]:
    left: tuple[BaseException | None, bool] = yield Detach(hold, block, error)
    return left
