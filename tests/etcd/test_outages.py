"""etcd is down or full: contact is back when it takes writes again, and not before."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.etcd.test_late_requests import fill
from tests.fleet_etcd import EtcdFleet
from tests.support import took


@pytest.fixture
def small() -> Iterator[EtcdFleet]:
    """One member with room for hardly anything."""
    with EtcdFleet(1, "--quota-backend-bytes=200000") as fleet:
        yield fleet


def fail(client: Any, name: str) -> None:
    with pytest.raises(holdfast.Unavailable):
        client.lock(name, wait=5).acquire()


@pytest.mark.parametrize("fault", ["killed", "full"])
def test_contact_is_not_back_before_etcd_takes_writes(
    small: EtcdFleet, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The keeper asks on behalf of calls that have failed. Their tokens were never used: nothing is to be removed."""
    (member,) = small.members
    with holdfast.connect(small.url, outage_wait=1.0) as client:
        with client.lock("warm"):
            pass
        if fault == "killed":
            member.kill()
        else:
            fill(small)
        with caplog.at_level(logging.WARNING, "holdfast"):
            fail(client, "first")
            for number in range(4):
                time.sleep(0.7)
                with took(less_than=0.9):  # less than outage_wait
                    fail(client, f"later:{number}")
        assert not [record for record in caplog.records if "is back" in record.getMessage()]
