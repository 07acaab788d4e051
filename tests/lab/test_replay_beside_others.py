"""A trace performed on a server that others use, and traces that somebody has written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import InvalidConfig
from holdfast.lab.replay.perform import perform
from holdfast.lab.surveys.recipes import find
from tests.servers import Server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_who_takes_the_name_meanwhile_keeps_its_key(own_server: Server) -> None:
    trace = find("setnx", "NoOrphan", faults=["crash"], clients=2)[0].trace
    assert trace is not None
    admin = own_server.client()
    outcome = perform(trace, own_server.url, say=lambda line: "wants" in line and admin.set("foo", "another's"))
    assert not outcome.confirmed
    assert admin.get("foo") == b"another's"
    admin.delete("foo")
    assert perform(trace, own_server.url, say=lambda line: None).confirmed
    assert admin.keys("*") == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"clients": 99}, "clients=99"),
        ({"choices": (("come", 0), ())}, "empty step"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_before_anything_is_done(changed: dict[str, Any], says: str) -> None:
    trace = find("setnx", "NoOrphan", faults=["crash"], clients=2)[0].trace
    assert trace is not None
    with pytest.raises(InvalidConfig, match=says):
        perform(replace(trace, **changed), "redis://127.0.0.1:1/0")
