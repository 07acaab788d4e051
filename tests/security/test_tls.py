"""A certificate for another host is refused over TLS, with every version of redis-py that is allowed.

tests/sentinel/test_tls.py and tests/cluster/test_tls.py do the same there. ``make test-floors`` runs them with the
oldest redis-py, which does not check the name of the host unless it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

import holdfast
from tests.servers import Server
from tests.tls import TlsRelay

REFUSED = "its TLS certificate is not trusted"


@pytest.fixture
def elsewhere(server: Server, other_host: tuple[str, str]) -> Iterator[str]:
    """A URL of the server on localhost, whose certificate is for another host."""
    relay = TlsRelay(server.port, *other_host)
    yield f"rediss://localhost:{relay.port}/0?ssl_ca_certs={other_host[0]}"
    relay.close()


def client_of(connect: Any, url: str, **settings: Any) -> Any:
    """A client of redis-py, of the kind that this face takes."""
    return (redis.Redis if connect.kind == "blocking" else redis.asyncio.Redis).from_url(url, **settings)


def test_a_certificate_for_another_host_is_refused(connect: Any, elsewhere: str) -> None:
    with pytest.raises(holdfast.Unavailable, match=REFUSED):
        connect(elsewhere).lock("x", wait=0).acquire()


@pytest.mark.parametrize("option", ["ssl_check_hostname=false", "ssl_cert_reqs=none"])
def test_the_user_can_turn_the_check_off(connect: Any, elsewhere: str, option: str) -> None:
    with connect(f"{elsewhere}&{option}").lock("x", wait=0) as lease:
        assert lease.held


def test_a_client_without_a_setting_of_its_own_is_checked(connect: Any, elsewhere: str) -> None:
    with pytest.raises(holdfast.Unavailable, match=REFUSED):
        connect(client_of(connect, elsewhere)).lock("x", wait=0).acquire()


@pytest.mark.parametrize("checks", [True, False])
def test_the_setting_of_a_client_is_respected(connect: Any, elsewhere: str, checks: bool) -> None:
    lock = connect(client_of(connect, elsewhere, ssl_check_hostname=checks)).lock("x", wait=0)
    if not checks:
        with lock as lease:
            assert lease.held
        return
    with pytest.raises(holdfast.Unavailable, match=REFUSED):
        lock.acquire()
