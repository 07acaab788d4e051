"""docs/wire-format.md is the specification: the patterns of that page alone read what every kind of lock writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import redis

import holdfast
from holdfast import guard
from holdfast.lua import SCRIPTS
from holdfast.protocol.mutex import abandon_step
from holdfast.untrusted import printable
from tests.support import eventually

PAGE = (Path(__file__).parent.parent / "docs" / "wire-format.md").read_text()
LABEL = "中文 a-b.c;%/{x}"


class Line(NamedTuple):
    """One line of the page: where a value is, and what it looks like."""

    key: str
    type: str
    field: str
    value: str


def _patterns() -> list[Line]:
    words, lines = re.findall(r"```text\n(.*?)```", PAGE.partition("## Patterns")[2].partition("\n## ")[0], re.DOTALL)
    known: dict[str, str] = {}

    def expanded(pattern: str) -> str:
        return re.sub(r"\{([a-z]+)\}", lambda word: f"(?:{known[word[1]]})", pattern)

    for line in words.splitlines():
        word, pattern = line.split(maxsplit=1)
        known[word] = expanded(pattern)
    rows = [re.split(" {2,}", line) for line in lines.splitlines()]
    assert {len(row) for row in rows} == {4}, "a line that has not four columns"
    return [Line(expanded(key), kind, expanded(field.strip("'")), expanded(value)) for key, kind, field, value in rows]


LINES = _patterns()


# Every key, with its type and its values, at one time.
SNAPSHOT = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local type = redis.call('TYPE', key).ok
  local read = {string = {'GET', key}, hash = {'HGETALL', key}, zset = {'ZRANGE', key, 0, -1, 'WITHSCORES'}}
  if type == 'list' then
    for _, item in ipairs(redis.call('LRANGE', key, 0, -1)) do
      found[#found + 1] = {key, type, {'.', item}}
    end
  else
    local values = redis.call(unpack(read[type]))
    found[#found + 1] = {key, type, type == 'string' and {'.', values} or values}
  end
end
return found
"""


class Reader:
    """Reads a server by the patterns, and remembers which of them it has used."""

    def __init__(self, admin: redis.Redis) -> None:
        self._admin = admin
        self.used: set[Line] = set()

    def read(self) -> dict[tuple[str, str], dict[str, str]]:
        """For each lock and part: what is there. Fails if the page knows nothing of it."""
        found = {}
        snapshot: Any = self._admin.eval(SNAPSHOT, 0)
        for raw_key, raw_type, raw_values in snapshot:
            key, kind, words = raw_key.decode(), raw_type.decode(), [word.decode() for word in raw_values]
            # A tombstone has no braces of its own: those of a label are percent-encoded.
            main, _, part = re.sub(r":\{[^{}]*\}$", "", key).partition(":hf1:")
            assert key in (main, f"{main}:hf1:{part}:{{{main}}}"), key
            values = dict(zip(words[::2], words[1::2], strict=True))
            for field, value in values.items():
                self._match(part or "main", kind, field, value)
            found[main.removeprefix("shop:"), part or "main"] = values
        return found

    def _match(self, part: str, kind: str, field: str, value: str) -> None:
        kind = {"zset": "sorted set"}.get(kind, kind)
        fits = [
            line
            for line in LINES
            if kind == line.type
            and re.fullmatch(line.key, part)
            and (field == "." == line.field or re.fullmatch(line.field, field))
            and re.fullmatch(line.value, value)
        ]
        assert fits, f"the page has no pattern for {part} {kind}: {field!r} -> {value!r}"
        self.used.update(fits)


@pytest.fixture
def reader(admin: redis.Redis) -> Reader:
    return Reader(admin)


