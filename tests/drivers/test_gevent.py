"""Under gevent's monkey patching threads are greenlets, and every promise of the blocking face holds for these.

Each test runs a process of its own, which is patched before holdfast is imported, or after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.proxy import Proxy
from tests.servers import Server
from tests.support import ROOT, Script, eventually
from tests.tls import TlsRelay

PATCH = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that ssl was imported before
    from gevent import monkey
    monkey.patch_all()
import gevent
from time import monotonic
"""


class Before(Script):
    _HEAD = PATCH + Script._HEAD


class After(Script):
    _HEAD = Script._HEAD + PATCH


@pytest.fixture(params=[Before, After], ids=["patched_first", "imported_first"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start(code: str, url: str, *arguments: object) -> Script:
        scripts.append(request.param(code, url, *arguments))
        return scripts[-1]

    yield start
    for script in scripts:
        script.__exit__(None, None, None)


def test_waits_are_bounded_on_a_server_that_hangs(run: Callable[..., Script], server: Server) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        with client.lock("warm"):
            pass
        ticks = []
        def tick():
            while True:
                gevent.sleep(0.05)
                ticks.append(monotonic())
        gevent.spawn(tick)
        say("ready")
        sys.stdin.readline()
        started = monotonic()
        def attempt():
            try:
                return client.lock("x").acquire(timeout=1.0)
            except holdfast.Unavailable:
                return monotonic() - started
        attempts = [gevent.spawn(attempt) for _ in range(5)]
        gevent.joinall(attempts)
        say(all(0.9 <= task.value < 4.0 for task in attempts) or [task.value for task in attempts])
        say(sum(when > started for when in ticks) >= 5)
        """,
        server.url,
    )
    script.hear("ready")
    server.pause()
    script.write("go\n")
    script.hear("True")
    script.hear("True")
    server.resume()
    script.finish(quiet=False)  # the outage is logged


def test_waits_are_bounded_on_a_connection_that_is_black_holed(run: Callable[..., Script], proxy: Proxy) -> None:
    script = run(
        """
        client = holdfast.connect(url, timeout=3.0)
        holder = client.lock("held", ttl=30)
        lease = holder.acquire()
        say("ready")
        sys.stdin.readline()
        started = monotonic()
        try:
            client.lock("x").acquire(timeout=1.0)
            say("acquired")
        except holdfast.Unavailable:
            say(0.9 <= monotonic() - started < 4.0)
        say("healed?")
        sys.stdin.readline()
        lease.release()
        with client.lock("held", wait=10):
            say("acquired")
        client.close()
        """,
        proxy.url,
    )
    script.hear("ready")
    proxy.blackhole()
    script.write("go\n")
    script.hear("True")
    script.hear("healed?")
    proxy.heal()
    proxy.cut()
    script.write("go\n")
    script.hear("acquired")
    script.finish(quiet=False)  # a renewal that falls into it is logged


def test_two_hundred_greenlets_on_one_lock(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        inside, fences = [], []
        def work():
            with client.lock("x", wait=60) as lease:
                inside.append(lease)
                assert len(inside) == 1
                gevent.sleep(0.001)
                fences.append(lease.fence)
                inside.pop()
        tasks = [gevent.spawn(work) for _ in range(200)]
        gevent.joinall(tasks, raise_error=True)
        say(len(fences), fences == sorted(set(fences)))
        client.close()
        """,
        url,
    )
    script.hear("200 True", timeout=60.0)
    script.finish()


def test_two_processes_of_greenlets_exclude_each_other(run: Callable[..., Script], url: str) -> None:
    code = """
        client = holdfast.connect(url)
        plain = redis.Redis.from_url(url)
        def work():
            for _ in range(5):
                with client.lock("x", wait=60):
                    count = int(plain.get("count") or 0)
                    gevent.sleep(0.001)
                    plain.set("count", count + 1)
        gevent.joinall([gevent.spawn(work) for _ in range(10)], raise_error=True)
        client.close()
        plain.close()
        say("done")
    """
    scripts = [run(code, url) for _ in range(2)]
    for script in scripts:
        script.hear("done", timeout=60.0)
        script.finish()
    with redis.Redis.from_url(url) as admin:
        assert int(admin.get("count") or 0) == 100


def test_a_lease_is_renewed_while_its_greenlet_sleeps(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        with client.lock("x", ttl=3.0) as lease:
            gevent.sleep(4.0)
            say(lease.held)
        client.close()
        """,
        url,
    )
    script.hear("True")
    script.finish()


def test_a_loss_is_told_at_once(run: Callable[..., Script], url: str, admin: redis.Redis) -> None:
    script = run(
        """
        told = gevent.event.Event()
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=60.0, on_lost=lambda lease: told.set()).acquire()
        gevent.sleep(0.5)
        say("held")
        say(lease.lost.wait(5.0), told.wait(5.0), lease.held)
        try:
            lease.release()
        except holdfast.LeaseLost:
            say("lost")
        client.close()
        """,
        url,
    )
    script.hear("held")
    eventually(lambda: any("t" in found["flags"] for found in admin.client_list()), what="the key is tracked")
    admin.delete("x")
    script.hear("True True False")
    script.hear("lost")
    script.finish()


def test_a_waiter_is_notified_and_does_not_poll(run: Callable[..., Script], proxy: Proxy, admin: redis.Redis) -> None:
    holder = run(
        """
        with holdfast.connect(url).lock("x", ttl=60):
            say("held")
            sys.stdin.readline()
        """,
        proxy.url,
    )
    holder.hear("held")
    waiter = run('with holdfast.connect(url).lock("x"): say("acquired")', proxy.url)
    eventually(lambda: any(int(found["sub"]) for found in admin.client_list()), timeout=20.0, what="it subscribes")
    started, before = time.monotonic(), proxy.seen("acquire")
    time.sleep(2.0)
    holder.write("go\n")
    waiter.hear("acquired", timeout=5.0)
    asked, waited = proxy.seen("acquire") - before, time.monotonic() - started
    assert asked <= 2 + 2 * waited, "every half second; a client that polls asks ten times a second and more"
    holder.finish()
    waiter.finish()


def test_close_ends_the_waits_and_gives_back(run: Callable[..., Script], url: str, admin: redis.Redis) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=60.0).acquire()
        def wait():
            try:
                client.lock("x").acquire()
            except holdfast.Unavailable:
                return "refused"
        waiting = [gevent.spawn(wait) for _ in range(3)]
        gevent.sleep(0.3)
        started = monotonic()
        client.close()
        gevent.joinall(waiting, timeout=5.0)
        say([task.value for task in waiting] == ["refused"] * 3, lease.held, monotonic() - started < 5.0)
        try:
            lease.release()
        except holdfast.LeaseLost:
            say("lost")
        """,
        url,
    )
    script.hear("True False True")
    script.hear("lost")
    script.finish()
    assert admin.get("x") is None


