"""URLs of etcd and memcached: what is wrong with one is said in one line, without its password."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import holdfast
from holdfast.url import locate, redact


def test_members_have_the_usual_port_unless_they_say_another() -> None:
    location = locate("etcd://h1,h2:1234,[::1]:99")
    assert location.hosts == (("h1", 2379), ("h2", 1234), ("::1", 99))
    assert location.address == "etcd://h1:2379,h2:1234,[::1]:99"


def test_credentials_are_percent_decoded_and_never_shown() -> None:
    location = locate("etcd://us%40er:p%2Fw@h1:2379")
    assert (location.settings["user"], location.settings["password"]) == ("us@er", "p/w")
    assert "p%2Fw" not in location.address
    assert redact("etcd://user:secret@h1:2379,h2:2379") == "etcd://***@h1:2379,h2:2379"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://", "a host is missing"),
        ("etcd://h1:2379,", "a host is missing"),
        ("etcd://h1:99999", "cannot be read"),
        ("etcd://h1:2379/db", "it has a path"),
        ("etcd://h1?ssl_ca_certs=x", "it has an option 'ssl_ca_certs' that does not exist there"),
        ("etcds://h1?verify=x", "fence_floor, ssl_ca_certs, ssl_certfile, ssl_keyfile"),
        ("etcd://h1?fence_floor=-1", "the value of fence_floor cannot be used; give a whole number from 0"),
        ("etcd://h1?fence_floor=8000000000000001", "from 0 to 8000000000000000, or none"),
        ("memcached://h1?fence_floor=1", "fence_floor is not supported by memcached://h1:11211"),
        ("etcd://h1#x", "'#'"),
        ("etcd://:secret@h1", "it has a password and no user"),
        ("memcached://", "a host is missing"),
        ("memcached://h1,h2", "it names several servers"),
        ("memcached://user:secret@h1", "which memcached does not ask for"),
        ("memcached://h1/0", "it has a path"),
        ("memcached://h1?x=1", "it has an option 'x' that does not exist there"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, why: str) -> None:
    with pytest.raises((holdfast.InvalidConfig, holdfast.Unsupported)) as caught:
        holdfast.connect(url)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "library", "extra"), [("etcd", "httpx", "etcd"), ("memcached", "pymemcache", "memcached")]
)
def test_without_its_library_an_engine_says_how_to_install_it(
    connect: Any, monkeypatch: pytest.MonkeyPatch, scheme: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(holdfast.Unsupported) as caught:
        connect(f"{scheme}://h:1")
    assert str(caught.value) == (
        f"{scheme}://h:1 without {library}: run: pip install 'holdfast[{extra}]', "
        f"or in a clone: pip install -e '.[{extra}]'"
    )


def test_with_an_old_library_it_says_so(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpx.__version__", "0.24.1")
    with pytest.raises(holdfast.Unsupported, match=r"with httpx 0\.24\.1: run: pip install 'holdfast\[etcd\]', or in"):
        connect("etcd://h:1")


BAD_HOSTS = (
    "a..b",
    ".a",
    "%2E",
    "x" * 64,
    f"a.{'x' * 64}.b",
    "a%0Ab",
    "a%00",
    "a%20b",
    "%FF",
    "a%2Fb",
    "a%25b",
    "[::zz]",
    "[a]",
)


@pytest.mark.parametrize("scheme", ["etcd", "etcds", "memcached", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_bad_host_is_refused_in_one_line(scheme: str, host: str, connect: Any) -> None:
    path = "/service" if scheme == "redis+sentinel" else ""
    with pytest.raises(holdfast.InvalidConfig, match="a host in it is neither a name nor an IP address") as caught:
        connect(f"{scheme}://{host}:1{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["xn--", "xn--zzzzzzz-", "1.2.3.400", "%E2%98%83.net"])
def test_a_host_that_httpx_refuses_is_refused_in_one_line(host: str, connect: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="a host in it is neither a name nor an IP address"):
        connect(f"etcd://localhost,{host}:1")


@pytest.mark.parametrize("scheme", ["etcd", "memcached"])
@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("localhost", "localhost"),
        ("etcd-0.etcd_headless.default.svc.cluster.local.", "etcd-0.etcd_headless.default.svc.cluster.local."),
        ("b\u00fccher.example", "b\u00fccher.example"),
        ("b%C3%BCcher.example", "b\u00fccher.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("x" * 63, "x" * 63),
        ("10.0.0.1", "10.0.0.1"),
        ("[::1]", "::1"),
        ("[::ffff:10.0.0.1]", "::ffff:10.0.0.1"),
        ("[fe80::1%25lo]", "fe80::1%lo"),
    ],
)
def test_a_good_host_is_accepted(scheme: str, host: str, named: str, connect: Any) -> None:
    url = f"{scheme}://{host}:1"
    assert locate(url).hosts == ((named, 1),)
    connect(url)  # which does not reach out for it


def test_the_command_line_refuses_a_bad_host_without_a_traceback() -> None:
    run = [sys.executable, "-m", "holdfast", "run", "nightly", "--", "true"]
    done = subprocess.run(
        run, env={**os.environ, "HOLDFAST_URL": "etcd://a..b"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64
    assert done.stderr.splitlines()[-1].startswith("Error: URL 'etcd://a..b': a host in it is neither a name nor")
    assert "Traceback" not in done.stderr


def test_a_dead_cluster_names_each_member(connect: object) -> None:
    client = holdfast.connect("etcd://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(holdfast.Unavailable) as caught:
        client.lock("a").acquire(blocking=False)
    assert set(caught.value.causes) == {"etcd://127.0.0.1:1", "etcd://127.0.0.1:2"}
    assert "nothing listens there" in str(caught.value)
    client.close()
