"""The lab's store is pinned to a real server: the same commands to both, and every reply must be the same.

Time is exact although one of the two clocks is real. Each command is sent as MULTI, TIME, command, EXEC; the
server holds its clock still during EXEC, so TIME tells the very instant at which it decided, and the store's
clock is set to that. Keys may therefore have a ttl of a millisecond, and expiry is compared like all the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from hashlib import sha1

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.lab.servers.store import Reply, ReplyError, Status, Store
from holdfast.lua import SCRIPTS as OUR_SCRIPTS
from tests.servers import Server

Words = Sequence[bytes | str | int]


class Wire:
    """A connection that shows what RESP2 shows: a status is not a string, and an error keeps its code."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, *words: bytes | str | int) -> None:
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))

    def read(self) -> Reply:
        line = self._file.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return Status(rest.decode())
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        count = int(rest)
        if kind == b":":
            return count
        if count < 0:
            return None
        if kind == b"$":
            return self._file.read(count + 2)[:-2]
        return [self.read() for _ in range(count)]

    def execute(self, *words: bytes | str | int) -> Reply:
        self.send(*words)
        return self.read()

    def execute_at_an_instant(self, commands: Sequence[Words]) -> list[tuple[int, Reply]]:
        """Carry out the commands in one go. Each reply comes with the server's time, in microseconds, of it."""
        for words in commands:
            for line in (["MULTI"], ["TIME"], words, ["EXEC"]):
                self.send(*line)
        return [self._read_timed() for _ in commands]

    def _read_timed(self) -> tuple[int, Reply]:
        _, _, queued, done = (self.read() for _ in range(4))
        if isinstance(queued, ReplyError):
            return 0, queued
        assert isinstance(done, list), done
        clock, reply = done
        assert isinstance(clock, list)
        seconds, microseconds = (int(part) for part in clock if isinstance(part, bytes))
        return seconds * 1_000_000 + microseconds, reply

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--enable-debug-command", "yes") as running:
        yield running


@pytest.fixture(scope="module")
def wire(server: Server) -> Iterator[Wire]:
    connection = Wire(server.port)
    yield connection
    connection.close()


# Commands. A capital word stands for itself, any other for a choice below; `?` may be missing, `+` and `*` may
# be repeated. Most choices are sound, and some are not, so that complaints are compared as well.
SHAPES = """
    GET string|SET string value|SET string value setopt*|SET string value span ms|SETNX string value
    GETSET string value|INCR string|APPEND string value
    DEL key+|EXISTS key+|TYPE key|PERSIST key|TTL key|PTTL key|EXPIRE key s|PEXPIRE key ms
    HSET hash field value|HSET hash field value field value|HGET hash field|HDEL hash field+|HGETALL hash|HLEN hash
    HMGET hash field+|RPUSH list value+|LPUSH list value+|LTRIM list int int|LRANGE list int int
    ZADD zset score field|ZADD zset zopt* score field|ZADD zset zopt* score field score field|ZREM zset field+
    ZSCORE zset field|ZCARD zset|ZCOUNT zset bound bound|ZRANGE zset int int rangeopt*|ZRANGE zset int int
    KEYS pattern|SCAN 0 MATCH pattern|SCAN 0 TYPE kind|SCAN 0 scanopt|PING value?|ECHO value|FLUSHALL
    TIME|PUBLISH key value|SCRIPT EXISTS field|SCRIPT junk|EVALSHA field 0|EVAL value int key*
    NOPE field*|GET|GET string string
"""
CHOICES: dict[str, list[str]] = {
    # A command mostly meets a key of its own type, and now and then another's.
    "key": ["a", "b", "h", "l", "z"],
    "string": ["a", "a", "a", "b", "b", "z"],
    "hash": ["h", "h", "h", "h", "h", "a"],
    "list": ["l", "l", "l", "l", "l", "h"],
    "zset": ["z", "z", "z", "z", "z", "l"],
    "field": ["f", "g", "h", "1", "2"],
    "value": ["", "1", "10", "-7", "x", "010", str(2**63 - 1), "line\r\n\0", "3.5"],
    "int": ["0", "1", "2", "-1", "-2", "5", "x", "", "1.5", "-0", "+1", str(2**63 - 1), str(-(2**63))],
    "ms": ["1", "2", "3", "499", "1500", "60000", "60000", "0", "-1", "x", str(10**18), str(2**63 - 1)],
    "s": ["1", "2", "60", "60", "0", "-1", "x", str(10**15), str(10**17), str(-(10**17))],
    "score": ["1", "1.5", "-2", "inf", "-inf", "0.25", "1e15", "123456.75", "3", "nan", "x", "1_0"],  # Exact in sums.
    "bound": ["1", "1.5", "(1", "(1.5", "-inf", "+inf", "(inf", "0", "x", "(3"],
    "span": ["EX", "px", "PX"],
    "setopt": ["NX", "nx", "PX", "60000", "PXAT", "4102444800000", "1"],
    "zopt": ["NX", "nx"],
    "rangeopt": ["WITHSCORES", "withscores", "OOPS"],
    "scanopt": ["COUNT", "OOPS"],
    "pattern": ["*", "a", "?", "[ab]", "[^a]", "[a-c]*", "\\a", "**b", "["],
    "kind": ["string", "hash", "zset", "nope"],
    "junk": ["LOAD", "FLUSH", "EXISTS", "OOPS"],
}


