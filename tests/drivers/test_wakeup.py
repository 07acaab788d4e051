"""The bell that threads wait at: a ring is kept until it is heard, and may come from anywhere."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from holdfast.drivers.sleeping import Wakeup, sleep
from tests.support import later, took


def test_ring_is_kept_until_it_is_heard_once() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    with took(less_than=5.0):
        wakeup.wait(60.0)
    with took(at_least=0.09, less_than=5.0):
        wakeup.wait(0.1)


def test_cleared_ring_is_not_heard() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.clear()
    wakeup.clear()
    with took(at_least=0.09, less_than=5.0):
        wakeup.wait(0.1)
    wakeup.wake()
    with took(less_than=5.0):
        wakeup.wait(60.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("-inf")])
def test_no_time_to_wait_still_hears_what_was_rung(seconds: float) -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wait(seconds)
    with took(at_least=0.09, less_than=5.0):
        wakeup.wait(0.1)


@pytest.mark.parametrize("until", [float("inf"), 1e300])
def test_wait_without_end_is_ended_by_another_thread(until: float) -> None:
    wakeup = Wakeup()
    with took(less_than=5.0), later(0.1, wakeup.wake):
        sleep(wakeup, until)


def test_rung_by_a_signal_handler_in_the_thread_that_waits() -> None:
    wakeup = Wakeup()
    before = signal.signal(signal.SIGUSR1, lambda *_: wakeup.wake())
    try:
        with took(less_than=5.0), later(0.1, os.kill, os.getpid(), signal.SIGUSR1):
            wakeup.wait(60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_ring_is_lost_between_many_threads() -> None:
    there, back = Wakeup(), Wakeup()
    rounds = 2000

    def answer() -> None:
        for _ in range(rounds):
            there.wait(30.0)
            back.wake()

    thread = threading.Thread(target=answer)
    thread.start()
    started = time.monotonic()
    for _ in range(rounds):
        there.wake()
        back.wait(30.0)
    thread.join(30.0)
    assert not thread.is_alive()
    assert time.monotonic() - started < 30.0, "a lost ring costs the whole of a wait"
