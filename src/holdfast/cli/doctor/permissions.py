"""Which commands a user of the server needs, and which of them this user may not call.

Each command is tried in a script, on a key that is deleted at once: what is forbidden there is forbidden to Holdfast.
docs/guarantees.md lists the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from secrets import token_hex
from typing import Final, NamedTuple

from holdfast.cli.doctor.findings import DANGER, NOTE, OK, WARNING, Finding, Refused, Server


class Group(NamedTuple):
    """Commands that some part of Holdfast needs."""

    use: str
    level: str  # if one is missing
    commands: tuple[str, ...]
    tried: dict[str, tuple[str, ...]]  # by command: its arguments, with the key in place of KEY


_KEY: Final = "KEY"
BASE: Final = Group(
    "locks",
    DANGER,
    ("evalsha", "eval"),
    {
        "get": (_KEY,),
        "set": (_KEY, "x", "PX", "1000"),
        "del": (_KEY,),
        "exists": (_KEY,),
        "pexpire": (_KEY, "1000"),
        "pttl": (_KEY,),
        "time": (),
        "zadd": (_KEY, "1", "x"),
        "zrange": (_KEY, "0", "0"),
        "zrem": (_KEY, "x"),
        "zscore": (_KEY, "x"),
        "hget": (_KEY, "x"),
        "hset": (_KEY, "x", "x"),
        "hdel": (_KEY, "x"),
    },
)
POOLS: Final = Group("semaphores and readers-writer locks", WARNING, (), {"zcard": (_KEY,), "zcount": (_KEY, "0", "1")})
CACHE: Final = Group("caches", WARNING, (), {"hmget": (_KEY, "x"), "hgetall": (_KEY,), "hlen": (_KEY,)})
OPERATE: Final = Group(
    "holdfast ls, break and history",
    NOTE,
    ("scan",),
    {"lpush": (_KEY, "x"), "ltrim": (_KEY, "0", "0"), "lrange": (_KEY, "0", "0")},
)
_MOST_NODES: Final = 1000  # of a cluster, for which a key is sought by chance
NOTIFY: Final = ("subscribe", "publish", "pubsub|numsub")
NOTIFY_SHARDED: Final = ("ssubscribe", "spublish", "pubsub|shardnumsub", "cluster|slots", "asking")
TRACK: Final = ("client|tracking", "client|caching")

# Try each command, and delete the key after it: it would be of the wrong type for the next one.
_TRY: Final = """
local refused = {}
local place = 1
while place <= #ARGV do
  local words = {}
  for number = 1, tonumber(ARGV[place]) do
    local word = ARGV[place + number]
    words[number] = word == 'KEY' and KEYS[1] or word
  end
  place = place + tonumber(ARGV[place]) + 1
  local reply = redis.pcall(unpack(words))
  local why = type(reply) == 'table' and reply.err or ''
  if string.find(why, 'NOPERM', 1, true) or string.find(why, 'ACL failure', 1, true) then
    refused[#refused + 1] = words[1] .. ' ' .. why
  end
  redis.pcall('DEL', KEYS[1])
end
return refused
"""


def needed(prefix: str, *, cluster: bool, operate: bool) -> list[str]:
    """The rules of the least-privilege user."""
    groups = (BASE, POOLS, CACHE, OPERATE) if operate else (BASE, POOLS, CACHE)
    commands = [command for group in groups for command in (*group.commands, *group.tried)]
    commands += [*(NOTIFY_SHARDED if cluster else NOTIFY), *TRACK]
    return [f"~{prefix}*", f"&{prefix}*holdfast:bell:*", *(f"+{command}" for command in commands)]


def acl_line(user: str, rules: Iterable[str]) -> str:
    return f"ACL SETUSER {user} {' '.join(rules)}"


def permissions(server: Server, prefix: str, *, cluster: bool, may_subscribe: bool) -> Iterable[Finding]:
    """What this user may not do, with the line that allows it."""
    user = _user(server)
    try:
        server.ask("EVAL", "return 1", 0)
    except Refused as refused:
        missing = [f"+{command}" for command in BASE.commands]
        why = "scripts are forbidden" if refused.is_forbidden else f"scripts do not work ({refused})"
        yield Finding("permissions", DANGER, f"{why}, and every lock is a script", acl_line(user, missing))
        return
    missing_any = False
    for group in (BASE, POOLS, CACHE, OPERATE):
        missing = list(_missing(server, group, prefix))
        if missing == ["~"]:
            yield Finding(
                "permissions",
                WARNING,
                f"user {user!r} may not use keys that start with {prefix!r}",
                "say with which prefix your names start: --prefix, or add: " + acl_line(user, [f"~{prefix}*"]),
            )
            return
        if missing:
            missing_any = True
            line = acl_line(user, [f"+{command}" for command in missing])
            yield Finding("permissions", group.level, f"{group.use}: {', '.join(missing)} is forbidden", line)
    yield from _hints(server, user, prefix, cluster=cluster, may_subscribe=may_subscribe)
    if not missing_any:
        yield Finding("permissions", OK, f"user {user!r} may do all that locks need")


def _missing(server: Server, group: Group, prefix: str) -> Iterable[str]:
    key = _own_key(server, f"{prefix}holdfast:doctor:")
    words: list[str | int] = []
    for command, arguments in group.tried.items():
        words += [len(arguments) + 1, command, *arguments]
    try:
        refused = server.ask("EVAL", _TRY, 1, key, *words)
    except Refused:
        return ["~"]  # the key itself is refused, before the script runs
    texts = [text.decode(errors="replace") for text in refused]
    if texts and all(" key" in text for text in texts):
        return ["~"]
    missing = [text.split(" ")[0] for text in texts]
    if "scan" in group.commands and not _may(server, "SCAN", 0, "COUNT", 1):
        missing.insert(0, "scan")
    return missing


def _hints(server: Server, user: str, prefix: str, *, cluster: bool, may_subscribe: bool) -> Iterable[Finding]:
    """What Holdfast can do without, at a price."""
    channel = _own_key(server, f"{prefix}holdfast:bell:")
    if cluster:
        tries = {"spublish": ("SPUBLISH", channel, "x"), "pubsub|shardnumsub": ("PUBSUB", "SHARDNUMSUB", channel)}
    else:
        tries = {"publish": ("PUBLISH", channel, "x"), "pubsub|numsub": ("PUBSUB", "NUMSUB", channel)}
    missing = [command for command, words in tries.items() if not _may(server, *words)]
    if not may_subscribe:
        missing.insert(0, "ssubscribe" if cluster else "subscribe")
    if missing:
        rules = [f"&{prefix}*holdfast:bell:*", *(f"+{command}" for command in (NOTIFY_SHARDED if cluster else NOTIFY))]
        message = f"{', '.join(missing)} is forbidden, so waiters poll or are found late"
        yield Finding("pub/sub", WARNING, message, acl_line(user, rules))
    else:
        yield Finding("pub/sub", OK, "waiters can be notified")
    if _may(server, "CLIENT", "TRACKING", "OFF") and _may(server, "CLIENT", "CACHING", "YES"):
        yield Finding("tracking", OK, "the server can report that a lock was taken away")
    else:
        message = "client tracking is forbidden: the loss of a lock is found at the next renewal only"
        yield Finding("tracking", NOTE, message, acl_line(user, [f"+{command}" for command in TRACK]))


def _own_key(server: Server, start: str) -> str:
    """A new key or channel that this server serves itself: of a cluster, a node serves some slots only."""
    for _ in range(_MOST_NODES):
        key = f"{start}{token_hex(8)}"
        try:
            server.ask("EXISTS", key)
        except Refused as refused:
            if str(refused).startswith("MOVED"):
                continue
        return key
    return key


def _may(server: Server, *words: str | int) -> bool:
    try:
        server.ask(*words)
    except Refused as refused:
        return not refused.is_forbidden and "unknown" not in str(refused)
    return True


def _user(server: Server) -> str:
    try:
        name: bytes = server.ask("ACL", "WHOAMI")
        return name.decode(errors="replace")
    except Refused:
        return "USER"
