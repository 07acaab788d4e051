"""URLs of etcd and memcached: what is wrong with one is said in one line, without its password."""

from __future__ import annotations

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
        ("etcd://h1?ssl_ca_certs=x", "no option of etcd://"),
        ("etcds://h1?verify=x", "its options are fence_floor, ssl_ca_certs"),
        ("etcd://h1?fence_floor=-1", "whole number"),
        ("etcd://h1?fence_floor=8000000000000001", "up to 8000000000000000"),
        ("etcd://h1#x", "'#'"),
        ("etcd://:secret@h1", "it has a password and no user"),
        ("memcached://", "a host is missing"),
        ("memcached://h1,h2", "it names several servers"),
        ("memcached://user:secret@h1", "which memcached does not ask for"),
        ("memcached://h1/0", "it has a path"),
        ("memcached://h1?x=1", "it takes no options"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, why: str) -> None:
    with pytest.raises(holdfast.InvalidConfig) as caught:
        holdfast.connect(url)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_dead_cluster_names_each_member(connect: object) -> None:
    client = holdfast.connect("etcd://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(holdfast.Unavailable) as caught:
        client.lock("a").acquire(blocking=False)
    assert set(caught.value.causes) == {"etcd://127.0.0.1:1", "etcd://127.0.0.1:2"}
    assert "nothing listens there" in str(caught.value)
    client.close()
