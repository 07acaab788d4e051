"""A recipe is used like any lock, on both faces."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.recipes import RECIPES, options_of
from holdfast.protocol.recipes.base import BaseRecipe
from tests.servers import free_port
from tests.support import asyncio_test, later

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # by fork

ON_REDIS = [name for name in RECIPES if name != "memcached_add"]
EXCLUDING = [name for name in ON_REDIS if name != "watch_blind"]
FOR_EVER = ["setnx", "watch_blind"]
COMPARING = ["setnx_repair", "watch", "set_nx"]


@pytest.mark.parametrize("name", ON_REDIS)
def test_it_has_the_face_of_a_lock(face: Any, admin: redis.Redis, name: str) -> None:
    recipe = face.recipe(name, "foo")
    assert not recipe.locked()
    with pytest.raises(holdfast.NotHeld):
        recipe.release()
    lease = recipe.acquire()
    assert lease
    assert recipe.locked()
    assert (lease.held, lease.name, lease.fence) == (True, "foo", None)
    assert lease.remaining() == math.inf if name in FOR_EVER else 9 < lease.remaining() <= 10
    assert bool(lease.token) == (name in COMPARING)
    lease.check()
    assert not lease.lost.is_set()
    assert not lease.lost.wait(0.001)
    with pytest.raises(holdfast.Unsupported, match="client.lock"):
        lease.extend(5)
    recipe.release()
    assert not recipe.locked()
    assert admin.keys("*") == []
    assert (lease.held, lease.remaining()) == (False, 0.0)
    for again in (recipe.release, lease.release, lease.check):
        with pytest.raises(holdfast.NotHeld):
            again()
    assert admin.keys("*") == []


@pytest.mark.parametrize("name", ON_REDIS)
def test_with_gives_the_lease_and_takes_it_back(face: Any, admin: redis.Redis, name: str) -> None:
    recipe = face.recipe(name, "foo")
    for _ in range(2):
        with recipe as lease:
            assert lease.held
            assert admin.exists(recipe.key)
        assert not lease.held
        assert not admin.exists(recipe.key)
    with recipe as lease:
        lease.release()  # early, which is allowed
    assert admin.keys("*") == []


@pytest.mark.parametrize("name", EXCLUDING)
def test_who_is_refused_waits_as_long_as_it_wants(face: Any, name: str) -> None:
    holder = face.recipe(name, "foo").acquire()
    other = face.recipe(name, "foo", wait=0.03)
    assert other.acquire(blocking=False) is None
    assert other.acquire(timeout=0.03) is None
    with pytest.raises(holdfast.AcquireTimeout, match="within 0.03 s"):
        with other:
            pass
    with pytest.raises(ValueError):
        other.acquire(False, 1)
    with later(0.05, holder.release):
        lease = other.acquire(timeout=10)
    assert lease
    lease.release()


@pytest.mark.parametrize("name", ON_REDIS)
def test_an_object_has_one_lease_whoever_shares_it(face: Any, name: str) -> None:
    recipe = face.recipe(name, "foo", wait=0.02)
    lease = recipe.acquire()
    assert recipe.acquire(blocking=False) is None, "even where every try wins"
    with pytest.raises(holdfast.AcquireTimeout, match="th(is|er) thread or task .*holds it"):
        with recipe:
            pass
    with later(0.05, recipe.release):
        again = recipe.acquire(timeout=10)
    assert again
    assert not lease.held
    again.release()


def test_the_fenced_lock_can_be_asked_for_as_a_recipe(face: Any) -> None:
    with face.recipe("holdfast", "foo", ttl=60, wait=1) as lease:
        assert lease.fence > 0
        assert 50 < lease.remaining() < 60
        assert face.lock("foo").acquire(blocking=False) is None


def test_the_error_of_the_body_comes_first(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.raises(KeyError) as caught:
        with client.recipe("set_nx", "foo"):
            admin.delete("foo")
            raise KeyError("mine")
    assert "LeaseLost" in caught.value.__notes__[0]
    with pytest.raises(holdfast.LeaseLost) as lost:
        with client.recipe("set_nx", "foo"):
            admin.delete("foo")
    assert "fence" not in str(lost.value)


def test_a_lease_ends_with_its_ttl_on_our_own_clock(face: Any) -> None:
    lease = face.recipe("set_nx", "foo", ttl=0.05).acquire()
    assert lease.lost.wait(5)
    assert lease.lost.is_set()
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost, match="ttl of 0.05 s ran out"):
        lease.check()


def test_repr_and_pickling(client: holdfast.Client) -> None:
    recipe = client.recipe("set_nx", "foo")
    lease = recipe.acquire()
    assert lease
    assert "locked" in repr(recipe)
    assert lease.token not in repr(lease)
    assert "fence" not in repr(lease)
    for thing in (recipe, lease):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
    assert isinstance(recipe, holdfast.Lock)
    assert isinstance(lease, holdfast.Lease)
    lease.release()


BAD = [
    ("nonsense", {}, "setnx_repair.*holdfast"),
    (None, {}, "there are"),
    (["getset"], {}, "there are"),
    ("getset", {"tll": 1}, "it takes owner_prefix, plus_one, prefix, release, sleep, ttl, unit, wait"),
    ("setnx", {"ttl": 1}, "it takes prefix, sleep, wait"),
    ("holdfast", {"unit": "s"}, "it takes cohort"),
    ("getset", {"ttl": 0}, "at least 0.01 seconds"),
    ("getset", {"ttl": math.nan}, "at least 0.01 seconds"),
    ("getset", {"ttl": True}, "a number of seconds"),
    ("getset", {"ttl": "10"}, "a number of seconds"),
    ("getset", {"ttl": 10**10}, "at most 31622400 seconds"),
    ("getset", {"ttl": 10**5000}, "too large to show"),
    ("getset", {"sleep": -1}, "at least 0 seconds"),
    ("getset", {"wait": -1}, "at least 0 seconds"),
    ("getset", {"unit": "minutes"}, "'us', 'ms', 's'"),
    ("getset", {"release": "never"}, "'unexpired', 'same_value', 'del'"),
    ("getset", {"plus_one": 2}, "True, False"),
    ("getset", {"owner_prefix": 1}, "True, False"),
    ("getset_equal", {"release": "del"}, "it takes"),
    ("setnx_repair", {"repair": "always"}, "'missing', 'as_written'"),
    ("watch", {"prefix": 5}, "a str"),
]


@pytest.mark.parametrize(("name", "options", "said"), BAD)
def test_what_makes_no_sense_is_refused_at_once(name: Any, options: dict[str, Any], said: str) -> None:
    address = f"redis://127.0.0.1:{free_port()}"  # where nobody listens: nothing is asked
    for connect in (holdfast.connect, holdfast.aio.connect):
        with pytest.raises(holdfast.InvalidConfig, match=said):
            connect(address).recipe(name, "foo", **options)


@pytest.mark.parametrize("key", ["", None, ["foo"], 5, "a\udc80"], ids=["empty", "None", "list", "int", "surrogate"])
def test_what_is_no_key_is_refused(client: holdfast.Client, key: Any) -> None:
    with pytest.raises(holdfast.InvalidName):
        client.recipe("getset", key)


@pytest.mark.parametrize(
    "key",
    ["a{b", "{}", "a}b{", "foo:hf1:queue", "a\nb", "x" * 600, "{"],
    ids=["open", "no tag", "inside out", "side key", "two lines", "long", "brace"],
)
@pytest.mark.parametrize("name", ["setnx", "getset", "setnx_repair", "watch", "set_nx"])
def test_whatever_key_is_deployed_can_be_named(
    client: holdfast.Client, admin: redis.Redis, name: str, key: str
) -> None:
    """They have no side keys, which is what the rules for the names of other locks are for."""
    recipe = client.recipe(name, key, prefix="")
    with recipe:
        assert admin.keys("*") == [key.encode()]
        assert recipe.locked()
        assert client.recipe(name, key, prefix="").acquire(blocking=False) is None
    assert admin.keys("*") == []


def test_a_redis_is_no_memcached(client: holdfast.Client) -> None:
    with pytest.raises(
        holdfast.Unsupported, match=r"recipe for memcached is not supported by redis://.*use memcached://"
    ):
        client.recipe("memcached_add", "foo")


def test_every_recipe_says_its_options_and_its_pitfall() -> None:
    for name, kind in RECIPES.items():
        assert kind.pitfall
        assert {"wait", "sleep", "prefix"} <= options_of(name).keys()
        assert ("ttl" in options_of(name)) == (name not in FOR_EVER)
    assert options_of("getset") == {
        "wait": None,
        "sleep": 0.001,
        "prefix": "lock.",
        "ttl": 10.0,
        "unit": "us",
        "plus_one": None,
        "owner_prefix": False,
        "release": "unexpired",
    }


def test_each_warns_once_per_process_whoever_asks_and_says_where() -> None:
    code = """
