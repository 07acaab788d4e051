"""A connection whose handshake is garbled is closed at once, not when the collector finds it."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import holdfast
from tests.proxy import Proxy, instead
from tests.support import connections_of, eventually

GARBLED = [b":1\r\n", b",nan\r\n", b"%1\r\n*1\r\n:1\r\n:1\r\n", b"*0\r\n", b"+OK\r\n"]


@pytest.mark.parametrize("reply", GARBLED)
def test_no_connection_is_left_of_a_garbled_handshake(
    connect: Any, proxy: Proxy, admin: redis.Redis, reply: bytes
) -> None:
    before = connections_of(admin)
    face = connect(proxy.url, timeout=0.5)
    proxy.on("hello", instead(reply), times=100)
    try:
        lease = face.lock("x", ttl=0.6).acquire(timeout=1)
        if lease is not None:
            lease.lost.wait(1.0)  # its renewal wants a connection of its own
    except holdfast.HoldfastError:
        pass
    if connect.kind == "blocking":
        face.client.close()
    else:
        face._call(face.client.aclose())
    eventually(lambda: connections_of(admin) <= before, 3.0, "all connections are closed")
