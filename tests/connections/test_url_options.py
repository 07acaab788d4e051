"""Options of ``connect`` in a URL of each engine: what they mean, what is refused, and what code overrides."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.engines.redis.target import resolve
from tests.cli.shell import environment
from tests.support import ROOT, as_bytes

URLS = [
    "local:///tmp/x",
    "local://",
    "redis://localhost/0",
    "rediss://localhost?ssl_cert_reqs=none",
    "unix:///tmp/redis.sock?db=1",
    "valkey://user:password@localhost",
    "redis+sentinel://h1:26379,h2:26379/mymaster/0?sentinel_password=x",
    "redis+cluster://h1:7000,h2:7001",
    "etcd://h1:2379,h2:2379",
    "etcds://h1:2379?ssl_ca_certs=/ca.pem",
    "memcached://localhost",
]
OPTIONS = "namespace, timeout, outage_wait, fence_retention, cohort, replicas, fence_floor"


@pytest.fixture(params=[holdfast, holdfast.aio], ids=["blocking", "aio"])
def face(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def with_options(url: str, options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{options}"


def in_force(face: ModuleType, target: Any, **options: Any) -> tuple[Any, ...]:
    """Of a lock of this client: the key, and the options that come from the client. Nothing is contacted."""
    lock = face.connect(target, **options).lock("x")
    found = lock._options
    return lock._keys.main, found.timeout, found.outage_wait, found.fence_retention, found.cohort


@pytest.mark.parametrize("url", URLS)
def test_a_url_of_each_engine_takes_them_and_what_is_given_in_code_counts_more(face: ModuleType, url: str) -> None:
    url = with_options(url, "namespace=shop%3A&timeout=2&outage_wait=0.5&fence_retention=60&cohort=7")
    assert in_force(face, url) == ("shop:x", 2.0, 0.5, 60.0, 7)
    assert in_force(face, url, namespace="", timeout=5.0) == ("x", 5.0, 0.5, 60.0, 7)
    assert in_force(face, url, outage_wait=None, fence_retention=3600, cohort=64) == ("shop:x", 2.0, None, 3600.0, 64)


def test_the_page_names_each_of_them() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    section = page.partition("\n## Options in the URL\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)=`", section.partition("| option")[2].partition("\n\n")[0])) == set(
        OPTIONS.split(", ")
    )
    for url in re.findall(r"^\w+://\S+", section, re.MULTILINE):
        holdfast.connect(url)


@pytest.mark.parametrize("url", [url for url in URLS if url.startswith(("redis", "unix", "valkey"))])
def test_replicas_in_a_url(face: ModuleType, url: str) -> None:
    for options, given, in_force in (
        ("replicas=2", {}, 2),
        ("replicas=none", {}, 0),
        ("replicas=2", {"replicas": None}, 2),
        ("replicas=2", {"replicas": 0}, 0),
        ("replicas=none", {"replicas": 1}, 1),
    ):
        client = face.connect(with_options(url, options), **given)
        assert client.lock("x")._options.replicas == in_force


@pytest.mark.parametrize("url", ["local://", "etcd://h", "memcached://h"])
def test_replicas_in_a_url_of_an_engine_that_has_none(face: ModuleType, url: str) -> None:
    with pytest.raises(holdfast.Unsupported, match="replicas is not supported by .*: use redis://localhost:6379/0 or"):
        face.connect(with_options(url, "replicas=1"))
    face.connect(with_options(url, "replicas=none"))
    face.connect(with_options(url, "replicas=1"), replicas=0)


def test_fence_floor_in_a_url(face: ModuleType) -> None:
    for url, given, in_force in (
        ("etcd://h?fence_floor=5", {}, 5),
        ("etcd://h?fence_floor=none", {}, 0),
        ("etcd://h?fence_floor=5", {"fence_floor": 7}, 7),
        ("etcd://h?fence_floor=5", {"fence_floor": None}, 5),
    ):
        assert resolve(url, given, aio=face is holdfast.aio).fence_floor == in_force
    with pytest.raises(holdfast.Unsupported, match="fence_floor is not supported by redis://h:6379/0: use etcd://"):
        face.connect("redis://h?fence_floor=5")


REFUSED = [
    ("ttl=5", "it has an option 'ttl' that does not exist there; give ttl= to lock()"),
    ("wait=s3kr1t", "it has an option 'wait' that does not exist there; give wait= to lock()"),
    ("colour=s3kr1t", f"it has an option 'colour' that does not exist there; its options are {OPTIONS}"),
    ("on_lost=print", f"it has an option 'on_lost' that does not exist there; its options are {OPTIONS}"),
    (f"{'x' * 90}=1", f"it has an option '{'x' * 40}' that does not exist there; its options are {OPTIONS}"),
    ("password=a&s3kr1t=b", f"it has an option that does not exist there; its options are {OPTIONS}"),
    ("namespace=a&namespace=b", "it has namespace twice; keep one of them"),
    (
        "namespace=a%0As3kr1t",
        r"the value of namespace cannot be used; it contains the control character '\n'; leave it",
    ),
    ("namespace=a#s3kr1t", "it has a '#'; percent-encode it, as %23"),
    ("namespace=a@s3kr1t", "an '@' comes after '/', '?' or '#'; percent-encode it, as %40"),
    ("timeout=s3kr1t", "the value of timeout cannot be used; give a number of seconds"),
    ("timeout=none", "the value of timeout cannot be used; give a number of seconds"),
    ("timeout=0", "the value of timeout cannot be used; give at least 0.01 seconds"),
    ("timeout=1e400", "the value of timeout cannot be used; give a number of seconds"),
    ("outage_wait=-1", "the value of outage_wait cannot be used; give at least 0 seconds, or none"),
    ("fence_retention=", "the value of fence_retention cannot be used; give a number of seconds"),
    ("fence_retention=none", "the value of fence_retention cannot be used; give a number of seconds"),
    ("cohort=1.5", "the value of cohort cannot be used; give a whole number from 0 to 1000000"),
    ("cohort=none", "the value of cohort cannot be used; give a whole number from 0 to 1000000"),
    ("replicas=s3kr1t", "the value of replicas cannot be used; give a whole number from 0 to 1000000, or none"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=[options[:20] for options, _ in REFUSED])
@pytest.mark.parametrize("url", ["local:///tmp/x", "redis://h/0", "redis+sentinel://h/m", "etcd://h", "memcached://h"])
def test_what_a_url_cannot_have_is_refused_in_one_line_without_its_value(
    face: ModuleType, url: str, options: str, problem: str
) -> None:
    with pytest.raises(holdfast.InvalidConfig) as refused:
        face.connect(f"{url}?{options}")
    assert problem in str(refused.value)
    assert str(refused.value).startswith(f"URL '{url.partition(':')[0]}://")
    assert "\n" not in str(refused.value)
    assert "s3kr1t" not in str(refused.value)


def test_the_options_of_redis_py_are_named_beside_those_of_connect() -> None:
    with pytest.raises(holdfast.InvalidConfig) as refused:
        holdfast.connect("redis://h:6379/0?max_connections=5")
    assert str(refused.value) == (
        "URL 'redis://h:6379/0?***': it has an option 'max_connections' that does not exist there; "
        f"its options are {OPTIONS}, and those of a connection of redis-py"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ttl": 5},
            "ttl=5: connect() has no such option; give ttl= to lock()",
        ),
        (
            {"colour": 5, "timeout": 1},
            f"colour=5: connect() has no such option; its options are {OPTIONS}, on_lost, on_event",
        ),
    ],
)
def test_an_argument_that_connect_does_not_have_is_refused(
    face: ModuleType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        face.connect("redis://h", **options)
    assert isinstance(refused.value, holdfast.InvalidConfig)
    assert str(refused.value) == message


def test_they_stand_beside_options_of_redis_py(face: ModuleType) -> None:
    client = face.connect("redis://h/0?db=3&timeout=2&socket_read_size=1024&namespace=a%26b%3Dc+d%25")
    assert client.lock("x")._keys.main == "a&b=c+d%x"
    assert client.lock("x")._options.timeout == 2.0
    assert repr(client).endswith("Client of redis://h:6379/3>")


DEFAULT_CLIENT = {
    "blocking": """
import holdfast
with holdfast.lock('nightly') as lease:
    print(lease.name, holdfast.lock('x')._keys.main)
""",
    "aio": """
import asyncio, holdfast.aio
async def main():
    async with holdfast.aio.lock('nightly') as lease:
        print(lease.name, holdfast.aio.lock('x')._keys.main)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("kind", DEFAULT_CLIENT)
def test_the_default_client_takes_them_from_the_environment(kind: str, url: str, admin: redis.Redis) -> None:
    env = environment(HOLDFAST_URL=with_options(url, "namespace=shop%3A"))
    done = subprocess.run(
        [sys.executable, "-c", DEFAULT_CLIENT[kind]], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("nightly shop:x\n", "")
    assert list(map(as_bytes, admin.keys("*"))) == [b"shop:nightly:hf1:fence:{shop:nightly}"]
