"""What people read when a connection cannot be made or used: what happened, where, and what to do.

Each message is at most two sentences, and shows neither a password nor a token.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
import trio

import holdfast
import holdfast.aio
from tests.proxy import Proxy, instead
from tests.servers import Server
from tests.support import took
from tests.tls import TlsRelay

SECRET = "s3cr3t-w0rd"


@contextlib.contextmanager
def tells(*words: str, seconds: float = 5.0) -> Iterator[None]:
    """The block raises Unavailable, in time, and its message says all of this."""
    with took(less_than=seconds), pytest.raises(holdfast.Unavailable) as caught:
        yield
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert SECRET not in message
    sentences = re.split(r"[.!?] (?=[A-Z])", message)
    assert len(sentences) <= 2, message


@contextlib.contextmanager
def relay_to(server: Server, certificate: tuple[str, str], **options: Any) -> Iterator[TlsRelay]:
    relay = TlsRelay(server.port, *certificate, **options)
    try:
        yield relay
    finally:
        relay.close()


# TLS.


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_a_certificate_that_is_not_there(connect: Any, server: Server, option: str) -> None:
    face = connect(f"rediss://:{SECRET}@localhost:{server.port}/0?{option}=/nowhere/ca.pem", timeout=1.0)
    with tells(f"localhost:{server.port}", f"{option} names a file that does not exist: /nowhere/ca.pem"):
        face.lock("x").acquire()


def test_a_plain_client_at_a_tls_port(connect: Any, server: Server, certificate: tuple[str, str]) -> None:
    with relay_to(server, certificate) as relay:
        face = connect(f"redis://localhost:{relay.port}/0", timeout=3.0)
        with tells(f"localhost:{relay.port}", "rediss://"):
            face.lock("x").acquire()


def test_a_tls_client_at_a_plain_port(connect: Any, server: Server, certificate: tuple[str, str]) -> None:
    face = connect(f"rediss://localhost:{server.port}/0?ssl_ca_certs={certificate[0]}", timeout=3.0)
    with tells(f"localhost:{server.port}", "TLS handshake", "use redis://"):
        face.lock("x").acquire()


def test_a_client_without_the_certificate_that_is_wanted(
    connect: Any, server: Server, certificate: tuple[str, str]
) -> None:
    with relay_to(server, certificate, wants_certificate=True) as relay:
        face = connect(f"rediss://localhost:{relay.port}/0?ssl_ca_certs={certificate[0]}", timeout=3.0)
        with tells(f"localhost:{relay.port}", "client certificate", "ssl_certfile"):
            face.lock("x").acquire()
        own = f"ssl_certfile={certificate[0]}&ssl_keyfile={certificate[1]}"
        with connect(f"rediss://localhost:{relay.port}/0?ssl_ca_certs={certificate[0]}&{own}").lock("x"):
            pass


def test_a_certificate_of_an_unknown_authority(connect: Any, server: Server, certificate: tuple[str, str]) -> None:
    with relay_to(server, certificate) as relay:
        face = connect(f"rediss://localhost:{relay.port}/0", timeout=3.0)
        with tells("certificate is not trusted", "ssl_ca_certs="):
            face.lock("x").acquire()


# What the server does not allow.


def test_a_server_that_has_too_many_clients(connect: Any) -> None:
    with Server() as server, server.client() as admin:
        admin.ping()
        admin.config_set("maxclients", 1)
        face = connect(server.url)
        with tells(server.url, "no room for another connection", "maxclients"):
            face.lock("x").acquire(timeout=2)


@pytest.mark.parametrize("renamed", [("EVALSHA",), ("EVAL", "EVALSHA")], ids="+".join)
def test_a_server_without_scripts(connect: Any, renamed: tuple[str, ...]) -> None:
    options = [word for command in renamed for word in ("--rename-command", command, "")]
    with Server(*options) as server:
        with tells(server.url, "scripts are disabled", "EVALSHA"):
            connect(server.url).lock("x").acquire()


NOSCRIPT = instead(b"-NOSCRIPT No matching script\r\n")


def test_an_answer_with_control_characters(connect: Any, proxy: Proxy) -> None:
    """A log or a traceback shows them: a terminal must not obey them, and a line of it stays a line."""
    proxy.on("*", instead(b"-\x1b[31mSTOP" + 500 * b"\x07" + b" now\r\n"), times=500)
    with pytest.raises(holdfast.Unavailable) as caught:
        connect(proxy.url, timeout=1.0).lock("x").acquire(blocking=False)
    assert "it answered \\x1b[31mSTOP\\x07" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_a_server_that_keeps_no_script(connect: Any, proxy: Proxy) -> None:
    """As some proxies do. The source of the script is sent once, and not for ever."""
    proxy.on("acquire", NOSCRIPT, times=100_000)
    with tells("scripts are disabled there, or not kept", "EVALSHA", seconds=5.0):
        connect(proxy.url).lock("x").acquire(timeout=10)
    assert proxy.seen("acquire") == 2


def test_renewals_where_no_script_is_kept(connect: Any, proxy: Proxy) -> None:
    face = connect(proxy.url)
    lease = face.lock("x", ttl=1.5).acquire()
    proxy.on("renew", NOSCRIPT, times=100_000)
    proxy.await_request("renew")
    assert lease.lost.wait(5.0)
    assert proxy.seen("renew") < 100
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


@pytest.fixture
def user(server: Server, admin: redis.Redis) -> Iterator[Any]:
    """``user(*rules)``: the URL of a user who may do that."""

    def make(*rules: str) -> str:
        admin.execute_command("ACL", "SETUSER", "app", "reset", "on", f">{SECRET}", *rules)
        return server.url.replace("//", f"//app:{SECRET}@")

    yield make
    admin.execute_command("ACL", "DELUSER", "app")


def test_a_user_who_may_not_use_scripts(connect: Any, user: Any) -> None:
    with tells("may not use EVALSHA", "docs/guarantees.md"):
        connect(user("~*", "&*", "+@all", "-eval", "-evalsha")).lock("x").acquire()


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_user_with_another_key_prefix(connect: Any, user: Any, kind: str) -> None:
    face = connect(user("~app:*", "&*", "+@all"), namespace="shop:")
    make = face.lock if kind == "lock" else lambda name: _semaphore(face, name)
    with tells("may not use the key 'shop:x'", "~shop:x and ~shop:x:hf1:*"):
        make("x").acquire()


def _semaphore(face: Any, name: str) -> Any:
    class Awaited:
        def acquire(self) -> Any:
            outcome = face.client.semaphore(name, permits=2).acquire()
            return face._call(outcome) if hasattr(face, "_call") else outcome

    return Awaited()


def test_the_pattern_that_a_message_names_is_enough(connect: Any, user: Any) -> None:
    with connect(user("~shop:x", "~shop:x:hf1:*", "&*", "+@all"), namespace="shop:").lock("x") as lease:
        lease.extend(60)


# A replica.


@pytest.fixture
def replica(server: Server) -> Iterator[Server]:
    with Server("--replicaof", "127.0.0.1", str(server.port)) as replica:
        yield replica


@pytest.mark.parametrize("primary", ["up", "down"])
def test_a_wait_without_end_at_a_replica_ends_after_the_clients_timeout(connect: Any, primary: str) -> None:
    with Server() as server, Server("--replicaof", "127.0.0.1", str(server.port)) as replica:
        with replica.client() as admin:
            if primary == "down":
                admin.config_set("replica-serve-stale-data", "no")
                server.kill()
        with tells("replica", "Connect to the primary", seconds=4.0), took(less_than=4.0, at_least=0.5):
            connect(replica.url, timeout=1.5).lock("x").acquire()


def test_a_failover_is_waited_for(connect: Any) -> None:
    """The client has had its writes answered there: then it is a primary that will most likely come back."""
    with Server() as server, server.client() as admin:
        face = connect(server.url, timeout=1.0)
        with face.lock("x"):
            pass
        admin.replicaof("127.0.0.1", "1")
        with took(less_than=4.0, at_least=1.0), pytest.raises(holdfast.Unavailable, match="replica"):
            face.lock("x").acquire(timeout=1.0)


def test_looking_at_a_replica_is_no_write(connect: Any, server: Server, replica: Server) -> None:
    face = connect(replica.url, timeout=1.5)
    assert not face.lock("x").locked()
    with tells("replica", seconds=4.0):
        face.lock("x").acquire()


def test_a_full_server_is_waited_for(connect: Any) -> None:
    with Server("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server, server.client() as admin:
        face = connect(server.url, timeout=1.0)
        with took(less_than=4.0, at_least=0.9), pytest.raises(holdfast.Unavailable, match="memory"):
            face.lock("x").acquire(timeout=1.0)
        admin.config_set("maxmemory", 0)
        with face.lock("x", wait=2):
            pass


# What is no server, or no place for it.


def test_an_asyncio_client_under_trio(url: str) -> None:
    async def use() -> None:
        await holdfast.aio.connect(url).lock("x").acquire()

    with pytest.raises(holdfast.InvalidConfig, match="asyncio event loop") as caught:
        trio.run(use)
    assert "trio" in str(caught.value)


@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "asyncio"])
def test_a_client_of_fakeredis(aio: bool) -> None:
    fake: Any = fakeredis.FakeAsyncRedis() if aio else fakeredis.FakeRedis()
    with pytest.raises(holdfast.InvalidConfig, match="local://"):
        (holdfast.aio.connect if aio else holdfast.connect)(fake)


@pytest.mark.parametrize("version", ["1.9", "3.4.1"])
def test_a_hiredis_that_is_too_old(version: str) -> None:
    program = f"import hiredis\nhiredis.__version__ = {version!r}\nimport holdfast\nholdfast.connect('local://')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"ImportError: Holdfast needs hiredis 3.4.2 or newer, but {version} is installed. Run: pip install -U hiredis"
    ), done.stderr