def _shape(text: str) -> st.SearchStrategy[list[str]]:
    parts: list[st.SearchStrategy[list[str]]] = []
    for token in text.split():
        word = token.rstrip("?+*")
        one = st.sampled_from(CHOICES[word]) if word in CHOICES else st.just(word)
        least, most = {"?": (0, 1), "*": (0, 3), "+": (1, 3)}.get(token[len(word) :], (1, 1))
        parts.append(st.lists(one, min_size=least, max_size=most))
    return st.tuples(*parts).map(lambda lists: [word for words in lists for word in words])


def _shapes(text: str) -> list[str]:
    return text.strip().replace("\n", "|").split("|")


commands = st.one_of([_shape(shape) for shape in _shapes(SHAPES)])

# The same commands from inside a script: `show` tells what a reply is in Lua, `number` sends numbers as such.
CATCH = "local fine, reply = pcall(redis.call, unpack(ARGV)) "
NUMBERS = "local words = {} for i, v in ipairs(ARGV) do words[i] = tonumber(v) or v end "
SHOW = """
    local function show(v)
      if type(v) ~= 'table' then return type(v) .. ' ' .. tostring(v) end
      if v.ok then return 'ok ' .. v.ok elseif v.err then return 'err ' .. v.err end
      local shown = {}
      for i = 1, #v do shown[i] = show(v[i]) end
      return '[' .. table.concat(shown, ', ') .. ']'
    end
"""
SCRIPTS = {
    "call": "return redis.call(unpack(ARGV))",
    "pcall": "return redis.pcall(unpack(ARGV))",
    "caught": CATCH + "return {tostring(fine), type(reply), reply}",
    "rethrown": CATCH + "if fine then return reply end error(reply)",
    "show": SHOW + "return show(redis.pcall(unpack(ARGV)))",
    "number": NUMBERS + "return redis.call(unpack(words))",
}
BATCH = """
    local replies, at = {}, 1
    while ARGV[at] do
      local last = at + ARGV[at]
      replies[#replies + 1] = redis.pcall(unpack(ARGV, at + 1, last))
      at = last + 1
    end
    return replies
"""

scripted = st.tuples(st.sampled_from(sorted(SCRIPTS)), commands).map(
    lambda pair: ["EVAL", SCRIPTS[pair[0]], "0", *pair[1]]
)
batches = st.lists(commands, min_size=2, max_size=4).map(
    lambda lines: ["EVAL", BATCH, "0", *(word for line in lines for word in (str(len(line)), *line))]
)
PAUSE = ["DEBUG", "SLEEP", "0.002"]
FULL = ["CONFIG", "SET", "maxmemory", "1"]
ROOMY = ["CONFIG", "SET", "maxmemory", "0"]
steps = st.one_of(
    commands, commands, commands, scripted, scripted, batches, st.sampled_from([PAUSE, PAUSE, FULL, ROOMY])
)

# What the server returns in an order of its own choosing, in the positions where a step can name a command.
UNORDERED = {"HGETALL", "KEYS", "SCAN"}


def comparable(words: Sequence[str], reply: Reply) -> object:
    """The reply without what is not promised: an order, and where in a script an error was raised."""
    if isinstance(reply, ReplyError):
        return "error", reply.message.partition(" script: ")[0]
    if isinstance(reply, Status):
        return "status", str(reply)
    if UNORDERED.intersection(words):
        return _scrambled(reply)
    if isinstance(reply, list):
        return [comparable((), each) for each in reply]
    return reply


def _scrambled(reply: Reply) -> object:
    if isinstance(reply, list):
        return sorted((_scrambled(each) for each in reply), key=repr)
    if isinstance(reply, bytes):
        return bytes(sorted(reply))  # What `show` has put in a line.
    return comparable((), reply)


