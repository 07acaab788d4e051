"""Bad input is an error of ours, at once, and says what to do instead."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import redis
import redis.asyncio

import holdfast
import holdfast.aio
from tests.servers import Server, free_port
from tests.support import took

BAD_NAMES = {
    "empty": "",
    "too long": "x" * 513,
    "too long in bytes": "ä" * 300,
    "newline": "a\nb",
    "nul": "a\0b",
    "escape": "\x1b[31m",
    "delete": "a\x7fb",
    "C1": "a\x85b",
    "lone surrogate": "a\ud800b",
    "unclosed brace": "a{b",
    "closing brace": "a}b",
    "empty tag": "a{}b",
    "empty tag before a real one": "a{}{b}",
    "side key": "a:hf1:b",
    "side key of another version": "a:hf9:fence",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_bad_name(connect: Any, url: str, name: str) -> None:
    with pytest.raises(holdfast.InvalidName) as caught:
        connect(url).lock(name)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 250
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [None, 5, 5.0, b"bytes", ["list"], {"a": 1}, object], ids=repr)
def test_name_that_is_no_text(connect: Any, url: str, name: Any) -> None:
    with pytest.raises(holdfast.InvalidName, match="str"):
        connect(url).lock(name)


@pytest.mark.parametrize("decorator", ["cached", "exclusive"])
def test_a_decorator_without_a_name(connect: Any, url: str, decorator: str) -> None:
    def report() -> None: ...

    decorate = getattr(connect(url).client, decorator)
    for name in (report, None, 5, b"bytes"):
        with pytest.raises(holdfast.InvalidConfig, match=rf"give a name: @client\.{decorator}\("):
            decorate(name)
    with pytest.raises(holdfast.InvalidConfig, match=rf"^{decorator}\(.*report\): "):
        decorate(report)


async def enter(context: Any) -> None:
    async with context:
        raise AssertionError("entered")


async def loop_over(iterable: Any) -> None:
    async for _ in iterable:
        raise AssertionError("entered")


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_what_is_no_lock_says_what_to_use(kind: str) -> None:
    nowhere: Any = (holdfast if kind == "blocking" else holdfast.aio).connect("redis://127.0.0.1:1/0")
    rw, election = nowhere.rwlock("a"), nowhere.election("b")
    for what, use in ((rw, r"rw\.read or rw\.write"), (election, r"election\.lead\(\), or .*election\.terms\(\)")):
        with pytest.raises(TypeError, match=use):
            if kind == "blocking":
                with what:
                    raise AssertionError("entered")
            enter(what).send(None)
    with pytest.raises(TypeError, match=r"loop over election\.terms\(\)"):
        if kind == "blocking":
            iter(election)
        loop_over(election).send(None)
    with pytest.raises(AttributeError, match="'acquire': its sides are the locks, read and write"):
        rw.acquire()
    assert not hasattr(rw, "release")


@pytest.mark.parametrize("name", ["a{b}c", "{a}", "Ärger", "a b", "a:hf:b", "a:hfx:b", "x" * 512, "🔒"])
def test_good_name(face: Any, admin: redis.Redis, name: str) -> None:
    with face.lock(name) as lease:
        assert admin.get(name) == lease.token.encode()


@pytest.mark.parametrize(
    "namespace", [5, b"x", "a\nb", "a:hf1:", "x" * 600, "\ud800"], ids=lambda value: repr(value)[:12]
)
def test_bad_namespace(connect: Any, url: str, namespace: Any) -> None:
    with pytest.raises(holdfast.HoldfastError):
        connect(url, namespace=namespace)


@pytest.mark.parametrize("namespace", ["{", "}", "a{}"])
def test_namespace_that_spoils_every_name(connect: Any, url: str, namespace: str) -> None:
    with pytest.raises(holdfast.InvalidName):
        connect(url, namespace=namespace).lock("x")


BAD_OPTIONS = [
    *(("ttl", value) for value in (0, -1, math.nan, math.inf, -math.inf, "30", None, True, [30], 10**5000, 1e300)),
    *(("wait", value) for value in (-1, -0.001, math.nan, "5", True, [1], -math.inf, 10**5000)),
    *(("max_hold", value) for value in (0, -1, math.nan, math.inf, "5", 10**5000)),
    *(("on_lost", value) for value in ("explode", 5, ["cancel"], 10**5000)),
    *(("label", value) for value in (5, None, "x" * 65, "\ud800", 10**5000)),
    *(("cohort", value) for value in (-1, 1.5, "5", True)),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=lambda value: str(type(value))[8:-2])
def test_bad_option(connect: Any, url: str, option: str, value: Any) -> None:
    face = connect(url)
    face.lock("x", ttl=1, wait=1, max_hold=1, cohort=1)  # equal to True, and yet no precedent for it
    with pytest.raises(holdfast.InvalidConfig) as caught:
        face.lock("x", **{option: value})
    assert isinstance(caught.value, ValueError)
    assert option in str(caught.value)
    assert "give" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [True, 1.0])
def test_bad_option_that_equals_a_good_one_asked_before(connect: Any, url: str, value: Any) -> None:
    face = connect(url)
    face.lock("x", cohort=1)
    with pytest.raises(holdfast.InvalidConfig):
        face.lock("x", cohort=value)


@pytest.mark.parametrize("option", ["timeout", "fence_retention"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "5", None, True])
def test_bad_option_of_connect(connect: Any, url: str, option: str, value: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=option):
        connect(url, **{option: value})


@pytest.mark.parametrize("value", [0, -5, math.nan, math.inf, "5", None])
def test_bad_extension(face: Any, value: Any) -> None:
    with face.lock("x") as lease:
        with pytest.raises(holdfast.InvalidConfig):
            lease.extend(value)
        assert lease.held


def test_acquire_takes_what_threading_lock_takes(face: Any) -> None:
    lock = face.lock("x")
    for arguments in ((False, 1), (True, -2), (True, math.nan), (False, 10**5000), (True, -(10**5000))):
        with pytest.raises(ValueError) as caught:
            lock.acquire(*arguments)
        assert isinstance(caught.value, holdfast.HoldfastError)
    for timeout in (1e300, math.inf, 10**5000):
        with pytest.raises(OverflowError):
            lock.acquire(True, timeout)
    lease = lock.acquire(True, -1)
    assert lease
    lease.release()


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("http://localhost", "redis://"),
        ("localhost:6379", "redis://"),
        ("", "redis://"),
        ("redis://", "host"),
        ("redis://:6379", "host"),
        ("redis://localhost:port", "port"),
        ("redis://localhost:99999", "port"),
        ("redis://localhost/x", "number"),
        ("redis://localhost/-1", "number"),
        ("redis://localhost/1/2", "number"),
        ("redis://localhost/0?socket_timeout=soon", "socket_timeout"),
        ("unix://", "socket"),
        ("local://relative/path", "its path is not absolute; write local:///path/of/a/directory"),
        ("local:///tmp/x?directory=/tmp/y", "it has an option 'directory' that does not exist there"),
        ("redis://localhost/0#x", "it has a '#'; percent-encode it, as %23"),
        (b"redis://localhost", "URL"),
        (5, "URL"),
        ({}, "URL"),
    ],
)
def test_bad_target(connect: Any, monkeypatch: pytest.MonkeyPatch, target: Any, remedy: str) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "")
    with pytest.raises(holdfast.HoldfastError, match=remedy):
        connect(target).lock("x")


@pytest.mark.parametrize("scheme", ["redis://h/0", "rediss://h/0", "redis+sentinel://h/m", "redis+cluster://h"])
@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("port=x", "value of port .* from 1 to 65535"),
        ("port=99999", "value of port .* from 1 to 65535"),
        ("socket_read_size=-1", "value of socket_read_size .* from 1 to"),
        ("socket_read_size=0", "value of socket_read_size .* from 1 to"),
        ("socket_read_size=99999999999999", "value of socket_read_size .* from 1 to"),
        ("credential_provider=x", "credential_provider cannot be given as text; .* a redis client"),
        ("redis_connect_func=x", "redis_connect_func cannot be given as text"),
        ("parser_class=x", "parser_class cannot be given as text"),
        ("nonsense=1", "option 'nonsense' that does not exist there; .*, and those of a connection of redis-py"),
    ],
)
def test_an_impossible_option_of_a_url_is_one_clear_line(connect: Any, scheme: str, option: str, problem: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=problem) as refused:
        connect(f"{scheme}?{option}")
    assert "\n" not in str(refused.value)
    assert refused.value.__context__ is None


@pytest.mark.parametrize("scheme", ["rediss://h/0", "rediss+sentinel://h/m", "rediss+cluster://h"])
def test_an_impossible_option_of_tls_is_one_clear_line(connect: Any, scheme: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="value of ssl_cert_reqs .* none, optional or required"):
        connect(f"{scheme}?ssl_cert_reqs=zz")
    connect(f"{scheme}?ssl_cert_reqs=none")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"port": "x"}, "value of port"),
        ({"socket_read_size": -1}, "value of socket_read_size"),
        ({"ssl": True, "ssl_cert_reqs": "zz"}, "value of ssl_cert_reqs"),
        (
            {"credential_provider": redis.UsernamePasswordCredentialProvider("a", "b")},
            r"refuses its options \(DataError",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_client_is_refused_by_connect(connect: Any, settings: dict[str, Any], problem: str) -> None:
    theirs = redis.Redis if connect.kind == "blocking" else redis.asyncio.Redis
    with pytest.raises(holdfast.InvalidConfig, match=problem) as refused:
        connect(theirs(password="s3kr1t", **settings))
    assert "s3kr1t" not in str(refused.value)
    assert refused.value.__context__ is None


def fails_at_once(connect: Any, url: str, *words: str) -> None:
    """Each way to ask fails at once, with an error of ours that has all these words; so it does the second time."""
    for _ in range(2):
        with took(less_than=4.5), pytest.raises(holdfast.Unavailable) as caught:
            connect(url).lock("x").acquire()
        for word in words:
            assert word in str(caught.value)
        with took(less_than=4.5), pytest.raises(holdfast.HoldfastError):
            with connect(url).lock("x"):
                pass
        with took(less_than=4.5), pytest.raises(holdfast.HoldfastError):
            connect(url).lock("x").locked()


def test_nothing_listens_there(connect: Any) -> None:
    port = free_port()
    fails_at_once(connect, f"redis://127.0.0.1:{port}/0", "nothing listens", str(port), "Start a server")


def test_no_such_socket(connect: Any) -> None:
    fails_at_once(connect, "unix:///nowhere/at/all", "no such socket", "/nowhere/at/all")


def test_host_that_cannot_be_resolved(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        # What a resolver says; a real one would have to be asked over the network.
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    fails_at_once(connect, "redis://nowhere.invalid/0", "cannot be resolved", "nowhere.invalid", "Check the host")


def test_host_that_cannot_be_a_name(connect: Any) -> None:
    fails_at_once(connect, f"redis://{'x' * 70}.invalid/0", "Check")


def test_database_that_does_not_exist(connect: Any, url: str) -> None:
    fails_at_once(connect, url.removesuffix("0") + "99", "no such database", "number after the host")


def test_wrong_password(connect: Any, url: str) -> None:
    fails_at_once(connect, url.replace("//", "//nobody:wrong@"), "refused the user or the password", "credentials")


def test_missing_password(connect: Any) -> None:
    with Server("--requirepass", "open sesame") as server:
        fails_at_once(connect, server.url, "password", "redis://user:password@host")


def test_key_of_another_type(face: Any, admin: redis.Redis) -> None:
    admin.hset("x", "field", "value")
    with took(less_than=4.5), pytest.raises(holdfast.Unsupported, match="another name"):
        face.lock("x").acquire()
    assert admin.hget("x", "field") == b"value"


def test_fence_key_of_another_type_leaves_no_lock_behind(face: Any, admin: redis.Redis) -> None:
    admin.hset("x:hf1:fence:{x}", "field", "value")
    with took(less_than=4.5), pytest.raises(holdfast.HoldfastError):
        face.lock("x").acquire()
    assert not admin.exists("x")


def test_a_lock_without_a_name_is_refused_and_one_on_several_is_not(face: Any) -> None:
    with pytest.raises(holdfast.InvalidName):
        face.lock()
    with face.lock("a", "b") as lease:
        assert set(lease.fences) == {"a", "b"}


def test_a_ttl_in_the_place_of_a_name(connect: Any, url: str) -> None:
    """As redis-py takes it: ``lock("x", 10)``."""
    with pytest.raises(holdfast.InvalidName, match="a name is a str, not int; for a ttl or a wait write ttl= or wait="):
        connect(url).lock("x", 10)


def test_renew_is_true_or_false(connect: Any, url: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="renew='no': give True or False"):
        connect(url).lock("x", renew="no")