@pytest.fixture
def clients(url: str) -> Iterator[Callable[[], holdfast.Client]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(holdfast.connect(url, namespace="shop:"))


@contextmanager
def waiting(*acts: Callable[[], object]) -> Iterator[None]:
    """These callers, each in a thread of its own. What they wait for must end within the block."""
    threads = [Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def take(lock: Any) -> Callable[[], None]:
    """Acquire it and release it."""

    def act() -> None:
        lock.acquire(timeout=20).release()

    return act


def _wants(reader: Reader, name: str) -> list[str]:
    """What the waiters for that name want, in the order of the queue."""
    found = reader.read()
    waiters = found.get((name, "waiters"), {})
    queue = sorted(found.get((name, "queue"), {}).items(), key=lambda item: int(item[1]))
    return [waiters[token].split()[3].partition(";")[0] for token, _ in queue if token in waiters]


def _locks(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    one, two = clients(), clients()
    with one.lock("x") as lease:
        with waiting(take(two.lock("x"))):
            eventually(lambda: _wants(reader, "x") == ["64"])
            lease.release()


def _nested_and_several(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    one, two, three = clients(), clients(), clients()

    def nested() -> None:
        with three.lock("y"), three.lock("a", cohort=0):
            pass

    with one.lock("a") as lease:
        with waiting(take(two.lock("a", "b")), nested):
            eventually(lambda: set(_wants(reader, "a")) == {"0", "1"} and _wants(reader, "b") == ["00"])
            lease.release()


def _yield_windows(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    admin.set("shop:x", "of another library", px=60_000)
    with waiting(take(clients().lock("x"))):
        eventually(lambda: admin.hget("shop:x:hf1:waiters:{shop:x}", "yield"))
        admin.delete("shop:x")
        reader.read()


def _pools(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    one, two = clients(), clients()
    for name, held, other, wants in (
        ("s", one.semaphore("s", 1), two.semaphore("s", 1), "n1"),
        ("w", one.rwlock("w").write, two.rwlock("w").read, "any"),
        ("r", one.rwlock("r").read, two.rwlock("r").write, "all"),
    ):
        with held as lease:
            reader.read()
            holders = f"shop:{name}:hf1:holders:{{shop:{name}}}"
            admin.zrem(holders, f"fence {lease.token}")
            with waiting(take(other)):
                eventually(lambda name=name, wants=wants: _wants(reader, name) == [wants])  # type: ignore[misc]
                lease.release()


def _latch(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    one, two = clients(), clients()
    one.latch("l", 2).count_down()
    with waiting(lambda: two.latch("l", 2).wait(20)):
        eventually(lambda: ("l", "latch:waiters") in reader.read())
        one.latch("l", 2).count_down()


def _cache(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    one, two, may_end = clients(), clients(), Event()

    def compute() -> str:
        assert may_end.wait(20)
        return "computed\n中文"

    def fail() -> str:
        raise LookupError("no such user\nat all")

    with waiting(lambda: one.get_or_compute("c", compute, ttl=60)):
        eventually(lambda: ("c", "cache:claim") in reader.read())
        with waiting(lambda: two.get_or_compute("c", compute, ttl=60)):
            eventually(lambda: ("c", "cache:waiters") in reader.read())
            may_end.set()
    with pytest.raises(LookupError):
        one.get_or_compute("f", fail, ttl=60, errors=60)


def _election_and_guard(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    with clients().election("e", label=LABEL).lead() as lease:
        guard.RedisGuard(admin).set("shop:g", "value", lease=lease)
        admin.delete("shop:g")  # it is the caller's own, not Holdfast's


def _tombstones(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    lease = clients().lock("t", label=LABEL).acquire()
    step = abandon_step(lease._hold, tombstone=True)  # as if a request of it were still under way
    admin.evalsha(SCRIPTS["abandon"].sha.decode(), len(step.keys), *step.keys, *step.args)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def _breaks(reader: Reader, clients: Any, admin: redis.Redis) -> None:
    client, operator = clients(), clients()
    for lock in (client.lock("b", label=LABEL), client.semaphore("p", 1, label=LABEL)):
        lease = lock.acquire()
        operator.break_lock(lock.name, fence=lease.fence, reason="it is stuck", label=LABEL)
        reader.read()
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            lease.release()
    admin.set("shop:o", "of another library", px=60_000)
    (holder,) = operator.inspect("o").holders
    operator.break_lock("o", holder_id=holder.id, reason="it is stuck: 中文")


DRIVES = [
    *(_locks, _nested_and_several, _yield_windows, _pools, _latch, _cache, _election_and_guard, _tombstones, _breaks),
]


def test_each_key_and_value_matches_the_page_and_each_pattern_is_used(
    reader: Reader, clients: Any, admin: redis.Redis
) -> None:
    for script in SCRIPTS.values():
        admin.script_load(script.source)
    for drive in DRIVES:
        drive(reader, clients, admin)
        reader.read()
    assert [line for line in LINES if line not in reader.used] == []


def test_a_value_that_the_page_does_not_know_is_found(reader: Reader, admin: redis.Redis) -> None:
    for forge in (
        lambda: admin.set("shop:x:hf1:news:{shop:x}", "1"),
        lambda: admin.hset("shop:x:hf1:waiters:{shop:x}", "news", "1"),
        lambda: admin.set("shop:x:hf1:fence:{shop:x}", "1700000000000000"),
        lambda: admin.zadd("shop:x:hf1:holders:{shop:x}", {"news": 1}),
    ):
        admin.flushall()
        forge()
        with pytest.raises(AssertionError, match="no pattern"):
            reader.read()


def test_the_table_of_keys_and_the_patterns_name_the_same_keys() -> None:
    rows = re.findall(r"^\| (`[^|]+?) \|", PAGE.partition("| key |")[2].partition("\n\n")[0], re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    lines = re.findall(r"^(\S+) +(?:string|hash|sorted set|list) ", PAGE, re.MULTILINE)
    assert named == {{"main": "<main>", "gone:{token}": "gone:<token>"}.get(key, key) for key in lines}


# What an inspector reads, by the page alone.


def _readable(token: str) -> tuple[str, int, str]:
    host, pid, *label = token.rpartition(".")[0].split("-")
    return unquote(host), int(pid), unquote(label[0]) if label else ""


KINDS: dict[str, Callable[[holdfast.Client], Any]] = {
    "lock": lambda client: client.lock("k", label=LABEL),
    "rlock": lambda client: client.rlock("k", label=LABEL),
    "several": lambda client: client.lock("k", "other", label=LABEL),
    "election": lambda client: client.election("k", label=LABEL).lead(),
    "semaphore": lambda client: client.semaphore("k", 2, label=LABEL),
    "read": lambda client: client.rwlock("k", label=LABEL).read,
    "write": lambda client: client.rwlock("k", label=LABEL).write,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_holder_fence_and_start_can_be_read(reader: Reader, clients: Any, admin: redis.Redis, make: Any) -> None:
    def time_us() -> int:
        seconds, micros = admin.time()
        return int(seconds) * 10**6 + int(micros)

    before_us = time_us()
    with make(clients()) as lease:
        after_us = time_us()
        found = reader.read()
        if ("k", "main") in found:
            token = found["k", "main"]["."]
            first, _, end = found["k", "fence"]["."].split()
            assert token.endswith(end)
        else:
            holders = found["k", "holders"]
            (token,) = (member for member in holders if " " not in member)
            first = holders[f"fence {token}"].removeprefix("-")
        assert token == lease.token
        assert _readable(token)[2] == LABEL
        assert int(first) == lease.fence
        assert before_us <= int(first) <= after_us


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_fences_of_an_earlier_holder_are_not_taken_for_the_present_ones(
    reader: Reader, clients: Any, admin: redis.Redis
) -> None:
    with clients().lock("k"):
        pass
    with clients().recipe("set_nx", "k", ttl=30):
        found = reader.read()
        assert not found["k", "main"]["."].endswith(found["k", "fence"]["."].split()[2])
        leader = clients().election("k").leader()
        assert leader is not None
        assert (leader.fence, leader.since) == (None, None)


def test_the_number_of_local_waiters_is_that_of_the_process(reader: Reader, clients: Any) -> None:
    one, two = clients(), clients()

    def local_waiters() -> list[int]:
        waiters = reader.read().get(("k", "waiters"), {})
        return [int(entry.split()[4]) for field, entry in waiters.items() if field not in ("kind", "yield")]

    with one.lock("k") as lease, waiting(take(two.lock("k"))):
        eventually(lambda: local_waiters() == [0])
        with waiting(*[take(two.lock("k")) for _ in range(3)]):
            eventually(lambda: local_waiters() == [3])
            lease.release()


@pytest.mark.parametrize(
    "label", ["", "x", "-", "a-1-b", "1", ".", "%", "%41", "a b;c", "中文", "\n", "x" * 64, "\U0001f600" * 64]
)
def test_a_label_is_read_as_it_was_given(clients: Any, label: str) -> None:
    with clients().lock("k", label=label) as lease:
        assert re.fullmatch(r"[!-:<-~]+\.[0-9a-f]{32}", lease.token), "no spaces, no semicolon, no control characters"
        assert _readable(lease.token)[2] == label
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            clients().lock("k", wait=0).__enter__()
        assert caught.value.holder is not None
        assert caught.value.holder.label == printable(label)


@pytest.mark.parametrize("label", ["x" * 65, "中" * 65, "\ud800"])
def test_a_label_that_does_not_fit_is_refused_at_once(clients: Any, label: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="label"):
        clients().lock("k", label=label)
