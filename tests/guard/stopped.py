"""A holder that is stopped in mid-write: it has looked at its lease, prepared its data, and not yet written.

Run as a process of its own: ``write(url, kind, where)``. It says "in mid-write", and goes on once it was stopped and
woken, which is when it gets SIGCONT.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast.guard import file, sql
from tests.guard.resources import RedisResource, Resource, open_resource


def say(word: str) -> None:
    print(word, flush=True)


def be_stopped() -> None:
    woken = threading.Event()
    signal.signal(signal.SIGCONT, lambda *_: woken.set())
    say("in mid-write")
    while not woken.wait(0.005):
        pass


def write(url: str, kind: str, where: str, *, guarded: bool = True) -> None:
    resource = open_resource(kind, where)
    client = holdfast.connect(url)
    lease = client.lock("x", ttl=2).acquire()
    assert lease
    _stop_at_the_last_moment(resource)
    try:
        if guarded:
            resource.write("stale", lease)
        else:
            assert isinstance(resource, RedisResource)
            lease.check()
            be_stopped()
            resource.client.set("note", "stale")
        say("written")
    except holdfast.StaleFence as error:
        say(f"refused {error.fence} {error.stored}")
    try:
        lease.release()
    except holdfast.LeaseLost:
        say("lost")
    client.close()
    resource.close()


def _stop_at_the_last_moment(resource: Resource) -> None:
    """Between the check of the lease and the step that writes."""
    if isinstance(resource, RedisResource):
        send: Callable[..., Any] = resource.client.execute_command

        def send_late(command: str, *arguments: Any, **options: Any) -> Any:
            if command == "EVALSHA":
                be_stopped()
            return send(command, *arguments, **options)

        resource.client.execute_command = send_late  # type: ignore[method-assign]
    elif resource.kind == "file":
        file_lock = file._file_lock

        def late(*arguments: Any) -> Any:
            be_stopped()
            return file_lock(*arguments)

        file._file_lock = late  # type: ignore[assignment]
    else:
        count = sql._count

        def count_late(*arguments: Any) -> int:
            be_stopped()
            return count(*arguments)

        sql._count = count_late  # type: ignore[assignment]
