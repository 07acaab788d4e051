"""What is around the lock, on a cluster: forks, new event loops, the command line, servers without sharded channels."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.engines.redis.target import resolve
from holdfast.protocol.effects import Command
from tests.fleet_cluster import ClusterFleet
from tests.processes.test_fork import in_child, needs_proc, sockets
from tests.support import asyncio_test, eventually


def test_a_forked_child_begins_again(fleet: ClusterFleet) -> None:
    with holdfast.connect(fleet.url) as client, client.lock("forked") as lease:
        child = os.fork()
        if not child:
            code = 1
            try:
                refused = client.lock("forked", wait=2.0).acquire() is None
                with client.lock("of the child"):
                    code = 0 if refused else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lease.check()
        with client.lock("of the parent"):
            pass


@needs_proc
@asyncio_test
async def test_a_forked_child_shares_no_connection_that_the_keeper_has_of_its_own(fleet: ClusterFleet) -> None:
    """It has one to a node whose shared connection is silent; there, a command keeps all others waiting."""
    async with holdfast.aio.connect(fleet.url) as client:
        async with client.lock("{x}"):
            pass
        engine: Any = client._driver.engine
        before = sockets()
        (node,) = engine.topology.want(("{x}",))
        blocked = node.engine.submit(Command(("BLPOP", "{x}blocked", "0")), 60.0)
        while not node.engine.is_unresponsive(node.standby.PATIENCE):
            await asyncio.sleep(0.01)
        await node.standby.submit(Command(("PING",)), 60.0)
        ours = sockets() - before
        assert ours
        in_child(lambda: eventually(lambda: not sockets() & ours, 5.0, "the child has let go of them"))
        await node.standby.submit(Command(("RPUSH", "{x}blocked", "1")), 60.0)
        assert await blocked == [b"{x}blocked", b"1"]


def test_one_event_loop_after_the_other(fleet: ClusterFleet) -> None:
    client = holdfast.aio.connect(fleet.url)

    async def use(last: bool) -> None:
        async with client.lock("loops", wait=5.0):
            pass
        if last:
            await client.aclose()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(use(last=False))  # ends with connections open
        asyncio.run(use(last=True))
        gc.collect()


def test_a_closed_client_says_so(fleet: ClusterFleet) -> None:
    client = holdfast.connect(fleet.url)
    with client.lock("closed"):
        pass
    client.close()
    with pytest.raises(holdfast.Unavailable, match="closed"):
        client.lock("closed", wait=0).acquire()


def test_a_command_under_a_lock(fleet: ClusterFleet) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "nightly", "--", sys.executable, "-c", "print('done')"],
        env={**os.environ, "HOLDFAST_URL": fleet.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "done"


def test_without_sharded_channels_waiters_poll(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As before Redis 7. No permission helps, so the warning asks for none."""
    with ClusterFleet(1, 0, "--rename-command", "SSUBSCRIBE", "", password="secret") as old:

        async def scenario(api: Any) -> None:
            client, other = api.client(), api.client()
            lease = await client.lock("polled").acquire()

            async def wait() -> int:
                async with other.lock("polled", wait=20.0) as later:
                    return int(later.fence)

            waiter = api.spawn(wait)
            await api.sleep(0.5)
            await lease.release()
            assert await waiter.join() > lease.fence

        face.play(scenario, old)
    (warned,) = {record.getMessage().partition(" poll ")[2] for record in caplog.records}
    assert warned == "instead of being woken: it has no sharded channels, which Redis 7 and Valkey have"


def test_a_user_who_may_not_subscribe_is_told_what_a_cluster_needs(
    connect: Any, fleet: ClusterFleet, caplog: pytest.LogCaptureFixture
) -> None:
    for server in fleet.servers:
        fleet.admin(server).execute_command("ACL", "SETUSER", "mute", "on", ">pw", "~*", "&*", "+@all", "-ssubscribe")
    try:
        url = fleet.url.replace("redis+cluster://", "redis+cluster://mute:pw@")
        with connect(fleet.url).lock("x"):
            assert connect(url).lock("x").acquire(timeout=0.2) is None
        assert "Grant +ssubscribe +spublish +pubsub|shardnumsub &*holdfast:bell:*" in caplog.text
    finally:
        for server in fleet.servers:
            fleet.admin(server).execute_command("ACL", "DELUSER", "mute")


def test_errors_show_no_password(connect: Any) -> None:
    with ClusterFleet(1, 0, password="secret") as secured:
        with pytest.raises(holdfast.Unavailable, match="password") as caught:
            connect(secured.url.replace("secret", "sesame")).lock("x", wait=0).acquire()
        assert "sesame" not in str(caught.value)


def test_a_repr_shows_no_password(connect: Any) -> None:
    url = "redis+cluster://:secret@127.0.0.1:1,127.0.0.1:2"
    client = connect(url).client
    shown = f"{client!r}{client.lock('x')!r}{resolve(url, aio=False)!r}"
    assert "redis+cluster://127.0.0.1:1,127.0.0.1:2" in shown
    assert "secret" not in shown


def test_holdfast_run_says_which_nodes_do_not_answer() -> None:
    """On one line, without the password."""
    with ClusterFleet(1, 0, password="secret") as gone:
        url = gone.url
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "nightly", "--", "true"],
        env={**os.environ, "HOLDFAST_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 69
    assert "nothing listens there" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


def test_connect_takes_the_url_from_the_environment(
    connect: Any, fleet: ClusterFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", fleet.url)
    client = connect()
    with client.lock("from the environment") as lease:
        assert lease.held
    assert fleet.url in repr(client.client)


def test_statistics_count_each_node(connect: Any, fleet: ClusterFleet) -> None:
    client, other = connect(fleet.url), connect(fleet.url)
    names = [fleet.name_on(primary) for primary in fleet.primaries]
    leases = [client.lock(name).acquire() for name in names]
    found = client.client.statistics()
    assert found.holds == 3
    assert set(found.nodes) == {f"127.0.0.1:{server.port}" for server in fleet.servers}
    assert all(node.connections for node in found.nodes.values())
    assert found.connections == sum(node.connections for node in found.nodes.values())
    waited_at = f"127.0.0.1:{fleet.owner(names[0]).port}"
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(other.lock(names[0], wait=60).acquire)
        eventually(lambda: other.client.statistics().nodes[waited_at].subscribed, 30)
        found = other.client.statistics()
        assert (found.holds, found.waiters) == (0, 1)
        assert [address for address, node in found.nodes.items() if node.subscribed] == [waited_at]
        assert found.nodes[waited_at].resp3
        for lease in leases:
            lease.release()
        waiting.result().release()
    assert client.client.statistics().holds == other.client.statistics().waiters == 0
