"""What all tests share: one real server for the session, clean for each test, clients of it, and the stages."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import settings

import holdfast
from holdfast.engines.capabilities import ENGINES, FEATURES
from holdfast.lua import SCRIPTS
from tests.conformance.stages import APIS, STAGES, Scenario, server_of_stage
from tests.engine_choices import CHOICES, DEFAULT, EmbeddedServer
from tests.protocol.harness import Play
from tests.proxy import Proxy
from tests.pulse import Pulse
from tests.servers import Server
from tests.support import FACES
from tests.tls import make_certificate

# The same examples every time: a red run is then about the change, not about luck. To look for new ones:
# pytest --hypothesis-profile=default.
settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.load_profile("steady")

# A shell that starts us in the background, or nohup, lets us ignore these, and whatever we start inherits that. But
# Ctrl-C and a lost terminal are among the things to be tested.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=list(CHOICES), default=DEFAULT, help="on which servers `server` runs")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Pulse(), "pulse")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another engine than usual, what runs without a server has nothing new to say."""
    if config.getoption("--engine") != DEFAULT:
        items[:] = [item for item in items if _uses_server(item)]


def _uses_server(item: Any) -> bool:
    stage = item.callspec.params.get("play") if hasattr(item, "callspec") else None
    return "server" in item.fixturenames if stage is None else stage != "world"


# What a test needs that is run for this kind of lock.
_OF_KIND = {
    "several": "a lock on several names",
    "rlock": "rlock",
    "semaphore": "semaphore",
    "read": "rwlock",
    "write": "rwlock",
}


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """Skip a test that needs what the engine declares not to offer."""
    engine = CHOICES[request.config.getoption("--engine")].engine
    kind = request.node.callspec.params.get("kind") if hasattr(request.node, "callspec") else None
    needed = {_OF_KIND[kind]} if isinstance(kind, str) and kind in _OF_KIND else set()
    for marker in request.node.iter_markers("needs"):
        assert set(marker.args) <= set(FEATURES), "a misspelt feature would be skipped everywhere"
        needed |= set(marker.args)
    for feature in sorted(needed - ENGINES[engine].features):
        pytest.skip(f"{feature} is not offered by {engine}")


def pytest_collection_finish() -> None:
    """Thousands of tests are some hundred thousand objects, and the collector need not go through these each time: that
    takes longer than some leases last."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    """Nor need it find what a search has left behind, in the middle of a lease, nor go through what stays for good."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _session_server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with CHOICES[request.config.getoption("--engine")].start() as server:
        yield server


@pytest.fixture
def server(_session_server: Server) -> Iterator[Server]:
    """The session's server, empty. A test may do anything to it that the end of this fixture can undo."""
    with _session_server.client() as admin:
        admin.flushall()
        yield _session_server
        _session_server.resume()
        admin.config_set("maxmemory", 0)


@pytest.fixture
def embedded() -> Iterator[str]:
    """The URL of an embedded server in a directory of its own. No test uses that of the user."""
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture
def admin(server: Server) -> Iterator[redis.Redis]:
    """A plain client, to look at the server behind Holdfast's back."""
    with server.client() as admin:
        yield admin


@pytest.fixture
def url(server: Server) -> str:
    return server.url


@pytest.fixture
def client(url: str) -> Iterator[holdfast.Client]:
    with holdfast.connect(url) as client:
        yield client


@pytest.fixture
def proxy(server: Server, admin: redis.Redis) -> Iterator[Proxy]:
    """A proxy in front of the server, which knows all scripts: a fault is to hit a step, not a NOSCRIPT."""
    for script in SCRIPTS.values():
        admin.script_load(script.source)
    with Proxy(server.port) as proxy:
        yield proxy


def _certificate(tmp_path_factory: pytest.TempPathFactory, *names: str) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    return make_certificate(tmp_path_factory.mktemp("tls"), *names)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    return _certificate(tmp_path_factory)


@pytest.fixture(scope="session")
def other_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for another host than localhost, and its key."""
    return _certificate(tmp_path_factory, "elsewhere.example")


@pytest.fixture(params=FACES, ids=lambda face: face.kind)
def connect(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``connect(target, **options)``, on either face; what it made is closed after the test."""
    made: list[Any] = []

    def make(target: object = None, **options: Any) -> Any:
        made.append(request.param(target, **options))
        return made[-1]

    make.kind = request.param.kind  # type: ignore[attr-defined]
    yield make
    for face in made:
        face.close()


@pytest.fixture
def face(connect: Any, url: str) -> Any:
    """A client of the server, on either face."""
    return connect(url)


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], Any]:
    """Plays a scenario on one of the stages: the simulated world, asyncio or threads."""
    server = server_of_stage(request)
    return lambda scenario: APIS[request.param].play(scenario, server)


@pytest.fixture(autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    while Play.made:
        Play.made.pop().end()
