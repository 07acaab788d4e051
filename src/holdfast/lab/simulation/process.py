"""A thread or task of the simulated world: it runs a routine, and performs the effects of its protocols.

A process can be cancelled, as a task of asyncio can; a crash of its machine ends it without clean-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

from holdfast.lab.simulation.programs import expanded
from holdfast.lab.simulation.wakeup import Wakeup
from holdfast.protocol import effects as fx
from holdfast.protocol.mutex import CLEANUP_WAIT

if TYPE_CHECKING:
    from holdfast.lab.simulation.machine import Machine

_NOW = object()  # an answer that is replaced by the time at which the process receives it


class Cancelled(BaseException):
    """What a cancelled process of the world sees, as a task of asyncio sees CancelledError."""


class _Block:
    """The body of an ``async with`` of a simulated process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.process.cancel()

    def leave(self, error: BaseException | None) -> tuple[BaseException | None, bool]:
        if not self.cancelled:
            return error, False
        if isinstance(error, Cancelled):
            return None, True
        self.process.cancel_noted = False
        return error, False


class _Answer:
    """Passes replies to the process that waits for them."""

    __slots__ = ("_unpacked", "pending", "process")

    def __init__(self, process: Process, pending: object, unpacked: Callable[[list[Any]], Any]) -> None:
        self.process = process
        self.pending = pending
        self._unpacked = unpacked

    def __call__(self, replies: list[Any]) -> None:
        self.process.answer(self.pending, self._unpacked(replies))


def is_awaited(answer: Callable[[Any], None]) -> bool:
    """Whether a process still waits for that answer; True if that is unknown."""
    return not isinstance(answer, _Answer) or answer.process.waits_for(answer.pending)


def _of_link(replies: list[Any]) -> Any:
    """The replies on a dedicated connection; if the connection is broken, the failure."""
    return (
        replies[0] if all(isinstance(reply, fx.StepFailed) and reply.connection_broke for reply in replies) else replies
    )


_UNPACKED: dict[type, Callable[[list[Any]], Any]] = {
    fx.Call: itemgetter(0),
    # The server of the world answers a scan with all keys in one part.
    fx.Scan: lambda replies: replies[0] if isinstance(replies[0], fx.StepFailed) else ("", replies[0][1]),
}


def _ceil_us(seconds: float) -> int:
    """Microseconds, rounded up: a process that is woken too early would only look at the clock and wait again."""
    us = math.ceil(seconds * 1e6)
    return us if us / 1e6 >= seconds else us + 1


