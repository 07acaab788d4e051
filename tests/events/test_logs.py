"""What the log ``holdfast`` says of events, and how often."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import redis

import holdfast
from holdfast import events
from holdfast.drivers.observing import Observers, describe, level_of
from holdfast.errors import Unavailable, Unsupported
from holdfast.events import (
    Abandoned,
    Acquired,
    Broken,
    Event,
    Lost,
    PassedOn,
    Released,
    RenewalFailed,
    Renewed,
    Waiting,
)
from holdfast.holder import Holder
from tests.support import eventually

HOLDER = Holder("nightly", "web3", 71)
DOWN = Unavailable({"redis://h": "it did not answer within 1 s"}, "Wait")  # logged once, not for each lease
REFUSED = Unsupported("this renewal", "Ask for it")
COMMON: dict[str, Any] = {"name": "order:42", "kind": "lock"}

LINES = [
    (Waiting(**COMMON, holder=HOLDER), "DEBUG", "is held by web3 (pid 71), label 'nightly': waiting"),
    (Waiting(**COMMON), "DEBUG", "has other waiters before it: waiting"),
    (Waiting(**COMMON, holder=replace(HOLDER, since=1.8e9)), "DEBUG", "label 'nightly' since 2027-01-"),
    (
        Waiting(**COMMON, holder=HOLDER, waited=20.0, deadlock="It may be a deadlock"),
        "WARNING",
        "is held by web3 (pid 71), label 'nightly': waiting for 20 s so far. It may be a deadlock",
    ),
    (Acquired(**COMMON, fence=7, waited=0.5, tries=1), "DEBUG", "acquired after 0.5 s, with 1 request, fence 7"),
    (
        Acquired(**COMMON, fence=7, waited=0.5, tries=0, passed=True),
        "DEBUG",
        "acquired after 0.5 s, from another holder of this client, fence 7",
    ),
    (PassedOn(**COMMON, held=2.0), "DEBUG", "passed on within this client after 2 s"),
    (Renewed(**COMMON, remaining=20.0, validity=29.7), "DEBUG", "renewed with 20 s left"),
    (
        Renewed(**COMMON, remaining=4.0, validity=29.7, slow=True),
        "WARNING",
        "renewed with 4 s left: renewals are slow",
    ),
    (RenewalFailed(**COMMON, remaining=9.0, tries=2, error=REFUSED), "WARNING", "could not be renewed and has 9 s"),
    (RenewalFailed(**COMMON, remaining=9.0, tries=2, error=DOWN), "WARNING", "could not be renewed and has 9 s"),
    (RenewalFailed(**COMMON, remaining=9.0, tries=2, error=DOWN, outage=True), "DEBUG", "could not be renewed and has"),
    (Lost(**COMMON, fence=7, held=30.0, reason="its key was deleted"), "ERROR", "lost after 30 s, fence 7: its key"),
    (Lost(**COMMON, held=1.0, reason="its client was closed"), "DEBUG", "its client was closed"),
    (Released(**COMMON, held=1.0), "DEBUG", "released after 1 s"),
    (Released(**COMMON, held=1.0, error=DOWN), "DEBUG", "released after 1 s: cannot use"),
    (
        Abandoned(**COMMON, waited=5.0, tries=3, holder=HOLDER),
        "DEBUG",
        "given up after 5 s: it is held by web3",
    ),
    (Abandoned(**COMMON, waited=5.0, tries=3, error=DOWN), "DEBUG", "given up after 5 s: cannot use redis://h"),
    (Broken(**COMMON, fence=7, reason="stuck", holder=HOLDER), "INFO", "broke the hold of web3 (pid 71)"),
]


@pytest.mark.parametrize(("event", "level", "text"), LINES, ids=[type(event).__name__ for event, *_ in LINES])
def test_every_event_is_one_line_at_its_level(event: Event, level: str, text: str) -> None:
    assert logging.getLevelName(level_of(event)) == level
    assert describe(event).startswith("lock 'order:42'")
    assert text in describe(event)


def test_every_kind_of_event_has_a_line() -> None:
    assert {type(event).__name__ for event, *_ in LINES} == set(events.__all__) - {"Event"}


def test_debug_shows_a_cycle_with_structured_fields(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    with face.lock("order:42", label="nightly") as lease:
        fence = lease.fence
    # A slow first contact leaves time for a renewal.
    told = [record for record in caplog.records if getattr(record, "lock_event", "Renewed") != "Renewed"]
    acquired, released = told
    assert (acquired.levelname, vars(acquired)["lock_event"]) == ("DEBUG", "Acquired")
    assert (vars(released)["lock_name"], vars(released)["lock_fence"]) == ("order:42", fence)


def test_a_loss_is_an_error_although_no_hook_listens(
    face: Any, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lease = face.lock("x", ttl=60).acquire()  # renewals of a short ttl may be slow, which is logged, too
    eventually(lambda: face.client.statistics().renewals)
    admin.delete("x")
    eventually(lambda: "lock 'x' lost after" in caplog.text)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_a_storm_of_warnings_is_one_line_a_second_that_counts_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("holdfast.drivers.observing.time.monotonic", lambda: now[0])
    observers = Observers()
    failed = RenewalFailed(**COMMON, remaining=9.0, tries=1, error=REFUSED)
    for _ in range(500):
        observers.report(failed)
    assert len(caplog.records) == 1
    now[0] += 1.0
    observers.report(failed)
    assert caplog.records[-1].getMessage().endswith("(and 499 more like this)")
    observers.report(Lost(**COMMON, held=1.0, reason="gone"))
    assert caplog.records[-1].levelname == "ERROR", "a loss is always logged"
