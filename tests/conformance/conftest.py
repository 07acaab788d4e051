from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.stages import APIS, STAGES, Scenario
from tests.servers import Server


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest, server: Server) -> Callable[[Scenario], Any]:
    """Plays a scenario on one of the stages."""
    return lambda scenario: APIS[request.param].play(scenario, server)
