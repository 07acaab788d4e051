"""etcd with users, and with TLS."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.protocol.intents.requests import Watch
from tests.etcd.watching import all_ended, watches_at
from tests.fleet_etcd import EtcdFleet, coded
from tests.support import asyncio_test
from tests.tls import TlsRelay

PASSWORD = "a/secret@word"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdFleet]:
    """A cluster whose tokens are valid for a second, with a user that may use the keys of app: only."""
    with EtcdFleet(1, "--auth-token-ttl", "1") as fleet:
        for name in ("root", "app"):
            fleet.ask("/v3/auth/user/add", {"name": name, "password": PASSWORD})
            fleet.ask("/v3/auth/role/add", {"name": name})
            fleet.ask("/v3/auth/user/grant", {"user": name, "role": name})
        keys = {"permType": "READWRITE", "key": coded("app:"), "range_end": coded("app;")}
        fleet.ask("/v3/auth/role/grant", {"name": "app", "perm": keys})
        fleet.ask("/v3/auth/enable", {})
        yield fleet


def url_of(fleet: EtcdFleet, user: str, password: str = "a%2Fsecret%40word") -> str:
    return fleet.url.replace("etcd://", f"etcd://{user}:{password}@")


def test_a_token_that_has_expired_is_renewed(guarded: EtcdFleet) -> None:
    with holdfast.connect(url_of(guarded, "app")) as client:
        lease = client.lock("app:a", ttl=1.5).acquire()
        time.sleep(4)  # no request but those of the keeper; each may find the token expired
        lease.check()
        lease.release()
        time.sleep(2.5)
        with client.lock("app:a"):
            pass


def test_a_waiter_is_served_although_tokens_expire(guarded: EtcdFleet, connect: Any) -> None:
    one, two = connect(url_of(guarded, "app")), holdfast.connect(url_of(guarded, "app"))
    lease = two.lock("app:a").acquire()
    assert one.lock("app:a").acquire(timeout=3) is None
    lease.release()
    taken = one.lock("app:a").acquire(timeout=10)
    taken.release()
    two.close()


@pytest.mark.parametrize(
    ("user", "password", "why"),
    [
        ("app", "wrong", "it refused the user or the password"),
        ("nobody", "wrong", "it refused the user or the password"),
    ],
)
def test_wrong_credentials_are_named_and_not_shown(
    guarded: EtcdFleet, connect: Any, user: str, password: str, why: str
) -> None:
    client = connect(url_of(guarded, user, password))
    with pytest.raises(holdfast.Unavailable, match=why) as caught:
        client.lock("app:a").acquire(blocking=False)
    assert "wrong" not in f"{caught.value!r} {client!r}".replace("wrong password", "")


def test_without_credentials_it_says_so(guarded: EtcdFleet, connect: Any) -> None:
    with pytest.raises(holdfast.Unavailable, match="it wants a user and a password"):
        connect(guarded.url).lock("app:a").acquire(blocking=False)


def test_a_name_that_the_user_may_not_use_is_refused(guarded: EtcdFleet, connect: Any) -> None:
    with pytest.raises(holdfast.Unavailable, match="this user may not do that"):
        connect(url_of(guarded, "app")).lock("other:a").acquire(blocking=False)


def test_tls(certificate: tuple[str, str], connect: Any) -> None:
    file, key = certificate
    with EtcdFleet(1, "--cert-file", file, "--key-file", key, scheme="etcds") as fleet:
        url = fleet.url.replace("127.0.0.1", "localhost")
        with pytest.raises(holdfast.Unavailable, match="its TLS certificate is not trusted"):
            connect(url).lock("a").acquire(blocking=False)
        trusting = connect(f"{url}?ssl_ca_certs={file}")
        lease = trusting.lock("a").acquire()
        assert lease.held
        lease.release()
        with pytest.raises(holdfast.Unavailable, match="TLS"):
            connect(url.replace("etcds://", "etcd://")).lock("a").acquire(blocking=False)
        with pytest.raises(holdfast.Unavailable, match="ssl_ca_certs"):
            connect(f"{url}?ssl_ca_certs=/nowhere.pem").lock("a").acquire(blocking=False)


@pytest.fixture
def wary(fleet: EtcdFleet, certificate: tuple[str, str]) -> Iterator[TlsRelay]:
    """A port of etcd that wants a client certificate."""
    relay = TlsRelay(fleet.members[0].client_port, *certificate, wants_certificate=True)
    yield relay
    relay.close()


def test_a_client_certificate(wary: TlsRelay, certificate: tuple[str, str], connect: Any) -> None:
    file, key = certificate
    url = f"etcds://localhost:{wary.port}?ssl_ca_certs={file}&ssl_certfile={file}&ssl_keyfile={key}"
    lease = connect(url).lock("a").acquire()
    assert connect(url).lock("a").acquire(timeout=1) is None  # with a watch
    lease.release()


def test_without_a_client_certificate_the_error_says_that_one_is_wanted(
    wary: TlsRelay, certificate: tuple[str, str], connect: Any
) -> None:
    for _ in range(10):  # the alert comes while a request is written, or later
        client = connect(f"etcds://localhost:{wary.port}?ssl_ca_certs={certificate[0]}", timeout=2.0)
        with pytest.raises(holdfast.Unavailable, match=r"client certificate.*ssl_certfile= and ssl_keyfile="):
            client.lock("a").acquire(blocking=False)


def test_a_member_that_wants_a_client_certificate_is_left_for_the_next(
    wary: TlsRelay, fleet: EtcdFleet, certificate: tuple[str, str], connect: Any
) -> None:
    free = TlsRelay(fleet.members[0].client_port, *certificate)
    client = connect(f"etcds://localhost:{wary.port},localhost:{free.port}?ssl_ca_certs={certificate[0]}")
    client.lock("a").acquire(timeout=10).release()
    free.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is left open stays open."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@asyncio_test
async def test_a_watch_that_ends_during_its_handshake_leaves_no_connection_open(certificate: tuple[str, str]) -> None:
    ended: asyncio.Queue[bytes] = asyncio.Queue()
    begun = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)  # of the handshake, which is never answered
        begun.set()
        while await reader.read(65_536):
            pass
        await ended.put(b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watches, _ = watches_at(f"etcds://127.0.0.1:{port}?ssl_ca_certs={certificate[0]}")
    watches.begin(Watch("token", "key", 1))
    await begun.wait()
    watches.end("token")
    await asyncio.wait_for(ended.get(), 5.0)
    await watches.close()
    server.close()


def test_a_watch_that_wants_a_client_certificate_leaves_no_trace(
    wary: TlsRelay, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def watch() -> None:
        watches, told = watches_at(f"etcds://localhost:{wary.port}?ssl_ca_certs={certificate[0]}")
        for number in range(10):
            watches.begin(Watch(f"token{number}", f"key{number}", 1))
        assert await all_ended(watches)
        assert len(told) == 1, "one of them, because streams that fail tell at most once a second"
        await watches.close()

    asyncio.run(watch())
    gc.collect()  # asyncio logs the error of a task when the task is collected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