# All that the keys hold, asked at the end, so that no difference goes unnoticed for want of a question.
DUMP = [
    [word, key, *arguments.split()]
    for key in CHOICES["key"]
    for word, arguments in [
        ("TYPE", ""),
        ("GET", ""),
        ("PTTL", ""),
        ("ZRANGE", "0 -1 WITHSCORES"),
    ]
] + [["HGETALL", "h"]]


@pytest.mark.long  # random programs on a real server
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=20, max_size=80))
def test_the_same_commands_get_the_same_replies(wire: Wire, sequence: list[list[str]]) -> None:
    wire.execute(*ROOMY)
    wire.execute("FLUSHALL")
    wire.execute("SCRIPT", "FLUSH")
    store = Store()
    lines = sequence + DUMP
    for words, (now_us, expected) in zip(lines, wire.execute_at_an_instant(lines), strict=True):
        if now_us:
            store.now_us = now_us
        if words[0] == "CONFIG":
            store.oom = words == FULL
        elif words[0] != "DEBUG":
            assert comparable(words, store.execute(*words)) == comparable(words, expected), words


TRANSACTIONS = """
    WATCH key+|WATCH key+|WATCH key|UNWATCH|MULTI|MULTI|MULTI|EXEC|EXEC|EXEC|DISCARD
    GET key|SET key value|SET key value NX|SETNX key value|GETSET key value
    INCR key|APPEND key value|DEL key|FLUSHALL|PEXPIRE key 0|PERSIST key|HSET key field value|HDEL key field
    ZADD key score field|ZREM key field|RPUSH key value|SCRIPT EXISTS field|NOPE|GET|EXEC key
    DISCARD key|MULTI key|WATCH
"""
OUTSIDER = "outsider"  # The connection that fills up the server's memory.

moves = st.tuples(
    st.sampled_from(["one", "other"]), st.one_of([_shape(shape) for shape in _shapes(TRANSACTIONS)])
) | st.tuples(st.just(OUTSIDER), st.sampled_from([FULL, ROOMY]))


@pytest.mark.long  # random programs on a real server
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(moves, min_size=5, max_size=40))
def test_transactions_of_two_connections_end_the_same(
    server: Server, wire: Wire, sequence: list[tuple[str, list[str]]]
) -> None:
    wire.execute(*ROOMY)
    wire.execute("FLUSHALL")
    store = Store()
    wires = {"one": Wire(server.port), "other": Wire(server.port), OUTSIDER: wire}
    try:
        for who, words in sequence:
            expected = wires[who].execute(*words)
            if who == OUTSIDER:
                store.oom = words == FULL
            else:
                reply = store.session(who).execute(*words)
                assert comparable(words, reply) == comparable(words, expected), (who, words)
    finally:
        wires["one"].close()
        wires["other"].close()


# Not any float: the server's algorithm for the shortest digits sometimes spends a 17th where fewer would do.
numbers = st.one_of(
    st.integers(-(2**62), 2**62).map(str),
    st.integers(-(10**9), 10**9).map(lambda quarters: repr(quarters / 4)),
    st.sampled_from(
        [
            "0.1",
            "1e-7",
            "1.5e-7",
            "1e20",
            "1.5e300",
            "123456789.123",
            "9.2e18",
            "1e21",
            "0.00001",
            "1.25e-5",
            "1.2345678e-3",
        ]
    ),
    st.sampled_from(["1/0", "-1/0", "-0.0", "2^53", "2^62", "2^62 * 1.5", "2^63", "-2^63", "1e15 + 0.5", "1/3"]),
)
texts = st.sampled_from(["''", "'x'", "'X y'", "'-x'", "'two\\nlines'", "'\\0'"])
lua_values = st.recursive(
    st.one_of(numbers, texts, st.sampled_from(["true", "false", "nil", "undefined"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: "{" + ", ".join(items) + "}"),
        st.tuples(st.sampled_from(["ok", "err", "other", "[2]"]), inner).map(lambda pair: f"{{{pair[0]} = {pair[1]}}}"),
    ),
    max_leaves=6,
)


@pytest.mark.long  # random programs on a real server
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=lua_values, number=numbers)
def test_lua_values_come_out_the_same(wire: Wire, value: str, number: str) -> None:
    store = Store()
    for source in (f"return {value}", f"error({value}, 0)", f"return redis.call('echo', {number})"):
        assert comparable((), store.execute("EVAL", source, 0)) == comparable((), wire.execute("EVAL", source, 0)), (
            source
        )


