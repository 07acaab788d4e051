"""Under gevent's monkey patching, clients of etcd start no event loop: their waiters poll, and say so once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.drivers.test_gevent import After, Before
from tests.fleet_etcd import EtcdFleet
from tests.support import Script

LOGGED = """
import logging
class Kept(logging.Handler):
    records = []
    def emit(self, record):
        self.records.append(record)
logging.getLogger("holdfast").addHandler(Kept())
logged = lambda: [record.getMessage() for record in Kept.records if record.levelno >= logging.WARNING]
"""


@pytest.fixture(params=[Before, After], ids=["patched_first", "imported_first"])
def run(request: pytest.FixtureRequest, fleet: EtcdFleet) -> Iterator[Callable[[str], Script]]:
    scripts: list[Script] = []

    def start(code: str) -> Script:
        class Logged(request.param):  # type: ignore[misc, name-defined]
            _HEAD = request.param._HEAD + LOGGED

        scripts.append(Logged(code, fleet.url))
        return scripts[-1]

    yield start
    for script in scripts:
        script.__exit__(None, None, None)


def test_waiters_of_many_clients_are_served_and_one_warning_is_logged(run: Callable[[str], Script]) -> None:
    script = run("""
        clients = [holdfast.connect(url) for _ in range(4)]
        lease = clients[0].lock("x", ttl=60).acquire()
        fences = []
        def work(client):
            with client.lock("x", wait=30) as held:
                fences.append(held.fence)
        waiting = [gevent.spawn(work, client) for client in clients]
        gevent.sleep(1.0)
        lease.release()
        gevent.joinall(waiting, raise_error=True)
        say(len(fences), fences == sorted(set(fences)))
        for client in clients:
            client.close()
        (message,) = logged()
        say(message)
    """)
    script.hear("4 True", timeout=60.0)
    assert script.hear().startswith("under gevent, clients of etcd get no notifications")
    script.finish()


def test_the_application_can_run_its_own_event_loop_while_a_client_waits(run: Callable[[str], Script]) -> None:
    script = run("""
        import asyncio
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=60).acquire()
        waiting = gevent.spawn(lambda: holdfast.connect(url).lock("x", wait=30).acquire().release())
        gevent.sleep(0.5)
        asyncio.run(asyncio.sleep(0))
        lease.release()
        waiting.get(timeout=30)
        say("ran", len(logged()))
    """)
    script.hear("ran 1", timeout=60.0)
    script.finish()


def test_a_lease_is_renewed_and_its_loss_is_told_at_a_renewal(run: Callable[[str], Script], fleet: EtcdFleet) -> None:
    script = run("""
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=2.0).acquire()
        gevent.sleep(5.0)
        say(lease.held)
        say(lease.lost.wait(20.0))
        client.close()
    """)
    script.hear("True")
    fleet.client().delete("x:hf1:intent:")
    script.hear("True")
    script.finish()
