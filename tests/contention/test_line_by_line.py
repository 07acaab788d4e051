"""A lease that is lost and passed on at the same time, by two threads: whichever line the one of them has reached.

The thread that passes it on runs up to some line of its code, the thread that finds it lost up to some line of its own,
and then each to its end. The world then shows what came of it: every task that waits gets the lock, and no two have it
at once.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import holdfast
from holdfast.protocol import hold as hold_module
from holdfast.protocol.hold import Hold
from holdfast.protocol.wait import cohort
from tests.lab.mutations import LINE_BY_LINE, plant
from tests.protocol.harness import Play

CODE = {module.__file__ for module in (cohort, hold_module)}
TO_THE_END = 1 << 30


class Stepped(threading.Thread):
    """A thread that runs so many lines of that code at a time."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.done = False
        self.error: BaseException | None = None
        self._action = action
        self._lines = 0
        self._go = threading.Semaphore(0)
        self._rests = threading.Semaphore(0)

    def step(self, lines: int) -> None:
        """Let it run so many lines more, or to its end."""
        if self.done:
            return
        self._lines = lines
        if self.is_alive():
            self._go.release()
        else:
            self.start()
        self._rests.acquire()

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._action()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.done = True
            self._rests.release()

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if name not in CODE and "with a mistake" not in name:
            return None
        if event == "line":
            if self._lines == 0:
                self._rests.release()
                self._go.acquire()
            self._lines -= 1
        return self._trace


class Race(Play):
    """One task of a client has the lock, and two more stand in line for it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.client("one")
        self.driver = self.machines[0]
        self.granted: list[str] = []
        self.lock = self.one.lock("a", ttl=5)
        holder = self.start(self.one, self._acquire())
        self.run(0.05)
        self.lease = holder.outcome()
        self.waiters = [self.start(self.one, self._visit(name)) for name in ("successor", "third")]
        self.run(0.01)

    async def _acquire(self) -> Any:
        return await self.lock.acquire()

    async def _visit(self, name: str) -> None:
        lock = self.one.lock("a", ttl=5)
        lease = await lock.acquire()
        assert lease is not None
        self.granted.append(name)
        await self.sleep(self.one, 0.01)
        try:
            await lock.release()
        except holdfast.LeaseLost:
            pass  # passed on just as it was lost

    @property
    def hold(self) -> Hold:
        hold: Hold = self.lease._hold
        return hold

    def lose(self) -> None:
        self.hold.lose("it was taken away")

    def give(self) -> None:
        self.driver.cohorts.pass_at_once(self.hold, self.driver.registry, self.driver.now())

    def finish(self) -> None:
        self.world.store.execute("DEL", "a")  # which is how it came to be lost
        self.run(1.0)
        if not self.waiters[0].done or not self.waiters[1].done:
            # It was not passed on: the holder releases, and is told of its loss.
            releasing = self.start(self.one, self._release())
            self.run(12.0)
            assert releasing.done
        for waiter in self.waiters:
            assert waiter.done, f"a task is left waiting; granted: {self.granted}"
            waiter.outcome()
        assert self.granted == ["successor", "third"]
        assert not self.driver.cohorts.active_holds
        assert not self.driver.cohorts.local_queues

    async def _release(self) -> None:
        try:
            await self.lock.release()
        except (holdfast.LeaseLost, holdfast.NotHeld):
            pass


def every_interleaving() -> int:
    """The pass runs up to some line, the loss up to some line, and then each to its end; how many there were."""
    count = 0
    for of_the_pass in itertools.count():
        for of_the_loss in itertools.count():
            race = Race()
            giving, losing = Stepped(race.give), Stepped(race.lose)
            giving.step(of_the_pass)
            losing.step(of_the_loss)
            was_over = giving.done, losing.done
            giving.step(TO_THE_END)
            losing.step(TO_THE_END)
            assert giving.error is None, giving.error
            assert losing.error is None, losing.error
            race.finish()
            race.end()
            count += 1
            if was_over[1]:
                break
        if was_over[0]:
            return count
    raise AssertionError


@pytest.mark.long
def test_a_lease_lost_and_passed_on_at_the_same_time_goes_to_each_waiter_once() -> None:
    assert every_interleaving() > 400


@pytest.mark.long
@pytest.mark.parametrize("mistake", LINE_BY_LINE)
def test_a_planted_mistake_fails_at_some_line(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(LINE_BY_LINE[mistake], monkeypatch)
    with pytest.raises(AssertionError):
        every_interleaving()
