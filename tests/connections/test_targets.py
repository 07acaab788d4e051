"""Every way to name a server: URLs of each kind, and clients of redis-py with whatever settings they have."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio

import holdfast
from tests.servers import Server, find_binary, free_port
from tests.support import AioFace, as_bytes, lock_keys, took
from tests.tls import TlsRelay

PASSWORD = "p@ss:word/with#everything"


def check_works(face: Any, admin: redis.Redis) -> None:
    """One cycle, and that it excludes, on the server and in the database that were meant."""
    lock = face.lock("x")
    with lock as lease:
        assert admin.get("x") in (lease.token, lease.token.encode())
        assert face.lock("x").acquire(blocking=False) is None
        assert face.lock("x").locked()
        lease.extend(60)
    assert not face.lock("x").locked()


def redis_client(connect: Any, url: str, **options: Any) -> Any:
    """A client of redis-py's, of the kind that this face takes."""
    return (redis.Redis if connect.kind == "blocking" else redis.asyncio.Redis).from_url(url, **options)


def in_database(number: int, **settings: Any) -> redis.Redis:
    return redis.Redis(db=number, **settings)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [True, False])
def test_client_with_any_decoding_and_protocol(
    connect: Any, url: str, admin: redis.Redis, decode_responses: bool, protocol: int
) -> None:
    theirs = redis_client(connect, url, decode_responses=decode_responses, protocol=protocol)
    check_works(connect(theirs), admin)
    # Its pool is the user's: nothing is taken from it, and nothing is left in it.
    assert (
        theirs.connection_pool.get_connection_count()[0][0] == 0
        if hasattr(theirs.connection_pool, "get_connection_count")
        else True
    )


def test_closing_leaves_the_users_client_alone(url: str) -> None:
    with redis.Redis.from_url(url) as theirs:
        theirs.set("before", 1)
        with holdfast.connect(theirs) as client, client.lock("x"):
            pass
        assert theirs.get("before") == b"1"


@pytest.fixture
def locked_server() -> Iterator[Server]:
    with Server("--requirepass", PASSWORD) as server:
        yield server