@pytest.mark.parametrize("ends", ["gevent.Timeout(0.5)", "kill"])
def test_a_greenlet_that_is_ended_while_it_waits_leaves_nothing(
    run: Callable[..., Script], url: str, admin: redis.Redis, ends: str
) -> None:
    script = run(
        """
        client, other = holdfast.connect(url), holdfast.connect(url)
        lease = client.lock("x", ttl=60.0).acquire()
        def wait():
            if sys.argv[2] == "kill":
                other.lock("x").acquire()
            with gevent.Timeout(0.5, False):
                other.lock("x").acquire()
        task = gevent.spawn(wait)
        gevent.sleep(0.4)
        if sys.argv[2] == "kill":
            task.kill()
        task.join(5.0)
        say(task.ready())
        gevent.sleep(0.2)
        lease.release()
        with client.lock("x", wait=2.0):
            say("acquired")
        client.close()
        other.close()
        """,
        url,
        ends,
    )
    script.hear("True")
    script.hear("acquired")
    script.finish()
    assert not admin.keys("*queue*")


def test_a_forked_child_holds_nothing_and_its_parent_goes_on(
    run: Callable[..., Script], url: str, admin: redis.Redis
) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=2.0).acquire()
        gevent.sleep(0.6)
        child = os.fork()
        if child == 0:
            gevent.sleep(1.5)
            with client.lock("y", ttl=2.0, wait=5) as own:
                gevent.sleep(2.5)
                say("child", lease.held, own.held)
            client.close()
            os._exit(0)
        gevent.sleep(0.1)
        with client.lock("z", ttl=2.0, wait=5) as other:
            gevent.sleep(4.5)
            say("parent", lease.held, other.held)
        os.waitpid(child, 0)
        lease.release()
        client.close()
        """,
        url,
    )
    assert {script.hear(), script.hear()} == {"child False True", "parent True True"}
    script.finish()


def test_greenlets_do_not_go_on_in_a_forked_child(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=60.0).acquire()
        gevent.sleep(0.5)
        child = os.fork()
        if child == 0:
            gevent.sleep(0.5)
            with client.lock("y", ttl=60.0):
                gevent.sleep(0.5)
                say(sum("in _keep" in line or "connection_thread" in line and "in _run" in line
                        for line in gevent.util.format_run_info()))
            os._exit(0)
        os.waitpid(child, 0)
        lease.release()
        client.close()
        """,
        url,
    )
    script.hear("2")
    script.finish()


