"""Each pitfall, and each rule that an original has, on a real server. (The lab searches for others.)"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import redis

import holdfast
from tests.proxy import LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY, Proxy
from tests.recipes.byhand import ByHand
from tests.servers import Server
from tests.support import as_bytes, eventually, took


def micros() -> int:
    return time.time_ns() // 1000


def trying(client: holdfast.Client, name: str, *, behind: float = 0.0, **options: Any) -> ByHand:
    """One try, which goes no further than it is told to."""
    return ByHand(client, client.recipe(name, "foo", **options)._acquire(0.0), behind=behind)


# Left locked for ever, or kept locked.


def test_setnx_expire_whose_holder_dies_in_between_is_locked_for_ever(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    trying(client, "setnx_expire").until("EXPIRE")  # and no further: it is dead
    assert admin.ttl("foo") == -1


def test_a_repair_sets_the_ttl_that_is_missing(face: Any, admin: redis.Redis) -> None:
    admin.set("lock:foo", "a dead one's")
    assert face.recipe("setnx_repair", "foo", ttl=3).acquire(blocking=False) is None
    assert 0 < admin.pttl("lock:foo") <= 3000
    admin.pexpire("lock:foo", 90_000)
    assert face.recipe("setnx_repair", "foo", ttl=3).acquire(blocking=False) is None
    assert admin.pttl("lock:foo") > 80_000, "one that is there is left alone"


def test_a_repair_as_written_repairs_nothing_and_stretches_the_living(face: Any, admin: redis.Redis) -> None:
    recipe = face.recipe("setnx_repair", "foo", ttl=3, repair="as_written")
    admin.set("lock:foo", "a dead one's")
    assert recipe.acquire(blocking=False) is None
    assert admin.ttl("lock:foo") == -1, "-1 is true"
    for _ in range(5):
        admin.set("lock:foo", "a dead one's", px=490)
        if recipe.acquire(blocking=False) is None:
            break
        recipe.release()  # a busy machine asked when it had ended
    assert admin.pttl("lock:foo") > 1000, "less than half a second reads 0"


def test_every_loser_of_multi_stretches_the_lock(face: Any, admin: redis.Redis) -> None:
    admin.set("foo", "a dead one's", px=3000)
    assert face.recipe("multi", "foo", ttl=30).acquire(blocking=False) is None
    assert admin.pttl("foo") > 3000


# Freed by a late holder.


@pytest.mark.parametrize("name", ["setnx_expire", "multi", "set_nx_plain"])
def test_a_late_release_frees_the_successor(face: Any, admin: redis.Redis, name: str) -> None:
    late, successor = face.recipe(name, "foo"), face.recipe(name, "foo")
    assert late.acquire()
    admin.delete("foo")  # as if its ttl were over
    assert successor.acquire(blocking=False)
    late.release()
    assert admin.keys("*") == []
    successor.release()


@pytest.mark.parametrize("name", ["setnx_repair", "watch", "set_nx"])
def test_who_has_a_token_frees_its_own_and_is_told(face: Any, admin: redis.Redis, name: str) -> None:
    late, successor = face.recipe(name, "foo"), face.recipe(name, "foo")
    assert late.acquire()
    admin.delete(late.key)
    assert successor.acquire(blocking=False)
    with pytest.raises(holdfast.LeaseLost):
        late.release()
    assert admin.exists(late.key)
    successor.release()


def test_a_transaction_is_tried_again_if_the_key_changes_in_between(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    attempt = trying(client, "watch").until("MULTI")
    admin.set("lock:foo", "another's", px=50)
    assert attempt.finish() is None
    recipe = client.recipe("watch", "foo")
    assert recipe.acquire(timeout=5)
    release = ByHand(client, recipe._release()).until("MULTI")
    admin.pexpire("lock:foo", 5000)
    release.finish()
    assert not admin.exists("lock:foo")


# The deadline in the value.


@pytest.mark.parametrize("name", ["getset", "getset_equal"])
def test_past_is_strictly_less_and_what_is_no_number_is_past(face: Any, admin: redis.Redis, name: str) -> None:
    recipe = face.recipe(name, "foo", prefix="")
    for past in (b"0", b"-5", b"soon", b"", b"vm-1234.0123456789abcdef", str(micros() - 1).encode()):
        admin.set("foo", past)
        assert not recipe.locked()
        assert recipe.acquire(blocking=False), past
        recipe.release()
    for not_past in (micros() + 60_000_000, f" +{micros() + 60_000_000} or so"):
        admin.set("foo", not_past)
        assert recipe.locked()
        assert recipe.acquire(blocking=False) is None
        assert admin.get("foo") == str(not_past).encode()


def test_a_key_that_goes_between_setnx_and_get_is_won(client: holdfast.Client, admin: redis.Redis) -> None:
    for name in ("getset", "getset_equal"):
        admin.set("foo", micros() + 60_000_000)
        attempt = trying(client, name, prefix="").until("GET")
        admin.delete("foo")
        lease = attempt.finish()
        assert lease, name
        lease.release()


def test_a_second_getset_loses_but_leaves_its_number(client: holdfast.Client, admin: redis.Redis) -> None:
    """The question that the articles leave open, at least this way round: the second one does not win, too."""
    for name in ("getset", "getset_equal"):
        admin.set("foo", 1)
        first = trying(client, name, prefix="", ttl=10).until("GETSET")
        second = trying(client, name, prefix="", ttl=99).until("GETSET")
        winner = first.finish()
        assert winner
        written = int(as_bytes(admin.get("foo")))
        assert second.finish() is None
        assert int(as_bytes(admin.get("foo"))) - written > 80_000_000, "the winner's lock now ends when the loser says"
        admin.delete("foo")


def test_a_paused_loser_cuts_the_lock_short_and_two_hold(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.set("foo", 1)
    loser = trying(client, "getset", behind=11.0, prefix="", ttl=10).until("GETSET")
    winner = client.recipe("getset", "foo", prefix="", ttl=60)
    lease = winner.acquire(blocking=False)
    assert lease
    assert loser.finish() is None
    assert client.recipe("getset", "foo", prefix="").acquire(blocking=False), "though the other is far from over"
    assert lease.remaining() > 50


def test_same_value_leaves_the_true_owner_unable_to_release(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.set("lock.foo", 1)
    loser = trying(client, "getset", release="same_value", ttl=20).until("GETSET")
    owner = client.recipe("getset", "foo", release="same_value")
    assert owner.acquire(blocking=False)
    assert loser.finish() is None
    with pytest.raises(holdfast.LeaseLost):
        owner.release()
    assert int(as_bytes(admin.get("lock.foo"))) > micros()


def test_same_value_is_lost_to_a_waiter_that_saw_the_release_before(client: holdfast.Client) -> None:
    """No deadline has passed here. Between the waiter's SETNX and its GETSET one holder releases and the next acquires;
    the waiter has lost, and leaves its own deadline. In whole seconds that differs only if a second has begun."""
    options: dict[str, Any] = {"unit": "s", "release": "same_value"}
    recipe = client.recipe("getset", "foo", **options)
    with recipe:
        waiter = trying(client, "getset", behind=1.0, **options).until("GET")
    waiter.until("GETSET")
    lease = recipe.acquire()
    assert lease
    assert waiter.finish() is None, "so there is one holder"
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert recipe.locked(), "until the waiter's deadline"


def test_the_name_in_the_value_need_not_be_the_holders(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.set("lock.foo", "somebody.1")
    loser = trying(client, "getset", owner_prefix=True).until("GETSET")
    owner = client.recipe("getset", "foo", owner_prefix=True)
    lease = owner.acquire(blocking=False)
    assert lease
    assert as_bytes(admin.get("lock.foo")).decode().startswith(lease.token)
    assert loser.finish() is None
    assert not as_bytes(admin.get("lock.foo")).decode().startswith(lease.token)
    owner.release()


def test_the_three_releases_of_getset(face: Any, admin: redis.Redis) -> None:
    other = micros() + 60_000_000
    for release, past, stays in (
        ("unexpired", False, False),
        ("unexpired", True, True),
        ("del", False, False),
        ("del", True, False),
        ("same_value", False, True),
    ):
        recipe = face.recipe("getset", "foo", release=release)
        assert recipe.acquire()
        admin.set("lock.foo", 1 if past else other)  # what another client has left there
        if stays:
            with pytest.raises(holdfast.LeaseLost):
                recipe.release()
        else:
            recipe.release()
        assert bool(admin.exists("lock.foo")) == stays, (release, past)
        admin.delete("lock.foo")


def test_a_clean_release_in_between_leaves_a_lock_that_is_nobodys(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.set("foo", 1)
    loser = trying(client, "getset_equal").until("GETSET")
    with client.recipe("getset_equal", "foo", wait=0):
        pass
    assert not admin.exists("foo")
    assert loser.finish() is None
    assert client.recipe("getset_equal", "foo").acquire(blocking=False) is None, "it has no holder"
    admin.delete("foo")


def test_getset_equal_looks_at_its_own_clock_before_it_releases(face: Any, admin: redis.Redis) -> None:
    recipe = face.recipe("getset_equal", "foo", ttl=0.02)
    assert recipe.acquire()
    time.sleep(0.03)
    with pytest.raises(holdfast.LeaseLost):
        recipe.release()
    assert admin.exists("foo"), "it is left alone"


# What the C++ client does when something goes wrong.


def test_an_error_is_a_failed_try_and_logged(face: Any, admin: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    admin.rpush("lock.foo", "a list")
    with caplog.at_level(logging.INFO, "holdfast.recipes"):
        with pytest.raises(holdfast.Unsupported, match="not a lock of this kind"):
            face.recipe("getset", "foo").acquire(blocking=False)
        with pytest.raises(holdfast.Unsupported, match="not a lock of this kind"):
            with face.recipe("getset", "foo", wait=0.02):
                pass
    assert "acquire failed" in caplog.text
    with pytest.raises(holdfast.Unsupported, match="lock 'lock[:.]foo'"):
        face.recipe("getset_equal", "foo", prefix="lock.").acquire()


def tries(admin: redis.Redis) -> int:
    calls: int = admin.info("commandstats")["cmdstat_setnx"]["calls"]
    return calls


def test_the_count_of_tries_is_logged_when_above_one(
    face: Any, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = face.recipe("getset", "foo")
    with caplog.at_level(logging.INFO, "holdfast.recipes"):
        with recipe:
            pass
        assert "try count" not in caplog.text
        holder = face.recipe("getset", "foo", release="del")
        assert holder.acquire()
        before = tries(admin)
        freeing = threading.Thread(target=lambda: (eventually(lambda: tries(admin) > before + 1), holder.release()))
        freeing.start()
        with recipe:
            pass
        freeing.join()
    assert "try count" in caplog.text


def test_a_broken_connection_is_made_anew(face: Any, admin: redis.Redis) -> None:
    recipe = face.recipe("getset", "foo")
    with recipe:
        pass
    admin.client_kill_filter(_type="normal", skipme=True)
    with recipe:  # a try that fails, if the break was not noticed before, and another
        pass
    assert not admin.exists("lock.foo")


def test_a_try_that_is_cut_off_is_tried_again(connect: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    face = connect(proxy.url)
    for word, fault in (("setnx", LOSE_REQUEST), ("get", LOSE_REPLY)):
        proxy.on(word, fault)
        with caplog.at_level(logging.INFO, "holdfast.recipes"), face.recipe("getset", "foo") as lease:
            assert lease.held
    assert caplog.text.count("connection was lost") == 2, "the try, and then a release"


def test_a_release_that_fails_is_logged_only(
    connect: Any, proxy: Proxy, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = connect(proxy.url).recipe("getset", "foo")
    assert recipe.acquire()
    proxy.on("del", LOSE_REQUEST)
    with caplog.at_level(logging.INFO, "holdfast.recipes"):
        recipe.release()
    assert "release failed" in caplog.text
    assert admin.exists("lock.foo")
    with pytest.raises(holdfast.NotHeld):
        recipe.release()


def test_others_say_that_the_outcome_of_a_release_is_unknown(connect: Any, proxy: Proxy) -> None:
    face = connect(proxy.url)
    for name, word, end in (("setnx", "del", "never ends"), ("set_nx", "free", "ttl of 10 s")):
        recipe = face.recipe(name, "foo")
        assert recipe.acquire()
        proxy.on(word, LOSE_REPLY)
        with pytest.raises(holdfast.OutcomeUnknown, match=end):
            recipe.release()
        assert not recipe.locked()


def test_an_acquire_whose_reply_is_lost_leaves_its_key(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    """As in the original: it has no holder, and is not cleaned up."""
    face = connect(proxy.url)
    proxy.on("setnx", LOSE_REPLY)
    with pytest.raises(holdfast.Unavailable):
        face.recipe("setnx", "foo").acquire()
    assert admin.exists("foo")


def test_a_watch_goes_with_its_connection_and_is_begun_anew(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = connect(proxy.url)
    for word in ("watch", "get", "multi", "exec"):
        proxy.on(word, LOSE_REQUEST)
        recipe = face.recipe("watch", "foo")
        assert recipe.acquire(timeout=5)
        proxy.on(word, LOSE_REQUEST)
        recipe.release()
        assert not admin.exists("lock:foo"), word


def test_an_exec_whose_reply_is_lost_waits_for_itself(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    recipe = connect(proxy.url).recipe("watch", "foo")
    proxy.on("exec", LOSE_REPLY)
    assert recipe.acquire(timeout=0.05) is None
    assert admin.exists("lock:foo"), "it is its own, and it does not know"


def test_nor_does_one_that_hangs_after_a_refusal(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = connect(proxy.url, timeout=30)
    admin.set("foo", "another's")
    proxy.on("setnx", MUTE_REPLY, after=1)
    with took(less_than=10), pytest.raises(holdfast.Unavailable):
        face.recipe("setnx", "foo", sleep=0.3).acquire(timeout=0.2)


def test_a_hung_server_does_not_outlast_patience(connect: Any, server: Server) -> None:
    face = connect(server.url, timeout=1.0)
    for name in ("setnx", "getset", "watch"):
        with face.recipe(name, "foo"):
            pass
    server.pause()
    try:
        for name in ("getset", "setnx", "watch", "multi"):
            with pytest.raises(holdfast.Unavailable, match="did not answer"):
                face.recipe(name, "foo").acquire(timeout=0.2)
    finally:
        server.resume()