class Process:
    """A coroutine or protocol that runs on a machine."""

    def __init__(self, machine: Machine, routine: Any) -> None:
        self.machine = machine
        self.acts_for = machine  # the machine whose client it uses at the moment
        self.world = machine.world
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancel_noted = False
        self.depth = 0
        self.asleep = False  # it waits for a time or a notification, not for an answer
        session = machine.session
        self._routine = routine if session is None else expanded(routine, session, machine.router.channel)
        self._pending: object | None = None  # what it waits for; an answer must name the same object
        self._shielded = False
        self._asked: tuple[fx.Call | fx.CallEach, float] | None = None  # what it waits for, and when that was sent
        machine.processes.append(self)

    def __repr__(self) -> str:
        return f"<process on {self.machine.name}>"

    def start(self) -> None:
        self.machine.do(lambda: self._go(self._routine.send, None))

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result

    def kill(self) -> None:
        self._pending = None
        if not self.done:
            self.done = True
            self.error = Cancelled()
            self._routine.close()

    def cancel(self) -> None:
        """Cancel it as a task is cancelled: at once, or after a short time if it is in a shielded call."""
        pending = self._pending
        if self.done or self.cancel_noted:
            return
        if pending is None or self._shielded:
            self.cancel_noted = True
            if pending is not None:
                self.world.later(self._due(CLEANUP_WAIT), self, pending, fx.Interrupted())
            return
        self._pending = None
        self.machine.do(lambda: self._resume(self._stop()))

    def _stop(self) -> BaseException:
        return fx.Interrupted() if self.depth else Cancelled()

    def _due(self, seconds: float) -> int:
        return self.world.now_us + round(seconds * 1e6)

    def _go(self, advance: Callable[[Any], Any], value: Any) -> None:
        while not self.done:
            try:
                effect = advance(value)
            except StopIteration as stop:
                self.done, self.result = True, stop.value
                return
            except BaseException as error:
                self.done, self.error = True, error
                return
            if self.machine.crashed:
                self.kill()
                return
            pending = self._pending = object()
            self._shielded = False
            advance, value = self._routine.send, self._perform(effect, pending)
            if value is pending:
                return
            self._pending = None

    def waits_for(self, pending: object) -> bool:
        return self._pending is pending

    def answer(self, pending: object, value: Any) -> None:
        if self._pending is not pending:
            return
        self._pending = None
        self.machine.do(lambda: self._resume(value))

    def _resume(self, value: Any) -> None:
        """Continue with the answer, or with a cancellation that came after the answer."""
        if self.cancel_noted:
            if not self._shielded:
                self.cancel_noted = False
                value = self._stop()
            elif isinstance(value, fx.StepFailed) or callable(value):
                value = fx.Interrupted()  # the shielded call failed; the caller does not wait for another try
        if value is _NOW:
            value = self.machine.now()
        elif callable(value):  # makes the error of a timeout; most timeouts never happen, so it is made late
            value = value()
        asked, self._asked = self._asked, None
        if asked is not None and not isinstance(value, fx.Interrupted | Cancelled):
            effect, sent_at = asked
            ops, replies = (effect.steps, value) if isinstance(effect, fx.CallEach) else ([effect.step], [value])
            self.acts_for.registry.contacts.note(ops, replies, sent_at, self.machine.now())
        advance = self._routine.throw if isinstance(value, BaseException) else self._routine.send
        self._go(advance, value)

    def _perform(self, effect: fx.Effect, pending: object) -> Any:
        """The result of the effect, or ``pending`` if it comes later."""
        machine, world = self.acts_for, self.world
        self.asleep = isinstance(effect, fx.Wait)
        if isinstance(effect, fx.Now):
            return machine.wall() if effect.wall else machine.now()
        if isinstance(effect, fx.Call | fx.Scan):
            self._shielded = isinstance(effect, fx.Call) and effect.shielded
            if isinstance(effect, fx.Call):
                self._asked = effect, machine.now()
            world.send(machine, [effect.step], _Answer(self, pending, _UNPACKED[type(effect)]))
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.CallEach):
            self._asked = effect, machine.now()
            world.send(machine, effect.steps, _Answer(self, pending, list))
            all_silent = [effect.timeout] * len(effect.steps)
            world.later(self._due(effect.timeout), self, pending, lambda: [*map(world.silence, all_silent)])
            return pending
        if isinstance(effect, fx.Wait):
            return self._wait(effect, pending)
        if isinstance(effect, fx.Listen):
            if machine.router.armed:
                return True
            world.listen(machine, lambda heard: self.answer(pending, heard))
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.NewToken):
            return machine.new_token(effect.label)
        if isinstance(effect, fx.Caller):
            return self
        if isinstance(effect, fx.DeferCleanup):
            machine.registry.defer_cleanup(effect.hold, machine.now())
            return machine.keep()
        if isinstance(effect, fx.ShowPresence):
            machine.registry.show_presence(effect.hold, machine.now())
            return machine.keep()
        if isinstance(effect, fx.ReportLoss):
            self._shielded = True  # if the callback cancels this process, that waits for the end of the protocol
            for callback in (effect.hold.observer, effect.hold.notify):
                if callback is not None:
                    callback()
            return None
        if isinstance(effect, fx.Start):
            return world.spawn(effect.protocol, machine)
        if isinstance(effect, fx.Warn):
            return machine.warnings.append(effect.message)
        if isinstance(effect, fx.Report):
            return machine.events.append(effect.event)
        if isinstance(effect, fx.Attach):
            block = _Block(self)
            effect.hold.notify = block.cancel
            return self, block
        if isinstance(effect, fx.OpenConnection):
            return world.open_connection(machine)
        if isinstance(effect, fx.CallOn):
            link = effect.connection
            world.send(machine, effect.commands, _Answer(self, pending, _of_link), link)
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.CloseConnection):
            return world.close_connection(effect.connection)
        effect.hold.notify = None
        return (effect.error, False) if effect.block is None else effect.block.leave(effect.error)

    def _wait(self, effect: fx.Wait, pending: object) -> Any:
        wakeup = effect.wakeup
        if isinstance(wakeup, Wakeup):
            wakeup.caller = ref(self)
            if wakeup.woken:
                wakeup.clear()
                return self.machine.now()

            def wake() -> None:
                if self._pending is pending:  # if not, its timeout came first, and the wakeup stays set
                    wakeup.clear()
                    self.answer(pending, _NOW)

            wakeup.waiter = lambda: self.world.soon(wake)
        if effect.until != float("inf"):
            self.world.later(_ceil_us(effect.until), self, pending, _NOW)
        return pending