class Both:
    """The server and the store side by side: one reply, because it is the same."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._wire.execute(*ROOMY)
        self._wire.execute("FLUSHALL")
        self.store = Store()

    def __call__(self, line: str | Words) -> Reply:
        words = line.split() if isinstance(line, str) else line
        [(now_us, expected)] = self._wire.execute_at_an_instant([words])
        self.store.now_us = now_us or self.store.now_us
        reply = self.store.execute(*words)
        assert comparable((), reply) == comparable((), expected), words
        return reply

    def all(self, lines: str) -> list[Reply]:
        return [self(line) for line in lines.split(" / ")]


@pytest.fixture
def both(wire: Wire) -> Both:
    return Both(wire)


# The rules of thumb about ttls that the recipes depend on.
@pytest.mark.parametrize(
    ("lines", "last"),
    [
        pytest.param("SET k 1 EX 60 / SET k 2 / TTL k", -1, id="set-clears-a-ttl"),
        pytest.param("SET k 1 EX 60 / SET k 2 NX / TTL k", 60, id="set-nx-refused-leaves-it"),
        pytest.param("SET k 1 EX 60 / GETSET k 2 / TTL k", -1, id="getset-clears-a-ttl"),
        pytest.param("SET k 1 EX 60 / SETNX k 2 / TTL k", 60, id="setnx-on-an-existing-key-leaves-it"),
        pytest.param("SET k 1 EX 60 / DEL k / SETNX k 2 / TTL k", -1, id="setnx-on-a-new-key-has-none"),
        pytest.param("SET k 1 EX 60 / INCR k / TTL k", 60, id="incr-keeps-a-ttl"),
        pytest.param("SET k 1 EX 60 / APPEND k 2 / TTL k", 60, id="append-keeps-a-ttl"),
        pytest.param("HSET k f 1 / EXPIRE k 60 / HSET k f 2 / TTL k", 60, id="hset-keeps-a-ttl"),
        pytest.param("HSET k f 1 / EXPIRE k 60 / HDEL k f / HSET k f 1 / TTL k", -1, id="an-emptied-key-forgets-it"),
        pytest.param("SET k 1 EX 60 / EXPIRE k 10 / TTL k", 10, id="expire-again-replaces-a-ttl"),
        pytest.param("SET k 1 EX 60 / PERSIST k / TTL k", -1, id="persist-takes-a-ttl-away"),
        pytest.param("SET k 1 / PERSIST k", 0, id="persist-without-a-ttl"),
        pytest.param("SET k 1 / SET l 1 / DEL k l m k", 2, id="del-counts-what-it-removed"),
        pytest.param("EXPIRE k 10", 0, id="expire-on-a-missing-key"),
        pytest.param("SET k 1 / EXPIRE k -1", 1, id="negative-expire-succeeds"),
        pytest.param("SET k 1 / EXPIRE k -1 / EXISTS k", 0, id="negative-expire-deletes"),
        pytest.param("SET k 1 / EXPIRE k 0 / EXISTS k", 0, id="expire-zero-deletes"),
        pytest.param("SET k 1 PXAT 1 / EXISTS k", 0, id="set-with-a-past-deadline-leaves-nothing"),
        pytest.param("TTL k", -2, id="ttl-of-a-missing-key"),
        pytest.param("SET k 1 / PTTL k", -1, id="pttl-without-a-ttl"),
        pytest.param("SET k 1 PX 1400 / TTL k", 1, id="ttl-rounds-down"),
        pytest.param("SET k 1 PX 1900 / TTL k", 2, id="ttl-rounds-up"),
        pytest.param("SET k 1 PX 450 / TTL k", 0, id="ttl-of-a-live-key-can-be-zero"),
    ],
)
def test_rules_about_ttls(both: Both, lines: str, last: int) -> None:
    assert both.all(lines)[-1] == last


def test_a_key_lives_through_the_millisecond_of_its_deadline(both: Both) -> None:
    """Each sample is compared at the server's own time, so this pins the instant and not just the order of things."""
    lived: set[int] = set()
    for _ in range(200):
        both("SET k 1 PX 2")
        while (left := both("PTTL k")) != -2:
            assert isinstance(left, int)
            lived.add(left)
        if 0 in lived:
            return
    pytest.fail(f"the deadline itself was never met, only {sorted(lived)}")


def test_time_stands_still_in_a_script(both: Both) -> None:
    busy = "local a = redis.call('time') for i = 1, 100000 do a[3] = i end return {a[2], redis.call('time')[2]}"
    reply = both(["EVAL", busy, 0])
    assert isinstance(reply, list)
    assert reply[0] == reply[1]


