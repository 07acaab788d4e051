"""One client of a search: a machine that runs a program and sees nothing except the inputs that it is fed.

Its inputs (replies, times, notifications, cancellations) determine what it does. It puts its requests and timers into
lists that the search reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Cancelled, Process, is_awaited
from holdfast.lab.simulation.programs import use_programs
from holdfast.lab.simulation.wakeup import Wakeup
from holdfast.lab.simulation.world import failed, silence
from holdfast.protocol.effects import Command, Step, StepFailed, wait
from holdfast.protocol.hold import HELD, LOST
from holdfast.protocol.intents.session import Session
from holdfast.protocol.kinds.parts import StepInParts, is_divisible
from holdfast.protocol.recipes.algorithm import RecipeHold

if TYPE_CHECKING:
    from holdfast.lab.search.state import Config

LISTEN = "listen"
Input = tuple[Any, ...]  # its kind, its time (us), and its content


class Request(NamedTuple):
    """A request on its way to the server, numbered by its machine."""

    number: int
    ops: tuple[Step | Command, ...]
    link: str | None = None
    listens: bool = False

    @property
    def confirms(self) -> bool:
        """Whether the reply comes only after replicas have all writes (WAIT)."""
        return any(isinstance(op, Command) and op.args[0] == "WAIT" for op in self.ops)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its steps or commands."""
        return tuple(op.script if isinstance(op, Step) else str(op.args[0]) for op in self.ops)

    @property
    def content(self) -> Any:
        """What the server sees: everything except the number."""
        return LISTEN if self.listens else (self.ops, self.link)


class Note(NamedTuple):
    """What a program did or learnt; ``invariants.history`` lists the kinds."""

    kind: str
    fence: int | None = None
    until_us: int | None = None  # a deadline, where there is one
    what: str = ""
    task: int = 0  # which of its tasks, if several want the same lock


class _Timer(NamedTuple):
    due_us: int
    number: int
    process: Process | None
    pending: object
    value: Any

    def is_stale(self) -> bool:
        return self.process is not None and not self.process.waits_for(self.pending)


