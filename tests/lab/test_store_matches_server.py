"""The lab's store is pinned to a real server: the same commands to both, and every reply must be the same.

Time is exact although one of the two clocks is real. Each command is sent as MULTI, TIME, command, EXEC; the server
holds its clock still during EXEC, so TIME tells the very instant at which it decided, and the store's clock is set to
that. Keys may therefore have a ttl of a millisecond, and expiry itself is compared like everything else.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.lab.store import Reply, ReplyError, Status, Store
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
        """Carry out the commands in one go; each reply comes with the server's time, in microseconds, of that reply."""
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


# Commands, one shape per line. A capital word stands for itself, any other for a choice below; `?` may be missing,
# `+` and `*` may be repeated. Most choices are sound, some are not, so that complaints are compared as well.
SHAPES = """
    GET key|MGET key+|SET key value|SET key value setopt*|SET key value span ms|SETNX key value|SETEX key s value
    PSETEX key ms value|GETSET key value|GETDEL key|MSET key value|MSET key value key value|INCR key|INCRBY key int
    DECR key|DECRBY key int|APPEND key value|STRLEN key
    DEL key+|UNLINK key+|EXISTS key+|TYPE key|RENAME key key|RENAMENX key key|PERSIST key|TTL key|PTTL key
    EXPIRE key s expopt*|PEXPIRE key ms expopt*|EXPIREAT key at_s expopt*|PEXPIREAT key at_ms expopt*
    EXPIRETIME key|PEXPIRETIME key
    HSET key field value|HSET key field value field value|HSETNX key field value|HGET key field|HDEL key field+
    HEXISTS key field|HGETALL key|HLEN key|HINCRBY key field int|HMGET key field+|HKEYS key|HVALS key
    LPUSH key value+|RPUSH key value+|LPOP key int?|RPOP key int?|LLEN key|LRANGE key int int|LREM key int value
    LINDEX key int|SADD key field+|SREM key field+|SISMEMBER key field|SCARD key|SMEMBERS key
    ZADD key score field|ZADD key zopt* score field|ZADD key zopt* score field score field|ZREM key field+
    ZSCORE key field|ZRANK key field rankopt?|ZCARD key|ZINCRBY key score field|ZCOUNT key bound bound
    ZRANGE key int int rangeopt*|ZRANGE key bound bound BYSCORE rangeopt*|ZRANGE key int int|ZPOPMIN key int?
    ZRANGE key bound bound BYSCORE rangeopt* LIMIT int int|ZRANGEBYSCORE key bound bound rangeopt?
    ZRANGEBYSCORE key bound bound LIMIT int int|ZREMRANGEBYSCORE key bound bound|ZREMRANGEBYRANK key int int
    KEYS pattern|SCAN 0 MATCH pattern|SCAN 0 TYPE kind|SCAN 0 scanopt|PING value?|ECHO value|FLUSHALL|FLUSHDB
    TIME|PUBLISH key value|SCRIPT EXISTS field|SCRIPT junk|EVALSHA field 0|EVAL value int key*|NOPE value*|GET|GET key key
"""
CHOICES: dict[str, list[str]] = {
    "key": ["a", "b", "c", "d"],
    "field": ["f", "g", "h", "1", "2"],
    "value": ["", "1", "10", "-7", "x", "010", str(2**63 - 1), "line\r\n\0", "3.5"],
    "int": ["0", "1", "2", "-1", "-2", "5", "x", "", "1.5", "-0", "+1", str(2**63 - 1), str(-(2**63))],
    "ms": ["1", "2", "3", "499", "1500", "60000", "60000", "0", "-1", "x", str(10**18), str(2**63 - 1)],
    "s": ["1", "2", "60", "60", "0", "-1", "x", str(10**15), str(10**17), str(-(10**17))],
    "at_ms": ["4102444800000", "4102444800001", "1", "0", "-1", "x"],
    "at_s": ["4102444800", "4102444801", "1", "0", "-1", "x"],
    "score": [
        "1",
        "1.5",
        "-2",
        "inf",
        "-inf",
        "0.1",
        "1e20",
        "123456.789",
        "1e-7",
        "3",
        "nan",
        "x",
        "1_0",
        " 1",
    ],
    "bound": ["1", "1.5", "(1", "(1.5", "-inf", "+inf", "(inf", "0", "x", "(3"],
    "span": ["EX", "px", "PX", "KEEPTTL"],
    "setopt": ["NX", "xx", "GET", "KEEPTTL", "PX", "60000", "PXAT", "4102444800000", "EXAT", "1"],
    "expopt": ["NX", "XX", "gt", "LT", "OOPS"],
    "zopt": ["NX", "XX", "GT", "lt", "CH", "INCR"],
    "rangeopt": ["REV", "WITHSCORES", "rev", "OOPS"],
    "rankopt": ["WITHSCORE", "OOPS"],
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


commands = st.one_of(
    [_shape(shape) for line in SHAPES.split("\n") for shape in line.split("|") if shape.strip()]
)

# The same commands from inside a script. `show` tells what a reply is in Lua, `number` sends numbers as numbers.
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
    "caught": "local fine, reply = pcall(redis.call, unpack(ARGV)) return {tostring(fine), type(reply), reply}",
    "rethrown": "local fine, reply = pcall(redis.call, unpack(ARGV)) if fine then return reply end error(reply)",
    "show": SHOW + "return show(redis.pcall(unpack(ARGV)))",
    "number": "local w = {} for i, v in ipairs(ARGV) do w[i] = tonumber(v) or v end return redis.call(unpack(w))",
    "declared": "#!lua\nreturn redis.call(unpack(ARGV))",
    "careless": "#!lua flags=allow-oom\nreturn redis.call(unpack(ARGV))",
    "reader": "#!lua flags=no-writes\nreturn redis.call(unpack(ARGV))",
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
UNORDERED = {"HGETALL", "HKEYS", "HVALS", "SMEMBERS", "KEYS", "SCAN"}


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


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=5, max_size=40))
def test_the_same_commands_get_the_same_replies(wire: Wire, sequence: list[list[str]]) -> None:
    wire.execute(*ROOMY)
    wire.execute("FLUSHALL")
    wire.execute("SCRIPT", "FLUSH")
    store = Store()
    for words, (now_us, expected) in zip(sequence, wire.execute_at_an_instant(sequence), strict=True):
        if now_us:
            store.now_us = now_us
        if words[0] == "CONFIG":
            store.oom = words == FULL
        elif words[0] != "DEBUG":
            assert comparable(words, store.execute(*words)) == comparable(words, expected), words
