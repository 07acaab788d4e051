"""One real server for the session, clean for each test, and a client of it."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import settings

import holdfast
from holdfast.lua import SCRIPTS
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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Pulse(), "pulse")


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
def _session_server() -> Iterator[Server]:
    with Server() as server:
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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    return make_certificate(tmp_path_factory.mktemp("tls"))


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
