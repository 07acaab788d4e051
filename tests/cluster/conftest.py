from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.stages import APIS, Scenario
from tests.fleet_cluster import ClusterFleet
from tests.fleets import find_redis


@pytest.fixture(scope="module", params=["valkey", "redis7"])
def fleet(request: pytest.FixtureRequest) -> Iterator[ClusterFleet]:
    """Three primaries without replicas."""
    with ClusterFleet(binary=find_redis() if request.param == "redis7" else "") as fleet:
        yield fleet


@pytest.fixture(params=["asyncio", "blocking"])
def face(request: pytest.FixtureRequest) -> Any:
    return APIS[request.param]


@pytest.fixture
def play(face: Any, fleet: ClusterFleet) -> Callable[[Scenario], Any]:
    """Plays a scenario on the cluster, with one of the faces."""
    fleet.client().flushall()
    return lambda scenario: face.play(scenario, fleet)