def test_owners_are_greenlets(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        def take():
            return client.rlock("x").acquire(timeout=0.3)
        with client.rlock("x", ttl=60):
            assert take()
            client.rlock("x").release()
            say([gevent.spawn(take).get() for _ in range(20)] == [None] * 20)
        shared = client.rwlock("rw", ttl=60)
        with shared.read:
            gevent.spawn(lambda: shared.read.acquire() and shared.read.release()).get()
        calls = []
        def compute():
            calls.append(1)
            gevent.sleep(0.3)
            return 7
        tasks = [gevent.spawn(client.get_or_compute, "k", compute, ttl=60) for _ in range(20)]
        gevent.joinall(tasks, raise_error=True)
        say(len(calls), {task.value for task in tasks})
        client.close()
        """,
        url,
    )
    script.hear("True", timeout=60.0)
    script.hear("1 {7}")
    script.finish()


def test_over_tls(run: Callable[..., Script], server: Server, certificate: tuple[str, str]) -> None:
    relay = TlsRelay(server.port, *certificate)
    try:
        script = run(
            """
            client = holdfast.connect(url)
            with client.lock("x", ttl=3.0, wait=9.0) as lease:
                gevent.sleep(4.0)
                say(lease.held)
            say("ready")
            sys.stdin.readline()
            started = monotonic()
            try:
                client.lock("x").acquire(timeout=1.0)
            except holdfast.Unavailable:
                say(0.9 <= monotonic() - started < 4.0)
            """,
            f"rediss://localhost:{relay.port}/0?ssl_ca_certs={certificate[0]}",
        )
        script.hear("True")
        script.hear("ready")
        server.pause()
        script.write("go\n")
        script.hear("True")
        server.resume()
        script.finish(quiet=False)  # the outage is logged
    finally:
        server.resume()
        relay.close()


def test_an_embedded_server_and_other_programs_can_be_started(run: Callable[..., Script], tmp_path: Path) -> None:
    script = run(
        """
        import subprocess
        client = holdfast.connect(url)
        with client.lock("x", ttl=2.5) as lease:
            say(subprocess.run(["echo", "started"], capture_output=True, text=True).stdout.strip())
            gevent.sleep(3.0)
            say(lease.held)
        client.close()
        """,
        f"local://{tmp_path}/hf",
    )
    script.hear("started")
    script.hear("True")
    script.finish()


def test_a_greenlet_that_never_yields_loses_its_lease_and_is_told(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        told = []
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=0.5, on_lost=told.append).acquire()
        until = monotonic() + 1.0
        while monotonic() < until:
            pass
        say(lease.held)
        say(lease.lost.wait(5.0))
        gevent.sleep(0.3)
        say(len(told))
        try:
            lease.release()
        except holdfast.LeaseLost:
            client.close()
        """,
        url,
    )
    for expected in ("False", "True", "1"):
        script.hear(expected)
    script.finish()


def test_the_process_ends_although_a_lease_is_held(run: Callable[..., Script], url: str) -> None:
    script = run(
        """
        client = holdfast.connect(url)
        lease = client.lock("x", ttl=60).acquire()
        gevent.sleep(0.3)
        say("held")
        """,
        url,
    )
    script.hear("held")
    assert script.wait(20.0) == 0


def test_the_conformance_tests_pass_in_a_patched_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    tests = ["tests/conformance/test_lock.py", "tests/conformance/test_wait.py", "tests/conformance/test_closing.py"]
    command = [
        sys.executable,
        "-m",
        "gevent.monkey",
        "--module",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "blocking",
    ]
    done = subprocess.run(
        [*command, *tests], capture_output=True, text=True, timeout=110.0, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_eventlet_is_refused(url: str) -> None:
    program = """
import warnings
warnings.simplefilter("ignore")
import eventlet
eventlet.monkey_patch()
import holdfast, holdfast.aio
for connect in (holdfast.connect, holdfast.aio.connect):
    try:
        connect("redis://127.0.0.1:6379/0")
    except holdfast.InvalidConfig as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False)
    expected = "connect() under eventlet: eventlet is not supported; use gevent or threads"
    assert done.stdout.splitlines() == [expected] * 2, done.stderr


def test_eventlet_that_patches_nothing_is_no_trouble(url: str) -> None:
    program = f"""
import warnings
warnings.simplefilter("ignore")
import eventlet, eventlet.patcher, holdfast
with holdfast.connect({url!r}) as client, client.lock("x"):
    print("held")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False)
    assert done.stdout == "held\n", done.stderr
