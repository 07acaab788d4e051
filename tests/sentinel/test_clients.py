"""Everything around the lock works through Sentinel: errors, passwords, forks, holdfast run, recipes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import traceback
from typing import Any

import pytest
import redis

import holdfast
from holdfast.engines.redis.target import resolve
from tests.fleets import SERVICE, SentinelFleet
from tests.support import eventually


def test_the_address_names_sentinels_service_and_database(connect: Any, fleet: SentinelFleet) -> None:
    hosts = ",".join(f"{host}:{port}" for host, port in fleet.hosts)
    for target in (fleet.url, fleet.manager().master_for(SERVICE)) if connect.kind == "blocking" else (fleet.url,):
        face = connect(target)
        with face.lock("x"):
            pass
        assert f"redis+sentinel://{hosts}/mymaster/{fleet.database}" in repr(face.client)


def test_an_unknown_service_is_named(connect: Any, fleet: SentinelFleet) -> None:
    with pytest.raises(holdfast.Unavailable, match="it knows no service 'nosuch'"):
        connect(fleet.url.replace(f"/{SERVICE}/", "/nosuch/")).lock("x").acquire()


def test_a_replica_is_refused_before_it_is_used(fleet: SentinelFleet) -> None:
    target = resolve(fleet.url, aio=False)
    connection = target.connection(5.0, {"host": "127.0.0.1", "port": fleet.replicas[0].port})
    with pytest.raises(holdfast.Unavailable, match=f"{fleet.replicas[0].port}: it is a replica"):
        target.connect(connection)
    assert connection._sock is None


def test_one_sentinel_is_enough_to_find_the_primary(connect: Any, fleet: SentinelFleet) -> None:
    fleet.sentinels[0].pause()
    fleet.sentinels[1].pause()
    try:
        with connect(fleet.url).lock("x") as lease:
            assert lease.held
    finally:
        fleet.sentinels[0].resume()
        fleet.sentinels[1].resume()


def test_a_client_uses_what_it_has_while_no_sentinel_answers(connect: Any, fleet: SentinelFleet) -> None:
    face = connect(fleet.url)
    with face.lock("x"):
        pass
    for sentinel in fleet.sentinels:
        sentinel.pause()
    try:
        with face.lock("x") as lease:
            assert lease.held
    finally:
        for sentinel in fleet.sentinels:
            sentinel.resume()


def all_that_is_shown(error: BaseException) -> str:
    """Its texts and causes, and the locals of Holdfast's frames, which error reporters show."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/holdfast/" in frame.f_code.co_filename]
    values = [f"{name}={value!r}" for frame in frames for name, value in frame.f_locals.items()]
    return "\n".join([*traceback.format_exception(error), repr(error), repr(vars(error)), *values])


@pytest.mark.parametrize("_fleet", ["redis7"], indirect=True)  # which wants passwords
@pytest.mark.parametrize("wrong", ["password", "sentinel_password"])
def test_a_wrong_password_is_refused_and_never_shown(connect: Any, fleet: SentinelFleet, wrong: str) -> None:
    right = fleet.url
    bad = right.replace("s3kr1t%2Fone", "s3kr1t-bad") if wrong == "password" else right.replace("%40two", "-bad")
    with pytest.raises(holdfast.Unavailable, match="refused the user or the password") as refused:
        connect(bad).lock("x").acquire()
    assert "s3kr1t" not in all_that_is_shown(refused.value)


@pytest.mark.parametrize("_fleet", ["redis7"], indirect=True)
def test_a_missing_password_of_the_sentinels_is_asked_for(connect: Any, fleet: SentinelFleet) -> None:
    with pytest.raises(holdfast.Unavailable, match="sentinel_password= in the URL") as refused:
        connect(fleet.url.partition("?")[0]).lock("x").acquire()
    assert "s3kr1t" not in all_that_is_shown(refused.value)


def test_neither_password_is_in_a_repr(fleet: SentinelFleet) -> None:
    for aio in (False, True):
        target = resolve(fleet.url, aio=aio)
        assert target.sentinels is not None
        assert "s3kr1t" not in f"{target!r}{target.sentinels!r}{target.sentinels._nodes!r}{target.where}"


def test_holdfast_run_takes_the_url_from_the_environment(fleet: SentinelFleet) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "nightly", "--", "sh", "-c", "echo ran"],
        env={**os.environ, "HOLDFAST_URL": fleet.url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_holdfast_run_says_which_sentinel_does_not_answer(fleet: SentinelFleet) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "nightly", "--", "true"],
        env={**os.environ, "HOLDFAST_URL": fleet.url.replace(f"/{SERVICE}/", "/nosuch/")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 69
    assert "it knows no service 'nosuch'" in done.stderr
    assert "s3kr1t" not in done.stderr


def test_connect_takes_the_url_from_the_environment(
    connect: Any, fleet: SentinelFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", fleet.url)
    client = connect()
    with client.lock("x") as lease:
        assert lease.held
    assert f"/{SERVICE}/{fleet.database}" in repr(client.client)


def test_statistics_name_the_service_and_follow_the_primary(connect: Any, fleet: SentinelFleet) -> None:
    client = connect(fleet.url)
    with client.lock("x", ttl=10):
        (address,) = client.client.statistics().nodes
        assert address.endswith(f"/{SERVICE}/{fleet.database}")
        assert "s3kr1t" not in address
        fleet.fail_over()
        with client.lock("y", wait=10):
            found = client.client.statistics()
            assert found.holds == 2
            assert found.nodes[address].connections == found.connections > 0


def test_a_forked_child_finds_the_primary_by_itself(fleet: SentinelFleet) -> None:
    with holdfast.connect(fleet.url) as client, client.lock("x") as lease:
        child = os.fork()
        if child == 0:
            try:
                taken = client.lock("x").acquire(blocking=False) is not None
                with client.lock("y", wait=10):
                    os._exit(1 if taken else 0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lease.held


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize("recipe", ["getset", "watch", "set_nx"])
def test_recipes_run_where_older_programs_keep_their_locks(fleet: SentinelFleet, recipe: str) -> None:
    """With the password and in the database of the service."""
    with holdfast.connect(fleet.url) as client, client.recipe(recipe, "foo"):
        admin = redis.Redis(port=fleet.primary.port, password=fleet.password or None, db=fleet.database)
        with admin:
            assert len(admin.keys("*foo*")) == 1
        assert client.recipe(recipe, "foo").acquire(timeout=0.1) is None


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_getset_goes_on_after_a_failover(fleet: SentinelFleet) -> None:
    with holdfast.connect(fleet.url) as client:
        with client.recipe("getset", "foo"):
            pass
        fleet.fail_over()
        with client.recipe("getset", "foo"):
            with redis.Redis(port=fleet.primary.port, password=fleet.password or None, db=fleet.database) as admin:
                assert len(admin.keys("*foo*")) == 1


def test_a_client_that_was_closed_without_a_primary_keeps_nothing_open() -> None:
    with SentinelFleet(replicas=0) as alone, holdfast.connect(alone.url, timeout=1.0) as client:
        before = descriptors()
        lease = client.lock("x", ttl=5.0).acquire()  # its renewals find that there is no primary
        gc.disable()  # nothing may need a collection to be closed
        try:
            alone.pause()
            assert lease.lost.wait(20.0)
            with pytest.raises(holdfast.Unavailable, match="no other has taken over yet"):
                eventually(lambda: client.lock("y", wait=0).acquire(), timeout=20.0)
            client.close()
            assert descriptors() == before
        finally:
            gc.enable()
            alone.resume()


def descriptors() -> dict[str, str]:
    """The open files of this process."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
