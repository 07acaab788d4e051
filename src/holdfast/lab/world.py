"""A world in which protocols run: one server, some machines, messages between them, and a clock that jumps.

The world is a queue of events in virtual time. Machines run the same generators as the real drivers do; their steps
travel as messages to a ``Store``, which runs the very .lua files. Nothing happens between two events, so a run is
decided by the order of events and by what ``fate`` says of each message: delivered, lost, late, or the sender's last.

Time is counted in whole microseconds, so that no rounding decides who is first. What has no time of its own happens
at once; messages take ``latency_us`` each way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import Unavailable
from holdfast.lab.machine import Machine, Process
from holdfast.lab.store import ReplyError, Status, Store
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.replies import fence_error

__all__ = ["DELIVERED", "Fate", "Message", "Stuck", "World", "failed", "perform", "silence", "watched_keys"]

_KEY: Final = 5  # the place of the key in a refusal that concerns one of several


class Stuck(Exception):
    """Nothing is left that could happen, but somebody still waits."""


class Message(NamedTuple):
    """Steps on their way to the server; ``number`` counts all messages of the world."""

    number: int
    machine: Machine
    ops: Sequence[Step | Command]


class Fate(NamedTuple):
    """What becomes of a message, or of a bell."""

    lost: bool = False  # never executed
    late_us: int = 0  # executed so much later, also when its sender has given up long since
    again_us: int = 0  # executed once more, so much later
    reply_lost: bool = False
    reply_late_us: int = 0  # its reply arrives so much later; notifications sent meanwhile overtake it
    sender_crashes: str = ""  # "before" or "after" it was executed


DELIVERED = Fate()


def perform(store: Store, op: Step | Command, link: str | None = None) -> Any:
    """One step on a store, as an engine would have it done: the reply, or that it failed."""
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
        return failed(f"it answered {reply.code}", sent=False, retry=reply.code == "OOM")
    return str(reply).encode() if isinstance(reply, Status) else reply


def watched_keys(step: Step, reply: Any) -> list[bytes]:
    """Of which keys the sender of a step with ``watch`` is told.

    A server tells of all that the step has read; but nobody minds side keys, nor, of several locks, others than the one
    that has refused.
    """
    if isinstance(reply, list | tuple) and len(reply) > _KEY and isinstance(reply[_KEY], bytes):
        return [reply[_KEY]]
    return [key.encode() for key in step.keys if key == step.keys[0] or ":hf1:" not in key]


def failed(why: str, *, sent: bool, retry: bool = True, prompt: bool = False, silent: bool = False) -> StepFailed:
    error = Unavailable({"the world's server": why}, "See the world's faults")
    return StepFailed(error, sent=sent, retry=retry, prompt=prompt, silent=silent)


def silence(timeout: float) -> StepFailed:
    return failed(f"it did not answer within {timeout:.3g} s", sent=True, silent=True)


class World:
    def __init__(self, *, seed: int | None = None, latency_us: int = 100) -> None:
        self.store = Store()
        self.now_us = 0
        self.latency_us = latency_us
        self.fate: Callable[[Message], Fate] = lambda message: DELIVERED
        self.fate_of_bell: Callable[[int], Fate] = lambda number: DELIVERED
        self.bells = 0  # how many were rung
        self.mute = False  # the server forbids pub/sub
        self.cut_subscriptions = 0  # how many attempts to subscribe are still to be cut
        self.tracking = True  # the server tells of foreign writes
        self.sent: list[Message] = []
        self.hung = False  # the server reads nothing; what is sent waits
        self.down = False  # nothing listens there
        self._listening: dict[bytes, Machine] = {}  # by channel
        self._tracked: dict[bytes, set[Machine]] = {}  # by key: who is to be told of the next write
        self._kept_waiting: list[Callable[[], None]] = []
        self._events: list[tuple[int, float, int, Callable[[], None]]] = []
        self._count = 0
        self._machines = 0
        # With a seed, what is due at the same time happens in an order of chance; without, in the order of asking.
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
        """Answer that process then, if it still waits for that."""
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
        """Go on until the process has ended, and return (or raise) what came of it; or just for so long."""
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
        """Carry steps to the server, and the replies (or failures) back to whoever may still listen."""
        message = Message(len(self.sent), machine, tuple(ops))
        self.sent.append(message)
        fate = self.fate(message)
        if fate.sender_crashes == "before":
            machine.crash()
            return
        if self.down:
            refused = self.refused()
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
        """One step on the store, and word of it to whoever listens."""
        self.store.written.clear()
        reply = perform(self.store, op, link)
        self._spread_word(machine)
        if isinstance(op, Step) and op.watch and machine is not None and self.tracking:
            for key in watched_keys(op, reply):
                self._tracked.setdefault(key, set()).add(machine)
        return reply

    # Bells and pushes.

    def listen(self, machine: Machine, answer: Callable[[Any], None]) -> None:
        """Carry a subscription to the server, and back whether it is allowed."""
        if self.down:
            refused = self.refused()
            self.at(self.now_us + self.latency_us, lambda: answer(refused))
        elif self.cut_subscriptions:
            self.cut_subscriptions -= 1
            lost = failed("the connection was lost", sent=True, prompt=True)
            self.at(self.now_us + self.latency_us, lambda: answer(lost))
        elif not self.hung:

            def arrive() -> None:
                allowed = self.subscribe(machine)
                self.at(self.now_us + self.latency_us, lambda: answer(allowed))

            self.at(self.now_us + self.latency_us, arrive)

    def open_link(self, machine: Machine) -> str:
        return machine.new_link()

    def close_link(self, link: str) -> None:
        """Its connection is closed, and what the server remembered of it is gone."""
        self.store.session(link).close()

    def subscribe(self, machine: Machine) -> bool:
        """Let that machine hear its bells; False if the server forbids it."""
        if self.mute:
            return False
        channel = machine.board.channel.encode()
        self._listening[channel] = machine
        self.store.subscribed |= {channel}
        machine.board.armed = True
        return True

    def unsubscribe(self, machine: Machine) -> None:
        channel = machine.board.channel.encode()
        self._listening.pop(channel, None)
        self.store.subscribed -= {channel}
        for machines in self._tracked.values():
            machines.discard(machine)

    def _spread_word(self, writer: Machine | None) -> None:
        """Carry what was published to its listener, and word of writes to whoever has the key watched."""
        outbox, self.store.outbox = self.store.outbox, []
        for channel, text in outbox:
            if (machine := self._listening.get(channel)) is not None:
                self._carry(machine, text)
        for key in sorted(self.store.written & self._tracked.keys()):
            for machine in sorted(self._tracked.pop(key) - {writer}, key=lambda machine: machine.name):
                self.at(self.now_us + self.latency_us, lambda machine=machine, key=key: machine.notice(key))  # type: ignore[misc]

    def _carry(self, machine: Machine, text: bytes) -> None:
        fate = self.fate_of_bell(self.bells)
        self.bells += 1
        if not fate.lost:
            self.at(self.now_us + self.latency_us + fate.late_us, lambda: machine.hear(text))
        if fate.again_us:
            self.at(self.now_us + self.latency_us + fate.again_us, lambda: machine.hear(text))

    def cut_listeners(self) -> None:
        """Every listener's connection breaks."""
        for machine in list(self._listening.values()):
            self.unsubscribe(machine)
            machine.lose_listener()

    def refused(self) -> StepFailed:
        return failed("nothing listens there", sent=False)

    def silence(self, timeout: float) -> StepFailed:
        return silence(timeout)

    # Faults of the server.

    def set_server_clock(self, seconds: float) -> None:
        """Step the server's clock by that much; a negative step sets it back. Deadlines stay where they are."""
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
        """The names that are locked: every key but side keys and counters."""
        return [key.decode() for key in self.store.values if b":hf1:" not in key]
