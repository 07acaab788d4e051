"""One client of a search: a machine with a visitor on it, cut off from everything but the inputs that it is fed.

Whatever it does is decided by these inputs: replies, times, bells, cancellations. What it wants done, it leaves in
lists that the search looks through.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

from holdfast.lab.machine import Cancelled, Machine, Process
from holdfast.lab.waiting import Bell
from holdfast.lab.world import failed, silence
from holdfast.lease import HELD, LOST
from holdfast.protocol.effects import Command, Step, StepFailed, wait
from holdfast.protocol.recipes.scheme import Turn

__all__ = ["LISTEN", "Failure", "Input", "Note", "Request", "Site", "Visit", "frozen"]

LISTEN = "listen"
Input = tuple[Any, ...]  # its kind, when it comes (in us), and what it brings


class Request(NamedTuple):
    """Something on its way to the server; the number is its machine's own count."""

    number: int
    ops: tuple[Step | Command, ...]
    link: str | None = None
    listens: bool = False

    @property
    def content(self) -> Any:
        """All but the number: what the server gets to see."""
        return LISTEN if self.listens else (self.ops, self.link)


class Note(NamedTuple):
    """Something that a visitor did or learnt; see ``check`` for the kinds."""

    kind: str
    fence: int | None = None
    until_us: int | None = None  # a deadline, where there is one
    what: str = ""
    task: int = 0  # which of its tasks did, where several want the same


class Visit(NamedTuple):
    """What a client of a search does; see ``visits``."""

    program: Callable[[Site], Coroutine[Any, Any, None]]
    make_lock: Callable[[Any], Any]  # given a driver
    patience: float | None = None
    stay_us: int = 2_000_000  # at most; it may leave at any time before


class _Held:
    """A lease that a task has, and until when that may rely on it."""

    __slots__ = ("lease", "until_us")

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.until_us = _deadline_us(lease)


class _Timer(NamedTuple):
    due_us: int
    number: int
    process: Process | None
    pending: object
    value: Any

    def is_stale(self) -> bool:
        return self.process is not None and not self.process.waits_for(self.pending)


