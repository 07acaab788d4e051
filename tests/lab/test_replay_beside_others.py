"""A trace performed on a server that others use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.lab.replay import perform
from holdfast.lab.survey import find
from tests.servers import Server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_who_takes_the_name_meanwhile_keeps_its_key(own_server: Server) -> None:
    trace = find("setnx", "NoOrphan", faults=["crash"], clients=2).trace
    assert trace is not None
    admin = own_server.client()
    outcome = perform(trace, own_server.url, say=lambda line: "comes" in line and admin.set("foo", "another's"))
    assert not outcome.confirmed
    assert admin.get("foo") == b"another's"
    admin.delete("foo")
    assert perform(trace, own_server.url, say=lambda line: None).confirmed
    assert admin.keys("*") == []