class Site:
    """The world as one machine sees it. It has the interface of a ``World``, and does nothing by itself."""

    latency_us = 0
    hung = down = False

    def __init__(self, name: str, config: Config, skew_us: int = 0) -> None:
        self.now_us = 0
        self.config = config
        self.stage = "new"
        self.wants_us = 0
        self.notes: list[Note] = []
        self.requests: dict[int, tuple[Request, Callable[[Any], None]]] = {}
        self.links: list[str] = []  # open dedicated connections
        self.closed_links: list[tuple[str, tuple[Request, ...]]] = []
        self.granted_us = 0
        self.fence: int | None = None
        self.served = False  # it was granted the lock
        self.waiting = 0  # how many of its tasks wait, if it has several
        self.left = False  # it has left a hold that lasts on without it, or has handed one over
        self._timers: list[_Timer] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._count = 0
        # By task, from the return of acquire to the call of release, or to the loss: the lease, and its local deadline.
        self._held: dict[int, tuple[Any, int | None]] = {}
        self._lease: Any = None  # the latest
        self._leaving = Wakeup()
        self._process: Process | None = None
        self.machine = Machine(self, name)  # type: ignore[arg-type]
        self.machine.skew_us = skew_us
        use_programs(self.machine, config.new_store)

    # The interface of a World, for the machine.

    def _number(self) -> int:
        self._count += 1
        return self._count

    def at(self, when_us: int, action: Callable[[], None]) -> None:
        self._timers.append(_Timer(when_us, self._number(), None, None, action))

    def later(self, when_us: int, process: Process, pending: object, value: Any) -> None:
        self._timers.append(_Timer(when_us, self._number(), process, pending, value))

    def soon(self, action: Callable[[], None]) -> None:
        self._soon.append(action)

    def spawn(self, routine: Any, machine: Machine) -> Process:
        process = Process(machine, routine)
        self.soon(process.start)
        return process

    def send(
        self,
        machine: Machine,
        ops: Sequence[Step | Command],
        answer: Callable[[list[Any]], None],
        link: str | None = None,
    ) -> None:
        if self.config.divided and len(ops) == 1 and isinstance(ops[0], Step) and is_divisible(ops[0]):
            self._send_in_parts(StepInParts(ops[0], lambda key: ord(key[0])), answer)
            return
        number = self._number()
        self.requests[number] = Request(number, tuple(ops), link), answer

    def _send_in_parts(self, parts: StepInParts, answer: Callable[[list[Any]], None]) -> None:
        """Send the next part of a step, as the engine of a cluster does; after the last part, answer."""
        if parts.step is None:
            answer([parts.reply])
            return

        def go_on(replies: list[Any]) -> None:
            if isinstance(replies[0], StepFailed):
                answer(replies)
            elif is_awaited(answer):
                parts.answer(replies[0])
                self._send_in_parts(parts, answer)

        number = self._number()
        self.requests[number] = Request(number, (parts.step,)), go_on

    def listen(self, machine: Machine, answer: Callable[[Any], None]) -> None:
        def heard(replies: list[Any]) -> None:
            machine.router.armed = replies[0] is True
            answer(replies[0])

        number = self._number()
        self.requests[number] = Request(number, (), None, listens=True), heard

    def unsubscribe(self, machine: Machine) -> None:
        pass  # the search itself does that when the machine crashes

    def open_connection(self, machine: Machine) -> str:
        link = machine.new_link()
        self.links.append(link)
        return link

    def close_connection(self, link: str) -> None:
        """Close a dedicated connection; requests already sent over it stay under way, without a waiter."""
        unanswered = tuple(request for request, _ in self.requests.values() if request.link == link)
        for request in unanswered:
            del self.requests[request.number]
        self.links.remove(link)
        self.closed_links.append((link, unanswered))

    def silence(self, timeout: float) -> StepFailed:
        return silence(timeout)

    def _follow(self, request: Request, answer: Callable[[Any], None]) -> None:
        """Send a request that was not executed to another node, as the engine of a cluster does after MOVED."""
        number = self._number()
        self.requests[number] = request._replace(number=number), answer

    # Inputs.

    def feed(self, an_input: Input) -> None:
        kind, self.now_us = an_input[0], an_input[1]
        self.notes = []
        self.closed_links = []
        machine = self.machine
        if kind == "answer":
            _, answer = self.requests.pop(an_input[2])
            answer([_thawed(reply) for reply in an_input[3]])
        elif kind == "time":
            self._fire()
        elif kind == "bell":
            machine.hear(an_input[2])
        elif kind == "push":
            machine.notice(an_input[2])
        elif kind == "leave":
            self._leaving.wake()
        elif kind == "cut":
            machine.lose_listener()
        elif kind == "cancel":
            if self._process is not None:
                self._process.cancel()
        elif kind == "lose":
            self.requests.pop(an_input[2])
        elif kind == "redirect":
            self._follow(*self.requests.pop(an_input[2]))
        elif kind == "start":
            self._process = self.spawn(self.config.program(self), machine)
        self._drain()
        self._look_for_bugs()
        self._watch_the_leases()

    def _look_for_bugs(self) -> None:
        """Raise the error of a program that failed. Without this, a bug would go unnoticed: all invariants hold."""
        for process in self.machine.processes:
            if process.error is not None and not isinstance(process.error, Cancelled):
                raise process.error

    def _drain(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def _fire(self) -> None:
        while True:
            self._drain()
            due = [timer for timer in self._timers if timer.due_us <= self.now_us and not timer.is_stale()]
            if not due:
                return
            first = min(due)
            self._timers.remove(first)
            if first.process is None:
                first.value()
            else:
                first.process.answer(first.pending, first.value)

    def timers(self) -> tuple[int, ...]:
        """The times at which a timer of this client is due."""
        self._timers = [timer for timer in self._timers if not timer.is_stale()]
        return tuple(sorted({timer.due_us for timer in self._timers}))

    def shared_leases(self) -> frozenset[int]:
        """The leases of etcd that this client goes on renewing, if it uses other locks."""
        session = self.machine.session
        return frozenset(lease.id for lease in session.leases.values()) if isinstance(session, Session) else frozenset()

    def is_settled(self) -> bool:
        """Whether this client has no request under way, and no lost request that its keeper will send again."""
        keeper = self.machine.keeper
        return (
            not self.requests
            and not self.machine.registry.cleanups
            and (keeper is None or keeper.asleep or keeper.done)
        )

    def is_asleep(self) -> bool:
        return self._process is not None and self._process.asleep

    # For programs.

    def note(self, kind: str, **facts: Any) -> None:
        self.notes.append(Note(kind, **facts))

    @property
    def granted(self) -> bool:
        return bool(self._held)

    @property
    def until_us(self) -> int | None:
        """The local deadline of its lease; with several tasks, of the latest lease."""
        return next(reversed(self._held.values()))[1] if self._held else None

    def begin(self, lease: Any, task: int = 0, what: str = "") -> None:
        """Note that it holds this lease, and writes to the guarded resource."""
        self._held.pop(task, None)
        until_us = _deadline_us(lease)
        self._held[task] = lease, until_us
        self._lease = lease
        self.granted_us = self.now_us
        self.stage, self.served = "holds", True
        self.fence = lease.fence
        what = what or lease._hold.permit
        self.note("granted", fence=self.fence, until_us=until_us, what=what, task=task)
        self.note("writes", fence=self.fence, task=task)

    def stay(self) -> Generator[Any, Any, Any]:
        """Wait until it leaves, or until its stay is over."""
        return wait(self._leaving, (self.now_us + self.config.stay_us) / 1e6)

    def leave(self, lease: Any = None, task: int = 0) -> None:
        """Note that it writes once more, checks ``held``, and is about to release."""
        lease = self._lease if lease is None else lease
        self.note("writes", fence=lease.fence, task=task)
        if lease.held:
            self.note("believes", until_us=_own_count_us(lease), task=task)
        self._held.pop(task, None)
        self.stage = "leaves"
        self.note("leaves", task=task)

    def _watch_the_leases(self) -> None:
        """Note losses and extensions that the keeper has found."""
        for task, (lease, before_us) in list(self._held.items()):
            if lease._hold.phase is LOST:
                del self._held[task]
                self.note("lost", task=task)
            elif (until_us := _deadline_us(lease)) != before_us:
                self._held[task] = lease, until_us
                self.note("extended", until_us=until_us, task=task)

    def discard(self) -> None:
        """Drop the machine without clean-up."""
        self.machine.crash()


def _own_count_us(lease: Any) -> int | None:
    """The deadline that ``held`` compares with."""
    deadline: float = min(lease._hold.deadline, lease._hold.max_hold_ends)
    return math.ceil(deadline * 1e6) if deadline < float("inf") else None


def _deadline_us(lease: Any) -> int | None:
    """Until when the holder may rely on the lease; None without a local deadline (recipes have none)."""
    hold = lease._hold
    return _own_count_us(lease) if hold.phase is HELD and not isinstance(hold, RecipeHold) else None


class Failure(NamedTuple):
    """The failure of a step, as a value."""

    why: str
    sent: bool
    retry: bool
    connection_broke: bool = False
    silent: bool = False


def frozen(reply: Any) -> Any:
    """A reply as a hashable value."""
    if isinstance(reply, StepFailed):
        return Failure(str(reply.error), reply.sent, reply.retry, reply.connection_broke, reply.silent)
    return tuple(frozen(item) for item in reply) if isinstance(reply, list) else reply


def _thawed(reply: Any) -> Any:
    if isinstance(reply, Failure):
        return failed(
            reply.why, sent=reply.sent, retry=reply.retry, connection_broke=reply.connection_broke, silent=reply.silent
        )
    return [_thawed(item) for item in reply] if isinstance(reply, tuple) else reply
