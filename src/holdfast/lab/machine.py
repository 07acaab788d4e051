"""A machine of the simulated world: a driver like the real ones, whose threads are processes of the world.

``Process`` is the interpreter: what drivers/blocking.py does with threads and drivers/aio.py with asyncio, it does
with events. A machine can crash (its processes end without a word) and be paused (they do nothing for a while, and
then find that time has passed).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from holdfast.lab.store import START_US
from holdfast.lab.waiting import Bell
from holdfast.lease import Hold
from holdfast.protocol import effects as fx
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.cohort import Cohorts
from holdfast.protocol.keepalive import Book, keep
from holdfast.protocol.mutex import GRACE

if TYPE_CHECKING:
    from holdfast.lab.world import World

__all__ = ["Cancelled", "Machine", "Process", "is_awaited"]

LISTENER_PAUSE_US = 50_000
_NOW = object()  # as an answer: what time it is when it is received


class Cancelled(BaseException):
    """What a cancelled process of the world sees, as a task of asyncio sees CancelledError."""


class Machine:
    """One computer with one client of Holdfast on it. It has the face of a driver."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.address = f"world://{name}"
        self.life = 0
        self.crashed = False
        self.paused = False
        self.processes: list[Process] = []
        self._held_up: list[Callable[[], None]] = []
        self.skew_us = 0  # by how much its wall clock is wrong
        self.warnings: list[str] = []  # what was logged
        self._tokens = 0
        self._links = 0
        self._boot()

    def _boot(self) -> None:
        self.book = Book(Bell())
        self.board = Switchboard(self.book, Bell)
        self.board.channel = f"bell:{self.name}"
        self.cohorts = Cohorts(Bell)
        self.keeper: Process | None = None

    def __repr__(self) -> str:
        return f"<machine {self.name}>"

    def now(self) -> float:
        return self.world.now_us / 1e6

    def wall(self) -> float:
        return (START_US + self.world.now_us + self.skew_us) / 1e6

    def new_link(self) -> str:
        """A name for a connection of its own."""
        self._links += 1
        return f"{self.name}/{self._links}"

    def new_token(self, label: str) -> str:
        self._tokens += 1
        return f"{self.name}-{label}.{self._tokens:022d}"

    def admit(self, hold: Hold) -> None:
        self.book.enter(hold)
        self.keep()

    def keep(self) -> None:
        if self.keeper is None and not self.book.closed:
            self.keeper = self.world.spawn(keep(self.book), self)

    @types.coroutine
    def run(self, protocol: fx.Effects[Any]) -> Generator[fx.Effect, Any, Any]:
        """Awaited by a coroutine that is a process of the world, it lets the protocol's effects through."""
        if (
            self.crashed
        ):  # a coroutine that is being closed still leaves its ``async with`` blocks: nothing happens there
            raise GeneratorExit
        process: Process = yield fx.Caller()
        process.depth += 1
        before, process.acts_for = process.acts_for, self
        try:
            result = yield from protocol
        except fx.Interrupted:
            raise Cancelled from None
        finally:
            process.depth -= 1
            process.acts_for = before
        if process.cancel_noted:
            process.cancel_noted = False
            raise Cancelled
        return result

    async def close(self, timeout: float) -> None:
        await self.run(self._close(self.now() + timeout))

    def _close(self, until: float) -> fx.Effects[None]:
        lost = yield from lose_all(self.book)
        yield from give_back(lost, self.book, self.cohorts, until)
        self.board.look_again()

    # Bells.

    def hear(self, message: bytes) -> None:
        self.do(lambda: self.board.deliver(message, self.now()))

    def notice(self, key: bytes) -> None:
        self.do(lambda: self.board.touched(key.decode()))

    def lose_listener(self) -> None:
        """Its connection broke. It is made anew if anybody needs it."""
        self.board.armed = False
        self.do(self.board.look_again)
        self.world.at(self.world.now_us + LISTENER_PAUSE_US, lambda: self.do(self._listen_again))

    def _listen_again(self) -> None:
        if self.board.is_needed() and not self.board.armed:
            self.world.listen(self, lambda heard: self.do(self.board.look_again))

    # Faults.

    def crash(self) -> None:
        """Everything that runs here ends at once, without clean-up."""
        self.crashed = True
        self.world.unsubscribe(self)
        self.book.holds.clear()
        for process in self.processes:
            process.kill()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        held_up, self._held_up = self._held_up, []
        for action in held_up:
            self.world.soon(action)

    def do(self, action: Callable[[], None]) -> None:
        """Let something happen on this machine: now, or when it is no longer paused, or never."""
        if self.crashed:
            return
        if self.paused:
            self._held_up.append(action)
        else:
            action()


class _Block:
    """The body of an ``async with`` in the world."""

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
    """What a process does with the replies that it waits for."""

    __slots__ = ("_unpacked", "pending", "process")

    def __init__(self, process: Process, pending: object, unpacked: Callable[[list[Any]], Any]) -> None:
        self.process = process
        self.pending = pending
        self._unpacked = unpacked

    def __call__(self, replies: list[Any]) -> None:
        self.process.answer(self.pending, self._unpacked(replies))


