"""The mutex within a process."""

from __future__ import annotations

import threading
import time
from typing import Any

from holdfast.drivers import clock
from holdfast.drivers.gate import Gate


def a_hold() -> Any:
    return object()  # a gate only asks which one it is


def test_one_passes_at_a_time() -> None:
    gate, inside, most = Gate(), [0], [0]

    def work() -> None:
        hold = a_hold()
        for _ in range(200):
            assert gate.enter(hold, None)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            gate.leave(hold)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
    assert not gate.locked()


def test_nobody_is_forgotten_when_some_give_up() -> None:
    gate, passed = Gate(), []

    def impatient() -> None:
        hold = a_hold()
        for _ in range(50):
            if gate.enter(hold, clock.now() + 0.001):
                gate.leave(hold)

    def patient() -> None:
        hold = a_hold()
        assert gate.enter(hold, None)
        passed.append(True)
        gate.leave(hold)

    hold = a_hold()
    assert gate.enter(hold, None)
    threads = [threading.Thread(target=impatient) for _ in range(4)]
    threads += [threading.Thread(target=patient) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.leave(hold)
    for thread in threads:
        thread.join(30)
    assert len(passed) == 4


def test_without_time_it_does_not_wait() -> None:
    gate, one, two = Gate(), a_hold(), a_hold()
    assert gate.enter(one, 0.0)
    assert not gate.enter(two, 0.0)
    gate.leave(one)
    assert gate.enter(two, 0.0)


def test_only_who_has_passed_opens_it() -> None:
    gate, one, two = Gate(), a_hold(), a_hold()
    assert gate.enter(one, None)
    gate.leave(two)
    assert gate.locked()
    gate.leave(one)
    gate.leave(one)
    assert not gate.locked()