import warnings, holdfast, holdfast.aio
warnings.simplefilter("always")
client, other = holdfast.connect("redis://127.0.0.1:1"), holdfast.aio.connect("redis://127.0.0.1:1")
with warnings.catch_warnings(record=True) as heard:
    for _ in range(2):
        for which in (client, other):
            which.recipe("getset", "foo")
            which.recipe("set_nx", "foo")
            which.recipe("holdfast", "foo")
print(*(f"{warning.category.__name__}|{warning.filename}|{warning.message}" for warning in heard), sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()
    assert len(said) == 2
    for line, name in zip(said, ("getset", "set_nx"), strict=True):
        category, file, message = line.split("|")
        assert (category, file) == ("UnsafeRecipeWarning", "<string>")
        assert repr(name) in message
        assert RECIPES[name].pitfall in message
        assert "client.lock" in message


def test_nobody_there_is_unavailable_at_once(connect: Any) -> None:
    for name in ("setnx", "getset", "watch"):
        with pytest.raises(holdfast.Unavailable, match="nothing listens there"):
            connect(f"redis://127.0.0.1:{free_port()}").recipe(name, "foo", wait=None).acquire()


def test_closed_is_unavailable(connect: Any, url: str) -> None:
    face = connect(url)
    recipes = [face.recipe(name, "foo") for name in ON_REDIS]
    face.client.close() if connect.kind == "blocking" else face._call(face.client.aclose())
    for recipe in recipes:
        with pytest.raises(holdfast.Unavailable, match="closed"):
            recipe.acquire()


@pytest.mark.parametrize("name", EXCLUDING)
def test_a_forked_child_holds_nothing_and_frees_nothing(client: holdfast.Client, admin: redis.Redis, name: str) -> None:
    recipe = client.recipe(name, "foo")
    assert isinstance(recipe, BaseRecipe)
    lease = recipe.acquire()
    assert lease
    child = os.fork()
    if child == 0:
        try:
            ok = not lease.held and lease.lost.is_set()
            try:
                recipe.release()
                ok = False
            except holdfast.LeaseLost:
                pass
            os._exit(0 if ok and recipe.acquire(blocking=False) is None else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease.held
    assert admin.exists(recipe.key)
    recipe.release()
    assert not admin.exists(recipe.key)


@pytest.mark.parametrize("name", EXCLUDING)
def test_who_is_interrupted_while_it_waits_leaves_its_object_free(client: holdfast.Client, name: str) -> None:
    class Alarm(Exception):
        pass

    def wake(number: int, frame: object) -> None:
        raise Alarm

    recipe, other = client.recipe(name, "foo"), client.recipe(name, "foo")
    assert other.acquire()
    before = signal.signal(signal.SIGALRM, wake)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Alarm):
            recipe.acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    other.release()
    assert recipe.acquire(blocking=False)
    recipe.release()


@asyncio_test
async def test_a_cancelled_release_still_gives_back(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        for name, turns in itertools.product(ON_REDIS, range(6)):
            recipe = client.recipe(name, "foo")
            assert isinstance(recipe, BaseRecipe)
            assert await recipe.acquire()
            task = asyncio.ensure_future(recipe.release())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not turns:  # then it had not begun
                await recipe.release()
            assert not admin.exists(recipe.key), f"{name} after {turns} turns"


@asyncio_test
async def test_a_cancelled_acquire_leaves_its_object_free(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        for name in EXCLUDING:
            recipe, other = client.recipe(name, "foo"), client.recipe(name, "foo")
            assert await other.acquire()
            task = asyncio.ensure_future(recipe.acquire())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.release()
            assert await recipe.acquire(timeout=5)
            await recipe.release()
            assert admin.keys("*") == []


def test_a_lost_lease_without_a_fence_speaks_of_none(client: holdfast.Client) -> None:
    lease = client.recipe("set_nx", "brief", ttl=0.05).acquire()
    assert lease
    while lease.held:
        pass
    with pytest.raises(holdfast.LeaseLost) as lost:
        lease.check()
    assert "fence" not in str(lost.value)
    with suppress(holdfast.LeaseLost):  # if the key is gone on the server, too, by then
        lease.release()