def is_awaited(answer: Callable[[Any], None]) -> bool:
    """Whether a process still waits for that, as far as one can tell."""
    return not isinstance(answer, _Answer) or answer.process.waits_for(answer.pending)


def _first(replies: list[Any]) -> Any:
    return replies[0]


def _all(replies: list[Any]) -> Any:
    return replies


def _of_link(replies: list[Any]) -> Any:
    """What is answered on a link: the replies; or, if it could not even be opened, that failure."""
    return replies[0] if all(isinstance(reply, fx.StepFailed) and reply.prompt for reply in replies) else replies


def _ceil_us(seconds: float) -> int:
    """Never early: who is woken before its time would only look at the clock and wait again."""
    us = math.ceil(seconds * 1e6)
    return us if us / 1e6 >= seconds else us + 1


class Process:
    """A coroutine or protocol that runs on a machine."""

    def __init__(self, machine: Machine, routine: Any) -> None:
        self.machine = machine
        self.acts_for = machine  # whose client it uses at the moment
        self.world = machine.world
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancel_noted = False
        self.depth = 0
        self.asleep = False  # it waits for a time or a bell, not for an answer
        self._routine = routine
        self._pending: object | None = None  # what it waits for; whoever answers must show the same
        self._shielded = False
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
        """As a task is cancelled: at once, unless in a shielded call, which then has a little time left."""
        pending = self._pending
        if self.done or self.cancel_noted:
            return
        if pending is None or self._shielded:
            self.cancel_noted = True
            if pending is not None:
                self.world.later(self._due(GRACE), self, pending, fx.Interrupted())
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
        """Go on with what was waited for; or with a cancellation that came between the answer and now."""
        if self.cancel_noted:
            if not self._shielded:
                self.cancel_noted = False
                value = self._stop()
            elif isinstance(value, fx.StepFailed) or callable(value):
                value = fx.Interrupted()  # it had its chance; the caller will not wait for another try
        if value is _NOW:
            value = self.machine.now()
        elif callable(value):  # most time-outs never come to pass, so what they say is not made up in advance
            value = value()
        advance = self._routine.throw if isinstance(value, BaseException) else self._routine.send
        self._go(advance, value)

    def _perform(self, effect: fx.Effect, pending: object) -> Any:
        """The reply, or ``pending`` if it comes later."""
        machine, world = self.acts_for, self.world
        self.asleep = isinstance(effect, fx.Wait)
        if isinstance(effect, fx.Now):
            return machine.wall() if effect.wall else machine.now()
        if isinstance(effect, fx.Call):
            self._shielded = effect.shielded
            world.send(machine, [effect.step], _Answer(self, pending, _first))
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.CallEach):
            world.send(machine, effect.steps, _Answer(self, pending, _all))
            all_silent = [effect.timeout] * len(effect.steps)
            world.later(self._due(effect.timeout), self, pending, lambda: [*map(world.silence, all_silent)])
            return pending
        if isinstance(effect, fx.Wait):
            return self._wait(effect, pending)
        if isinstance(effect, fx.Listen):
            if machine.board.armed:
                return True
            world.listen(machine, lambda heard: self.answer(pending, heard))
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.NewToken):
            return machine.new_token(effect.label)
        if isinstance(effect, fx.Caller):
            return self
        if isinstance(effect, fx.Entrust):
            machine.book.entrust(effect.hold, machine.now())
            return machine.keep()
        if isinstance(effect, fx.Attend):
            machine.book.attend(effect.hold, machine.now())
            return machine.keep()
        if isinstance(effect, fx.Tell):
            self._shielded = True  # if it cancels this very process, that is noted until the protocol is over
            for callback in (effect.hold.observer, effect.hold.notify):
                if callback is not None:
                    callback()
            return None
        if isinstance(effect, fx.Warn):
            return machine.warnings.append(effect.message)
        if isinstance(effect, fx.Attach):
            block = _Block(self)
            effect.hold.notify = block.cancel
            return self, block
        if isinstance(effect, fx.OpenLink):
            return world.open_link(machine)
        if isinstance(effect, fx.CallOn):
            link = effect.link
            world.send(machine, effect.commands, _Answer(self, pending, _of_link), link)
            world.later(self._due(effect.timeout), self, pending, lambda: world.silence(effect.timeout))
            return pending
        if isinstance(effect, fx.CloseLink):
            return world.close_link(effect.link)
        effect.hold.notify = None
        return (effect.error, False) if effect.block is None else effect.block.leave(effect.error)

    def _wait(self, effect: fx.Wait, pending: object) -> Any:
        bell = effect.bell
        if isinstance(bell, Bell):
            if bell.rung:
                bell.clear()
                return self.machine.now()

            def wake() -> None:
                if self._pending is pending:  # else its time had come first, and the ring is kept
                    bell.clear()
                    self.answer(pending, _NOW)

            bell.waiter = lambda: self.world.soon(wake)
        if effect.until != float("inf"):
            self.world.later(_ceil_us(effect.until), self, pending, _NOW)
        return pending
