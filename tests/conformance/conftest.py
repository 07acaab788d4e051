from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.stages import APIS, STAGES, Scenario
from tests.servers import Server


@pytest.fixture(scope="session")
def stage_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest, stage_server: Server) -> Callable[[Scenario], Any]:
    """Plays a scenario on one of the stages."""
    stage_server.client().flushall()
    return lambda scenario: APIS[request.param].play(scenario, stage_server)
