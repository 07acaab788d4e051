"""A holder is stopped past its ttl in mid-write, the next one writes, the first is woken: its write is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable

import redis

import holdfast
from tests.guard.resources import Resource
from tests.servers import Server
from tests.support import Script, eventually

CODE = "from tests.guard import stopped; stopped.write(*sys.argv[1:4], guarded=sys.argv[4] == 'True')"


def succeed(script: Script, resource: Resource, client: holdfast.Client, admin: redis.Redis) -> int:
    """Stop it, write in its place, wake it; the fence of the new holder."""
    script.hear("in mid-write")
    script.send(signal.SIGSTOP)
    eventually(lambda: not admin.exists("x"), what="its lease has ended on the server")
    with client.lock("x") as lease:
        resource.write("fresh", lease)
        script.send(signal.SIGCONT)
        fence: int = lease.fence
    return fence


def test_its_write_is_refused(server: Server, client: holdfast.Client, admin: redis.Redis, resource: Resource) -> None:
    with Script(CODE, server.url, resource.kind, resource.where, True) as script:
        fence = succeed(script, resource, client, admin)
        word, stale, stored = script.hear().split()
        assert word == "refused"
        assert int(stale) < int(stored) == fence
        script.hear("lost")
        script.finish()
    assert resource.text() == "fresh"
    record = resource.record()
    assert record is not None
    assert record[0] == fence


def test_without_a_guard_the_same_write_would_get_through(
    server: Server, client: holdfast.Client, admin: redis.Redis, make_resource: Callable[[str], Resource]
) -> None:
    """So the test above can fail: it is the guard that refuses, not the lock."""
    resource = make_resource("redis")
    with Script(CODE, server.url, resource.kind, resource.where, False) as script:
        succeed(script, resource, client, admin)
        script.hear("written")
        script.hear("lost")
        script.finish()
    assert resource.text() == "stale"
