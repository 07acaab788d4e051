"""A password appears nowhere in an error of ours, however broken the URL is that it came in."""

from __future__ import annotations

import sys
import traceback
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.aio
from holdfast.cli import main
from tests.servers import Server, free_port

# Long and odd enough that finding it is no accident, and mixed with what breaks URLs.
CORE = "s3kr1t"
breakers = st.text(st.sampled_from(" \t@:/?#[]{}%&=\\'\"\u00e4\u2028;,+"), max_size=6)
passwords = st.builds(lambda before, after: f"{before}{CORE}{after}", breakers, breakers)

shapes = st.sampled_from(
    [
        "redis://user:{0}@localhost:1/0",
        "redis://:{0}@localhost:1/0",
        "rediss://user:{0}@localhost:1/0",
        "valkey://user:{0}@localhost:1",
        "redis://user:{0}@localhost:port/0",
        "redis://user:{0}@localhost:99999/0",
        "redis://user:{0}@localhost/db",
        "redis://user:{0}@/0",
        "redis://user:{0}@",
        "redis://user:{0}",
        "redis://:{0}",
        "redis://{0}@localhost:1",
        "redis://[{0}@localhost:1",
        "redis://user:{0}@[::1/0",
        "redis:/user:{0}@localhost",
        "redis:user:{0}@localhost",
        "user:{0}@localhost:6379",
        "http://user:{0}@localhost",
        "red is://user:{0}@localhost",
        "redis://localhost:1/0?password={0}",
        "redis://localhost:1/0?password={0}&socket_timeout=soon",
        "redis://localhost:1/0?socket_timeout=soon&password={0}",
        "redis://localhost:1/0?username={0}&max_connections=many",
        "redis://localhost:1/0?ssl_password={0}&socket_timeout=soon",
        "unix://user:{0}@/nowhere/socket",
        "unix://user:{0}@",
        "unix:///nowhere/socket?password={0}&db=many",
        "redis+sentinel://user:{0}@localhost:1/mymaster",
        "redis+sentinel://user:{0}@localhost:1,localhost:2/mymaster/0",
        "redis+sentinel://user:{0}",
        "redis+sentinel://user:{0}@h1:port,h2/mymaster",
        "redis+sentinel://localhost:1/mymaster/0?sentinel_password={0}",
        "redis+sentinel://localhost:1/mymaster/0?sentinel_password={0}&sentinel_socket_timeout=soon",
        "redis+cluster://user:{0}@localhost:1,localhost:2",
        "redlock://user:{0}@localhost",
    ]
)


def all_that_is_shown(error: BaseException) -> str:
    """Every text in which an error could end up in a log, causes and contexts included."""
    seen: list[str] = []
    link: BaseException | None = error
    while link is not None:
        seen += [str(link), repr(link), repr(link.args), repr(vars(link))]
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n".join([*seen, *traceback.format_exception(error)])


def locals_of(error: BaseException) -> str:
    """Every local variable that a debugger or an error reporter finds in frames that are not this file's."""
    found: list[str] = []
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None:
            continue
        links += [link.__cause__, link.__context__]  # also one that is not printed: a reporter can still reach it
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_code.co_filename != __file__:
                found += [f"{frame.f_code.co_name} {name}={value!r}" for name, value in frame.f_locals.items()]
    return "\n".join(found)


def try_to_lock(url: str) -> BaseException | None:
    client: Any = None
    try:
        client = holdfast.connect(url, timeout=0.2)
        assert CORE not in repr(client)
        lock = client.lock("x", wait=0)
        assert CORE not in repr(lock)
        with lock:
            pass
    except holdfast.HoldfastError as error:
        return error
    finally:
        if client is not None:
            client.close()
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes, passwords, st.booleans())
@example("redis://u:{0}@host:notaport/0", f"my {CORE}", False)
@example("redis://:{0}", CORE, False)
@example("redis://localhost:1/0?password={0}", f"@{CORE}", False)
@example("redis://user:{0}@localhost:1", f"12?{CORE}=", False)
@example("redis://h/0?password={0}&socket_timeout=abc", f"a {CORE}", False)
def test_no_malformed_url_gives_its_password_away(shape: str, password: str, quoted: bool) -> None:
    # With no host of its own, what follows an '@' in the password is one, by every reading of the URL.
    assume(quoted or "@" not in password or "{0}@" in shape or "?" in shape)
    # Likewise, what follows a '/' in it is the path of a socket.
    assume(quoted or "/" not in password or not shape.startswith("unix://"))
    url = shape.format(quote(password, safe="") if quoted else password)
    error = try_to_lock(url)
    assert error is not None, "there is no server at any of these"
    assert CORE not in all_that_is_shown(error)
    assert CORE not in locals_of(error)