def test_password_and_database(connect: Any, locked_server: Server) -> None:
    port = locked_server.port
    admin = in_database(3, port=port, password=PASSWORD)
    check_works(connect(f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/3"), admin)
    check_works(connect(f"valkey://default:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/3"), admin)
    theirs = redis_client(connect, f"redis://127.0.0.1:{port}/3", password=PASSWORD)
    check_works(connect(theirs), admin)
    admin.close()
    assert lock_keys(locked_server.client()) == []


def test_user_of_an_acl_who_may_do_only_what_is_needed(connect: Any, server: Server, admin: redis.Redis) -> None:
    admin.execute_command(
        *("ACL", "SETUSER", "app", "on", ">pw", "resetkeys", "~app:*", "resetchannels", "&app:*", "-@all"),
        *("+eval", "+evalsha", "+get", "+set", "+del", "+exists", "+pexpire", "+pttl", "+time", "+hello", "+auth"),
        *("+select", "+client|setinfo", "+client|setname", "+ping"),
    )
    try:
        face = connect(server.url.replace("//", "//app:pw@"))
        with face.lock("app:x") as lease:
            lease.extend(60)
        with pytest.raises(holdfast.HoldfastError, match="may not"):
            face.lock("other").acquire(timeout=5)
    finally:
        admin.execute_command("ACL", "DELUSER", "app")


@pytest.mark.parametrize("missing", ["time", "get", "set", "exists", "pexpire", "pttl", "evalsha"])
def test_permission_that_is_missing_leaves_no_key(
    connect: Any, server: Server, admin: redis.Redis, missing: str
) -> None:
    # A script is not rolled back: what it wrote before the command that it may not use would stay.
    admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", f"-{missing}")
    try:
        face = connect(server.url.replace("//", "//app:pw@"))
        try:
            lease = face.lock("x").acquire(timeout=1)
        except holdfast.HoldfastError as error:
            assert "may not" in str(error) or "permission" in str(error)
        else:
            lease.release()
        assert lock_keys(admin) == []
    finally:
        admin.execute_command("ACL", "DELUSER", "app")


def test_unix_socket(connect: Any) -> None:
    with Server(unix=True) as server:
        admin = server.client()
        check_works(connect(f"unix://{server.path}"), admin)
        check_works(connect(redis_client(connect, server.url)), admin)
        with in_database(2, unix_socket_path=server.path) as admin:
            check_works(connect(f"unix://{server.path}?db=2"), admin)


@pytest.fixture(params=["server", "relay"])
def secure(
    request: pytest.FixtureRequest, certificate: tuple[str, str], server: Server
) -> Iterator[tuple[Server, str, int]]:
    """A server that speaks TLS, itself or through a relay; the certificate to trust; the port."""
    trusted, key = certificate
    if request.param == "relay":
        relay = TlsRelay(server.port, trusted, key)
        yield server, trusted, relay.port
        relay.close()
        return
    port = free_port()
    try:
        speaker = Server(
            *("--tls-port", str(port), "--tls-cert-file", trusted, "--tls-key-file", key),
            *("--tls-ca-cert-file", trusted, "--tls-auth-clients", "no"),
        )
    except RuntimeError:
        pytest.skip(f"{os.path.basename(find_binary())} was built without TLS; the relay stands in for it")
    with speaker:
        yield speaker, trusted, port


def test_tls(connect: Any, secure: tuple[Server, str, int]) -> None:
    server, certificate, port = secure
    admin = server.client()
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"
    check_works(connect(url), admin)
    check_works(connect(redis_client(connect, url)), admin)


def test_tls_with_an_unknown_certificate_is_refused(connect: Any, secure: tuple[Server, str, int]) -> None:
    _, _, port = secure
    with pytest.raises(holdfast.Unavailable, match="TLS"):
        connect(f"rediss://localhost:{port}/0").lock("x").acquire(timeout=5)


def test_tls_wait_ends_in_time_on_a_hung_server(connect: Any, secure: tuple[Server, str, int]) -> None:
    server, certificate, port = secure
    face = connect(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}")
    with face.lock("x"):
        pass
    server.pause()
    try:
        with took(less_than=5.0), pytest.raises(holdfast.Unavailable):
            face.lock("x").acquire(timeout=0.5)
    finally:
        server.resume()


def sockets_of(face: Any) -> list[Any]:
    """Those of its pool and of its shared connection."""
    driver = face.client._driver
    if isinstance(face, AioFace):
        return [driver.engine.shared._transport.get_extra_info("socket")]
    with face.lock("listener"):
        assert driver.shared.listen(5.0)
    return [line._sock for line in driver.engine._idle] + [
        other.sock for other in driver.shared._thread.connections.values()
    ]


def test_the_kernel_looks_after_connections(connect: Any, url: str) -> None:
    face = connect(url)
    with face.lock("x"):
        pass
    found = sockets_of(face)
    assert len(found) == (1 if connect.kind == "asyncio" else 2)
    for sock in found:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 20_000)):
            if hasattr(socket, option):
                assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value


def test_what_the_user_has_said_about_keepalive_is_kept(connect: Any, url: str) -> None:
    own = connect(redis_client(connect, url, socket_keepalive_options={socket.TCP_KEEPINTVL: 77}))
    none = connect(redis_client(connect, url, socket_keepalive=False))
    for face in (own, none):
        with face.lock("x"):
            pass
    for sock in sockets_of(own):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 77
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    for sock in sockets_of(none):
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_client_of_the_other_face_is_refused_with_the_remedy(connect: Any, url: str) -> None:
    wrong = (redis.asyncio.Redis if connect.kind == "blocking" else redis.Redis).from_url(url)
    here = "holdfast.connect" if connect.kind == "asyncio" else "holdfast.aio.connect"
    with pytest.raises(holdfast.InvalidConfig, match=here):
        connect(wrong)


def test_namespace_is_in_front_of_every_key(connect: Any, url: str, admin: redis.Redis) -> None:
    face = connect(url, namespace="app:")
    with face.lock("x") as lease:
        assert lease.name == "x"
        assert admin.get("app:x") == lease.token.encode()
        assert all(as_bytes(key).startswith(b"app:x") for key in admin.keys("*"))


def test_faces_exclude_each_other(url: str, client: holdfast.Client) -> None:
    face = AioFace(url)
    try:
        with client.lock("x"):
            assert face.lock("x").acquire(blocking=False) is None
        with face.lock("x"):
            assert client.lock("x").acquire(blocking=False) is None
    finally:
        face.close()