@pytest.mark.parametrize(
    ("before", "write", "spoils"),
    [
        pytest.param("SET k 1", "SET k 1", True, id="the-same-value-again"),
        pytest.param("SET k 1", "SET k 2 NX", False, id="a-refused-set"),
        pytest.param("SET k 1", "PEXPIRE k 60000", True, id="a-new-ttl"),
        pytest.param("SET k 1", "PERSIST k", False, id="no-ttl-to-take-away"),
        pytest.param("SET k 1", "GET k", False, id="a-read"),
        pytest.param("SET l 1", "DEL k", False, id="deleted-when-missing"),
        pytest.param("SET l 1", "FLUSHALL", False, id="flushed-when-missing"),
        pytest.param("SET k 1", "FLUSHALL", True, id="flushed"),
        pytest.param("HSET k f 1", "HSET k f 1", True, id="the-same-field-again"),
        pytest.param("ZADD k 1 a", "ZADD k 1 a", False, id="the-same-score-again"),
        pytest.param("ZADD k 1 a", "ZADD k 2 a", True, id="another-score"),
    ],
)
def test_what_spoils_a_transaction(server: Server, both: Both, before: str, write: str, spoils: bool) -> None:
    connection, session = Wire(server.port), both.store.session("one")
    both(before)
    assert connection.execute("WATCH", "k") == session.execute("WATCH", "k")
    both(write)
    assert connection.execute("MULTI") == session.execute("MULTI")
    expected: Reply = None if spoils else []
    assert connection.execute("EXEC") == session.execute("EXEC") == expected
    connection.close()


def test_a_watched_key_that_expires_spoils_the_transaction(server: Server, wire: Wire, both: Both) -> None:
    connection, session = Wire(server.port), both.store.session("one")
    both("SET k 1 PX 500")  # it must still be there when it is watched
    for words in (["WATCH", "k"], ["MULTI"]):
        assert connection.execute(*words) == session.execute(*words)
    wire.execute("DEBUG", "SLEEP", "0.6")
    both("PING")  # The store's clock follows the server's.
    assert connection.execute("EXEC") is session.execute("EXEC") is None
    connection.close()


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        pytest.param("return redis.call('set', 'k', 2)", "OOM", id="the-first-write-is-refused"),
        pytest.param("redis.call('get', 'k') return redis.call('set', 'k', 2)", "OOM", id="also-after-a-read"),
        pytest.param("return redis.call('del', 'k')", 1, id="del-works"),
        pytest.param("return redis.call('pexpire', 'k', 60000)", 1, id="pexpire-works"),
        pytest.param("redis.call('del', 'k') return redis.call('set', 'k', 2)", "OK", id="set-works-after-del"),
        pytest.param("redis.call('del', 'x') return redis.call('set', 'k', 2)", "OK", id="even-if-del-found-nothing"),
    ],
)
def test_scripts_without_memory(both: Both, wire: Wire, source: str, reply: Reply) -> None:
    both("SET k 1")
    wire.execute(*FULL)
    both.store.oom = True
    given_reply = both(["EVAL", source, 0])
    wire.execute(*ROOMY)
    assert (given_reply.code if isinstance(given_reply, ReplyError) else given_reply) == reply


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "_G.x = 1",
        "local function f() x = 1 end f()",
        "KEYS = {}",
        "redis = nil",
        "redis.call = nil",
        "string.rep = nil",
        "setmetatable(_G, {})",
        "return undefined",
        "return io",
        "return require",
        "return print",
        "syntax error",
        "local a return a.b",
        "error('boom')",
        "error({err = 'MY code'})",
        "error()",
        "error({})",
        "redis.call()",
        "redis.call({})",
        "redis.call('get', nil)",
        "redis.call('get', true)",
        "redis.call('multi')",
        "redis.call('eval', 'return 1', 0)",
        "redis.call('get')",
        "redis.sha1hex()",
        "redis.call('nope')",
        "redis.call('incr', 'text')",
        "redis.call('incr', 'list')",
    ],
)
def test_scripts_fail_in_the_same_way(both: Both, source: str) -> None:
    both("SET text x")
    both("RPUSH list x")
    reply = both(["EVAL", source, 0])
    assert isinstance(reply, ReplyError)


def test_scripts_have_the_same_sha1(both: Both) -> None:
    for text in (b"", b"abc", b"\xff\x00"):
        assert both(["EVAL", "return redis.sha1hex(ARGV[1])", 0, text]) == sha1(text).hexdigest().encode()
    both(["EVAL", "return redis.sha1hex(7)", 0])


@pytest.mark.parametrize("name", sorted(OUR_SCRIPTS))
def test_our_own_scripts_load(both: Both, name: str) -> None:
    assert isinstance(both(["SCRIPT", "LOAD", OUR_SCRIPTS[name].source]), bytes)