MALFORMED = [
    f"redis://user:{CORE}@localhost:port/0",
    f"redis://user:{CORE}@localhost/db",
    f"redis://user:{CORE}@[::1/0",
    f"redis://user:{CORE}@/0",
    f"redis://user:{CORE}@localhost/0?socket_timeout=soon",
    f"redis://user:{CORE}@localhost/0?nonsense=1",
    f"rediss://user:{CORE}@localhost/0?ssl_cert_reqs=sometimes",
    f"rediss+cluster://user:{CORE}@localhost?ssl_cert_reqs=sometimes",
    f"redis://user:{CORE}@localhost/0?credential_provider=vault",
    f"redis+sentinel://user:{CORE}@localhost/mymaster?port=many",
    f"redis+sentinel://localhost/mymaster?sentinel_password={CORE}&sentinel_port=many",
    f"redis+cluster://user:{CORE}@localhost?port=many",
    f"redis://user:{CORE}@localhost/0?socket_read_size=-1",
    f"redis://localhost/0?password=@{CORE}",
    f"http://user:{CORE}@localhost",
    f"user:{CORE}@localhost:6379",
    f"local://user:{CORE}@localhost",
]


@pytest.mark.parametrize("url", MALFORMED)
@pytest.mark.parametrize("face", [holdfast.connect, holdfast.aio.connect], ids=["blocking", "asyncio"])
def test_no_frame_of_ours_keeps_a_malformed_url(face: Any, url: str) -> None:
    with pytest.raises(holdfast.InvalidConfig) as caught:
        face(url)
    assert CORE not in all_that_is_shown(caught.value).replace(url, "")  # which this test itself says
    assert CORE not in locals_of(caught.value)


@pytest.mark.parametrize("face", [holdfast.connect, holdfast.aio.connect], ids=["blocking", "asyncio"])
def test_no_frame_of_ours_keeps_a_malformed_url_of_the_environment(monkeypatch: pytest.MonkeyPatch, face: Any) -> None:
    monkeypatch.setenv("HOLDFAST_URL", MALFORMED[0])
    with pytest.raises(holdfast.InvalidConfig) as caught:
        face()
    assert CORE not in locals_of(caught.value)


@pytest.mark.parametrize("url", MALFORMED)
def test_no_frame_of_the_command_line_keeps_a_malformed_url(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "run", "--url", url, "job", "--", "true"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 64
    assert CORE not in locals_of(end.value)


@pytest.mark.parametrize("options", [{"namespace": "a\nb"}, {"timeout": -1}, {"cohort": -1}, {"on_event": 1}])
def test_no_frame_of_connect_keeps_a_password_whatever_is_refused(connect: Any, options: dict[str, Any]) -> None:
    with pytest.raises(holdfast.HoldfastError) as caught:
        connect(f"redis://user:{CORE}@127.0.0.1", **options)
    assert CORE not in all_that_is_shown(caught.value)


def test_wrong_password_is_not_shown(connect: Any) -> None:
    with Server("--requirepass", "another") as server:
        url = server.url.replace("//", f"//default:{CORE}@")
        with pytest.raises(holdfast.Unavailable) as caught:
            connect(url).lock("x").acquire(timeout=1)
        assert CORE not in all_that_is_shown(caught.value)


def test_password_of_a_client_that_was_handed_over_is_not_shown(connect: Any) -> None:
    theirs = (redis.Redis if connect.kind == "blocking" else redis.asyncio.Redis)(
        host="127.0.0.1", port=free_port(), username="user", password=CORE
    )
    face = connect(theirs)
    with pytest.raises(holdfast.Unavailable) as caught:
        face.lock("x").acquire(timeout=1)
    assert CORE not in all_that_is_shown(caught.value)
    assert CORE not in repr(face.client)


def test_password_and_token_are_shown_by_nothing_that_people_print(connect: Any) -> None:
    with Server("--requirepass", CORE) as server:
        face = connect(server.url.replace("//", f"//:{CORE}@"))
        lock = face.lock("x")
        lease = lock.acquire(timeout=5)
        real = getattr(lease, "_real", lease)
        secret = lease.token.rpartition(".")[2]
        for shown in (repr(face.client), repr(lock), repr(real), str(real), f"{real}"):
            assert CORE not in shown
            assert secret not in shown
        server.client().delete("x")
        with pytest.raises(holdfast.LeaseLost) as caught:
            lease.release()
        assert secret not in all_that_is_shown(caught.value)


@pytest.mark.parametrize("variable", [f"redis://user:{CORE}@localhost:port/0", f"http://user:{CORE}@localhost"])
def test_password_in_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("HOLDFAST_URL", variable)
    with pytest.raises(holdfast.HoldfastError) as caught:
        holdfast.connect()
    # Without the source line, in which this test itself says it.
    assert CORE not in str(caught.value) + repr(caught.value)


def test_no_password_and_no_token_in_the_repr_of_what_locals_hold(client: holdfast.Client) -> None:
    secret = holdfast.connect("redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in repr(secret._driver.engine._target)
    with pytest.raises(holdfast.Unavailable) as caught:
        secret.lock("x").acquire()
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "hunter2" not in "".join(shown.format())
    lease = client.lock("x").acquire()
    assert lease
    from holdfast.protocol.steps import LOCK_STEPS

    assert lease.token not in repr(LOCK_STEPS.acquire_step(lease._hold, "", False))
    lease.release()
    secret.close()
