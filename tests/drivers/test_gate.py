"""The mutex within a process."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.drivers import clock
from holdfast.drivers.gate import Gate


def test_one_passes_at_a_time() -> None:
    gate, inside, most = Gate(), [0], [0]

    def work() -> None:
        for _ in range(200):
            assert gate.enter(None)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            gate.release()

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
        for _ in range(50):
            if gate.enter(clock.now() + 0.001):
                gate.release()

    def patient() -> None:
        assert gate.enter(None)
        passed.append(True)
        gate.release()

    assert gate.enter(None)
    threads = [threading.Thread(target=impatient) for _ in range(4)]
    threads += [threading.Thread(target=patient) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.release()
    for thread in threads:
        thread.join(30)
    assert len(passed) == 4


def test_without_time_it_does_not_wait() -> None:
    gate = Gate()
    assert gate.enter(0.0)
    assert not gate.enter(0.0)
    gate.release()
    assert gate.enter(0.0)


def test_an_open_gate_cannot_be_released() -> None:
    with pytest.raises(RuntimeError):
        Gate().release()