class Site:
    """The world as one machine sees it. It has the face of a ``World``, and does nothing by itself."""

    latency_us = 0
    hung = down = False

    def __init__(self, name: str, visit: Visit, skew_us: int = 0) -> None:
        self.now_us = 0
        self.visit = visit
        self.stage = "new"
        self.wants_us = 0
        self.notes: list[Note] = []
        self.requests: dict[int, tuple[Request, Callable[[Any], None]]] = {}
        self.links: list[str] = []  # open ones
        self.closed_links: list[tuple[str, tuple[Request, ...]]] = []
        self.granted_us = 0
        self.fence: int | None = None
        self.served = False  # it got what it came for
        self.waiting = 0  # how many of its tasks wait, where that is not always one
        self._timers: list[_Timer] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._count = 0
        self._held: dict[int, _Held] = {}  # by task, from acquire's return to release's call or its loss
        self._lease: Any = None  # the latest
        self._bell = Bell()
        self._process: Process | None = None
        self.machine = Machine(self, name)  # type: ignore[arg-type]
        self.machine.skew_us = skew_us

    # What a machine asks of its world.

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
        number = self._number()
        self.requests[number] = Request(number, tuple(ops), link), answer

    def listen(self, machine: Machine, answer: Callable[[Any], None]) -> None:
        def heard(replies: list[Any]) -> None:
            machine.board.armed = replies[0] is True
            answer(replies[0])

        number = self._number()
        self.requests[number] = Request(number, (), None, listens=True), heard

    def unsubscribe(self, machine: Machine) -> None:
        pass  # whoever lets the machine crash sees to that

    def open_link(self, machine: Machine) -> str:
        link = machine.new_link()
        self.links.append(link)
        return link

    def close_link(self, link: str) -> None:
        """What was sent over it before is still on its way, but nobody waits for the answer."""
        unanswered = tuple(request for request, _ in self.requests.values() if request.link == link)
        for request in unanswered:
            del self.requests[request.number]
        self.links.remove(link)
        self.closed_links.append((link, unanswered))

    def refused(self) -> StepFailed:
        return failed("nothing listens there", sent=False)

    def silence(self, timeout: float) -> StepFailed:
        return silence(timeout)

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
            self._bell.ring()
        elif kind == "cut":
            machine.lose_listener()
        elif kind == "cancel":
            if self._process is not None:
                self._process.cancel()
        elif kind == "lose":
            self.requests.pop(an_input[2])
        elif kind == "start":
            self._process = self.spawn(self.visit.program(self), machine)
        self._drain()
        self._look_for_bugs()
        self._watch_the_leases()

    def _look_for_bugs(self) -> None:
        """A client that a mistake in its program has ended does no wrong any more, and all would seem to hold."""
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
        """When something is due here."""
        self._timers = [timer for timer in self._timers if not timer.is_stale()]
        return tuple(sorted({timer.due_us for timer in self._timers}))

    def is_settled(self) -> bool:
        """Whether nothing that this client has begun is still under way: also no request of its keeper's that was lost,
        and will be sent again."""
        keeper = self.machine.keeper
        return not self.requests and not self.machine.book.chores and (keeper is None or keeper.asleep or keeper.done)

    def is_asleep(self) -> bool:
        return self._process is not None and self._process.asleep

    # What the program of its visitor uses.

    def note(self, kind: str, **facts: Any) -> None:
        self.notes.append(Note(kind, **facts))

    @property
    def granted(self) -> bool:
        return bool(self._held)

    @property
    def until_us(self) -> int | None:
        """Until when it may rely on its lease, or on the last that one of its tasks has obtained."""
        return next(reversed(self._held.values())).until_us if self._held else None

    def begin(self, lease: Any, task: int = 0, what: str = "") -> None:
        """It has this lease now, and at once writes to what it guards."""
        self._held.pop(task, None)
        held = self._held[task] = _Held(lease)
        self._lease = lease
        self.granted_us = self.now_us
        self.stage, self.served = "holds", True
        self.fence = lease.fence
        what = what or getattr(lease._hold, "place", "")
        self.note("granted", fence=self.fence, until_us=held.until_us, what=what, task=task)
        self.note("writes", fence=self.fence, task=task)

    def stay(self) -> Generator[Any, Any, Any]:
        """Until it leaves, which it may do at any time; or until its stay is over."""
        return wait(self._bell, (self.now_us + self.visit.stay_us) / 1e6)

    def leave(self, lease: Any = None, task: int = 0) -> None:
        """It writes once more, looks whether it still has the lease, and is about to give it back."""
        lease = self._lease if lease is None else lease
        self.note("writes", fence=lease.fence, task=task)
        if lease.held:
            self.note("believes", until_us=_own_count_us(lease), task=task)
        self._held.pop(task, None)
        self.stage = "leaves"
        self.note("leaves", task=task)

    def _watch_the_leases(self) -> None:
        """Note what the keeper has found out behind the holders' backs."""
        for task, held in list(self._held.items()):
            if held.lease._hold.phase is LOST:
                del self._held[task]
                self.note("lost", task=task)
                continue
            until_us = _deadline_us(held.lease)
            if until_us != held.until_us:
                held.until_us = until_us
                self.note("extended", until_us=until_us, task=task)

    def discard(self) -> None:
        """Let go of the machine without a word."""
        self.machine.crash()


def _own_count_us(lease: Any) -> int | None:
    """What ``held`` goes by."""
    deadline: float = min(lease._hold.deadline, lease._hold.ends)
    return math.ceil(deadline * 1e6) if deadline < float("inf") else None


def _deadline_us(lease: Any) -> int | None:
    """Until when the holder may rely on it; None where the protocol keeps no count of its own, as no recipe does."""
    hold = lease._hold
    return _own_count_us(lease) if hold.phase is HELD and not isinstance(hold, Turn) else None


class Failure(NamedTuple):
    """That a step failed, as a value."""

    why: str
    sent: bool
    retry: bool
    prompt: bool = False
    silent: bool = False


def frozen(reply: Any) -> Any:
    """A reply as something that is the same whenever it says the same."""
    if isinstance(reply, StepFailed):
        return Failure(str(reply.error), reply.sent, reply.retry, reply.prompt, reply.silent)
    return tuple(frozen(item) for item in reply) if isinstance(reply, list) else reply


def _thawed(reply: Any) -> Any:
    if isinstance(reply, Failure):
        return failed(reply.why, sent=reply.sent, retry=reply.retry, prompt=reply.prompt, silent=reply.silent)
    return [_thawed(item) for item in reply] if isinstance(reply, tuple) else reply
