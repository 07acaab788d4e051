"""A simulated world: one server, some machines, messages between them, and a virtual clock.

The world is a queue of events in virtual time. Machines run the same generators as the real drivers do; their steps
travel as messages to a ``Store``, which runs the .lua files of production. Nothing happens between two events, so a run
is determined by the order of events and by ``fate``, which says of each message whether it is delivered, lost or late,
or whether its sender crashes.

Time is counted in whole microseconds, so that no rounding decides the order of events. Local work takes no time;
messages take ``latency_us`` each way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import Unavailable
from holdfast.lab.servers.lua import NOT_LOCAL
from holdfast.lab.servers.store import ReplyError, Status, Store
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Process
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.replies import fence_error

_KEY: Final = 5  # the index of the refusing key in the reply of a lock on several names


class Stuck(Exception):
    """No event is left, but a process still waits."""


class Message(NamedTuple):
    """Steps on their way to the server; ``number`` counts all messages of the world."""

    number: int
    machine: Machine
    ops: Sequence[Step | Command]


class Fate(NamedTuple):
    """What becomes of a message, or of a notification."""

    lost: bool = False  # never executed
    late_us: int = 0  # executed this much later, even if its sender has given up by then
    again_us: int = 0  # executed a second time, this much later
    reply_lost: bool = False
    reply_late_us: int = 0  # its reply arrives this much later; notifications sent meanwhile overtake the reply
    sender_crashes: str = ""  # "before" or "after" it was executed


DELIVERED = Fate()


def perform(store: Store, op: Step | Command, link: str | None = None) -> Any:
    """The reply to one step on a store, as an engine returns it; or the failure."""
    if isinstance(op, Command):
        run = store.execute if link is None else store.session(link).execute
        reply = run(*op.args)
    else:
        script = SCRIPTS[op.script]
        reply = store.execute("EVALSHA", script.sha, len(op.keys), *op.keys, *op.args)
        if isinstance(reply, ReplyError) and reply.message.startswith("NOSCRIPT"):
            reply = store.execute("EVAL", script.source, len(op.keys), *op.keys, *op.args)
    if isinstance(reply, ReplyError):
        if refused := fence_error(reply.message):
            return StepFailed(refused, sent=False, retry=False)
        in_the_middle = NOT_LOCAL in reply.message
        retry = in_the_middle or reply.code in ("OOM", "TRYAGAIN")
        refusal = failed(f"it answered {reply.code}", sent=in_the_middle, retry=retry)
        refusal.answered = True
        return refusal
    return str(reply).encode() if isinstance(reply, Status) else reply


def watched_keys(step: Step, reply: Any) -> list[bytes]:
    """The keys whose next write is pushed to the sender of a step with ``watch``.

    A real server tracks all keys that the step has read. Clients ignore side keys and, for a lock on several names, all
    keys but the refusing one.
    """
    if isinstance(reply, list | tuple) and len(reply) > _KEY and isinstance(reply[_KEY], bytes):
        return [reply[_KEY]]
    return [key.encode() for key in step.keys if key == step.keys[0] or ":hf1:" not in key]


def failed(
    why: str, *, sent: bool, retry: bool = True, connection_broke: bool = False, silent: bool = False
) -> StepFailed:
    error = Unavailable({"the world's server": why}, "See the world's faults")
    return StepFailed(error, sent=sent, retry=retry, connection_broke=connection_broke, silent=silent)


def silence(timeout: float) -> StepFailed:
    return failed(f"it did not answer within {timeout:.3g} s", sent=True, silent=True)


class World:
    def __init__(self, *, seed: int | None = None, latency_us: int = 100) -> None:
        self.store = Store()
        self.now_us = 0
        self.latency_us = latency_us
        self.fate: Callable[[Message], Fate] = lambda message: DELIVERED
        self.fate_of_notification: Callable[[int], Fate] = lambda number: DELIVERED
        self.notifications_sent = 0  # how many notifications were sent
        self.no_pubsub = False  # the server forbids pub/sub
        self.cut_subscriptions = 0  # how many attempts to subscribe are still to be cut
        self.tracking = True  # the server has client tracking
        self.sent: list[Message] = []
        self.hung = False  # the server reads nothing; requests wait
        self.down = False  # connections are refused
        self._listening: dict[bytes, Machine] = {}  # by channel
        self._tracked: dict[bytes, set[Machine]] = {}  # by key: the machines that are told of its next write
        self._kept_waiting: list[Callable[[], None]] = []
        self._events: list[tuple[int, float, int, Callable[[], None]]] = []
        self._count = 0
        self._machines = 0
        # With a seed, events that are due at the same time happen in random order; else in the order of requests.
        self._dice = random.Random(seed) if seed is not None else None

    def machine(self, name: str = "") -> Machine:
        self._machines += 1
        return Machine(self, name or f"m{self._machines}")

    # Time.

    def at(self, when_us: int, action: Callable[[], None]) -> None:
        self._count += 1
        order = self._dice.random() if self._dice else 0.0
        heapq.heappush(self._events, (max(when_us, self.now_us), order, self._count, action))

    def soon(self, action: Callable[[], None]) -> None:
        self.at(self.now_us, action)

    def later(self, when_us: int, process: Process, pending: object, value: Any) -> None:
        """Answer that process at that time, if it still waits for ``pending``."""
        self.at(when_us, lambda: process.answer(pending, value))

    def advance(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        when_us, _, _, action = heapq.heappop(self._events)
        self.store.now_us += when_us - self.now_us
        self.now_us = when_us
        action()
        return True

    def run(self, process: Process | None = None, *, seconds: float = 3600.0) -> Any:
        """Run until the process has ended; returns its result or raises its error. Without a process, let time pass."""
        end_us = self.now_us + round(seconds * 1e6)
        while process is None or not process.done:
            if not self._events or self._events[0][0] > end_us:
                if process is None:
                    self.store.now_us += end_us - self.now_us
                    self.now_us = end_us
                    return None
                raise Stuck(f"{process} is still waiting after {seconds} s of the world's time")
            self.advance()
        return process.outcome()

    def spawn(self, routine: Any, machine: Machine | None = None) -> Process:
        """Start a process: a coroutine that awaits protocols, or a protocol itself."""
        process = Process(machine or self.machine(), routine)
        self.soon(process.start)
        return process

    # Messages.

    def send(
        self,
        machine: Machine,
        ops: Sequence[Step | Command],
        answer: Callable[[list[Any]], None],
        link: str | None = None,
    ) -> None:
        """Carry steps to the server, and the replies (or failures) back to the sender."""
        message = Message(len(self.sent), machine, tuple(ops))
        self.sent.append(message)
        fate = self.fate(message)
        if fate.sender_crashes == "before":
            machine.crash()
            return
        if self.down:
            refused = failed("nothing listens there", sent=False)
            self.at(self.now_us + self.latency_us, lambda: answer([refused] * len(ops)))
            return
        if fate.lost:
            return

        def arrive() -> None:
            if self.hung:
                self._kept_waiting.append(arrive)
                return
            if self.down:
                return
            replies = [self.execute(op, machine, link) for op in message.ops]
            if fate.sender_crashes == "after":
                machine.crash()
            elif not fate.reply_lost:
                self.at(self.now_us + self.latency_us + fate.reply_late_us, lambda: answer(replies))

        self.at(self.now_us + self.latency_us + fate.late_us, arrive)
        if fate.again_us:
            self.at(self.now_us + self.latency_us + fate.again_us, lambda: self._repeat(message))

    def _repeat(self, message: Message) -> None:
        if not self.hung and not self.down:
            for op in message.ops:
                self.execute(op, message.machine)

    def execute(self, op: Step | Command, machine: Machine | None = None, link: str | None = None) -> Any:
        """The reply to one step on the store; notifications that the step causes are sent."""
        self.store.written.clear()
        reply = perform(self.store, op, link)
        self._spread_word(machine)
        if isinstance(op, Step) and op.watch and machine is not None and self.tracking:
            for key in watched_keys(op, reply):
                self._tracked.setdefault(key, set()).add(machine)
        return reply

    # Notifications, and pushes of client tracking.

    def listen(self, machine: Machine, answer: Callable[[Any], None]) -> None:
        """Carry a subscription to the server, and the answer back: whether the server allows it."""
        if self.down:
            refused = failed("nothing listens there", sent=False)
            self.at(self.now_us + self.latency_us, lambda: answer(refused))
        elif self.cut_subscriptions:
            self.cut_subscriptions -= 1
            lost = failed("the connection was lost", sent=True, connection_broke=True)
            self.at(self.now_us + self.latency_us, lambda: answer(lost))
        elif not self.hung:

            def arrive() -> None:
                allowed = self.subscribe(machine)
                self.at(self.now_us + self.latency_us, lambda: answer(allowed))

            self.at(self.now_us + self.latency_us, arrive)

    def open_connection(self, machine: Machine) -> str:
        return machine.new_link()

    def close_connection(self, link: str) -> None:
        """Close a dedicated connection; the server forgets its state."""
        self.store.session(link).close()

    def subscribe(self, machine: Machine) -> bool:
        """Deliver notifications to that machine from now on; False if the server forbids pub/sub."""
        if self.no_pubsub:
            return False
        channel = machine.router.channel.encode()
        self._listening[channel] = machine
        self.store.subscribed |= {channel}
        machine.router.armed = True
        return True

    def unsubscribe(self, machine: Machine) -> None:
        channel = machine.router.channel.encode()
        self._listening.pop(channel, None)
        self.store.subscribed -= {channel}
        for machines in self._tracked.values():
            machines.discard(machine)

    def _spread_word(self, writer: Machine | None) -> None:
        """Deliver published messages to their subscribers, and writes to the machines that track the key."""
        outbox, self.store.outbox = self.store.outbox, []
        for channel, text in outbox:
            if (machine := self._listening.get(channel)) is not None:
                self._carry(machine, text)
        for key in sorted(self.store.written & self._tracked.keys()):
            for machine in sorted(self._tracked.pop(key) - {writer}, key=lambda machine: machine.name):
                self.at(self.now_us + self.latency_us, lambda machine=machine, key=key: machine.notice(key))  # type: ignore[misc]

    def _carry(self, machine: Machine, text: bytes) -> None:
        fate = self.fate_of_notification(self.notifications_sent)
        self.notifications_sent += 1
        if not fate.lost:
            self.at(self.now_us + self.latency_us + fate.late_us, lambda: machine.hear(text))
        if fate.again_us:
            self.at(self.now_us + self.latency_us + fate.again_us, lambda: machine.hear(text))

    def cut_listeners(self) -> None:
        """Break the connections of all subscribers."""
        for machine in list(self._listening.values()):
            self.unsubscribe(machine)
            machine.lose_listener()

    def silence(self, timeout: float) -> StepFailed:
        return silence(timeout)

    # Faults of the server.

    def set_server_clock(self, seconds: float) -> None:
        """Set the server's clock forward, or back if ``seconds`` is negative. Deadlines of keys do not change."""
        self.store.now_us += round(seconds * 1e6)

    def hang(self) -> None:
        self.hung = True

    def resume(self) -> None:
        self.hung = False
        waiting, self._kept_waiting = self._kept_waiting, []
        for arrive in waiting:
            self.soon(arrive)

    def restart_empty(self) -> None:
        self.store = Store(self.store.now_us)
        self._tracked.clear()
        self.cut_listeners()

    def keys(self) -> list[str]:
        """All locked names: every key but side keys and counters."""
        return [key.decode() for key in self.store.values if b":hf1:" not in key]
