"""Which commands a user of the server needs, and which of them this user may not call.

Each command is tried in a script, on a key that is deleted at once: what is forbidden there is forbidden to Holdfast.
Each server has its own ACL, so all servers are asked. docs/guarantees.md lists the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from secrets import token_hex
from typing import Final, NamedTuple

from holdfast.cli.doctor.findings import DANGER, NOTE, OK, WARNING, Finding, Refused, Server, acl_line, own_key
from holdfast.names import slot_of
from holdfast.url import Location


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
DOCTOR: Final = ("info", "config|get", "type", "acl|whoami")  # holdfast doctor, beside what operators need
CONFIRM: Final = ("wait",)  # grants that replicas confirm (``replicas=``)
FOLLOW: Final = ("role",)  # a primary behind Sentinels
SENTINELS: Final = ("sentinel|get-master-addr-by-name", "sentinel|masters")  # on the Sentinels themselves

_SCRIPTS: Final[dict[str, tuple[str | int, ...]]] = {
    "evalsha": ("EVALSHA", "0" * 40, 0),  # if it is allowed, the server does not know this script
    "eval": ("EVAL", "return 1", 0),
}
# Try each command, and delete the key after it: it would be of the wrong type for the next one. The key is an argument
# too: a replica of a cluster refuses scripts that declare keys. Redis before 7.2 has a text of its own for what an ACL
# forbids to a script.
_TRY: Final = """
local refused = {}
local key = ARGV[1]
local place = 2
while place <= #ARGV do
  local words = {}
  for number = 1, tonumber(ARGV[place]) do
    local word = ARGV[place + number]
    words[number] = word == 'KEY' and key or word
  end
  place = place + tonumber(ARGV[place]) + 1
  local reply = redis.pcall(unpack(words))
  local why = type(reply) == 'table' and reply.err or ''
  for _, sign in ipairs({'NOPERM', 'ACL failure', 'The user executing the script'}) do
    if string.find(why, sign, 1, true) then
      refused[#refused + 1] = words[1] .. ' ' .. why
      break
    end
  end
  redis.pcall('DEL', key)
end
return refused
"""


class Use(NamedTuple):
    """How a URL says that its servers are used."""

    cluster: bool
    confirms: bool  # replicas confirm grants
    sentinel: bool = False

    @classmethod
    def of(cls, location: Location) -> Use:
        return cls(location.engine == "cluster", bool(location.options.get("replicas")), location.engine == "sentinel")

    @property
    def commands(self) -> list[str]:
        """What it needs beside all others."""
        return [*(CONFIRM if self.confirms else ()), *(FOLLOW if self.sentinel else ())]


def needed(prefix: str, *, cluster: bool, operate: bool) -> list[str]:
    """The rules of the least-privilege user."""
    groups = (BASE, POOLS, CACHE, OPERATE) if operate else (BASE, POOLS, CACHE)
    commands = [command for group in groups for command in (*group.commands, *group.tried)]
    commands += [*(NOTIFY_SHARDED if cluster else NOTIFY), *TRACK]
    return [f"~{prefix}*", f"&{prefix}*holdfast:bell:*", *_granted(commands)]


def rules_of_program(prefix: str, use: Use) -> list[str]:
    return [*needed(prefix, cluster=use.cluster, operate=False), *_granted(use.commands)]


def rules_of_operator(prefix: str, use: Use) -> list[str]:
    """With them, holdfast doctor can make each of its checks."""
    return [*needed(prefix, cluster=use.cluster, operate=True), *_granted((*DOCTOR, *use.commands))]


def rules_on_sentinels() -> list[str]:
    return _granted(SENTINELS)


def permissions(server: Server, use: Use, subscribe: Callable[[str], bool] | None) -> Iterable[Finding]:
    """What this user may not do, with the line that allows it.

    ``subscribe`` says whether a waiter for this key can be notified. On a replica, which serves no waiter, it is None.
    """
    no_scripts = [command for command, words in _SCRIPTS.items() if not server.may(*words)]
    if no_scripts:
        yield _forbidden(server, DANGER, "every lock is a script", no_scripts)
    if "eval" in no_scripts:
        return
    key, declared = _own_key(server) if subscribe is not None else (_new_key(server), False)
    complete = not no_scripts
    for group in (BASE, POOLS, CACHE, OPERATE):
        missing = _missing(server, group, key, declared=declared)
        if missing is None:
            yield Finding("permissions", WARNING, *server.no_keys())
            return
        if missing:
            complete = False
            yield _forbidden(server, group.level, group.use, missing)
    for finding in _plain(server, use):
        complete = False
        yield finding
    if subscribe is not None:
        yield from _hints(server, cluster=use.cluster, may_subscribe=subscribe(key))
    if complete:
        yield Finding("permissions", OK, f"user {server.user!r} may do all that locks need")


def _forbidden(server: Server, level: str, use: str, commands: list[str]) -> Finding:
    message = f"{use}: {', '.join(commands)} is forbidden"
    return Finding("permissions", level, message, acl_line(server.user, _granted(commands)))


def _missing(server: Server, group: Group, key: str, *, declared: bool) -> list[str] | None:
    """The commands of the group that are forbidden; None if this user may not use the key.

    ``declared``: the script declares the key, as those of locks do. Another node of a cluster would refuse it then.
    """
    words: list[str | int] = [*([1, key] if declared else [0]), key]
    for command, arguments in group.tried.items():
        words += [len(arguments) + 1, command, *arguments]
    try:
        refused = server.ask("EVAL", _TRY, *words)
    except Refused as error:
        if error.is_about_keys:
            return None
        raise
    texts = [text.decode(errors="replace") for text in refused]
    if texts and all(" key" in text for text in texts):
        return None
    missing = [text.split(" ")[0] for text in texts]
    if "scan" in group.commands and not server.may("SCAN", 0, "COUNT", 1):
        missing.insert(0, "scan")
    return missing


def _plain(server: Server, use: Use) -> Iterable[Finding]:
    """Commands that are sent as they are, outside of scripts."""
    if use.confirms and not server.may("WAIT", 0, 1):
        yield _forbidden(server, DANGER, "grants that replicas confirm", list(CONFIRM))
    tries = {"cluster|slots": ("CLUSTER", "SLOTS"), "asking": ("ASKING",)} if use.cluster else {}
    missing = [command for command, words in tries.items() if not server.may(*words)]
    if missing:
        yield _forbidden(server, WARNING, "locks while slots move to another node", missing)


def _hints(server: Server, *, cluster: bool, may_subscribe: bool) -> Iterable[Finding]:
    """What Holdfast can do without, at a price."""
    prefix, user = server.prefix, server.user
    channel = f"{prefix}holdfast:bell:{token_hex(8)}"
    if cluster:
        tries = {"spublish": ("SPUBLISH", channel, "x"), "pubsub|shardnumsub": ("PUBSUB", "SHARDNUMSUB", channel)}
    else:
        tries = {"publish": ("PUBLISH", channel, "x"), "pubsub|numsub": ("PUBSUB", "NUMSUB", channel)}
    missing = [command for command, words in tries.items() if not server.may(*words)]
    if not may_subscribe:
        missing.insert(0, "ssubscribe" if cluster else "subscribe")
    if missing:
        rules = [f"&{prefix}*holdfast:bell:*", *_granted(NOTIFY_SHARDED if cluster else NOTIFY)]
        message = f"{', '.join(missing)} is forbidden, so waiters poll or are found late"
        yield Finding("pub/sub", WARNING, message, acl_line(user, rules))
    else:
        yield Finding("pub/sub", OK, "waiters can be notified")
    if server.may("CLIENT", "TRACKING", "OFF") and server.may("CLIENT", "CACHING", "YES"):
        yield Finding("tracking", OK, "the server can report that a lock was taken away")
    else:
        message = "client tracking is forbidden: the loss of a lock is found at the next renewal only"
        yield Finding("tracking", NOTE, message, acl_line(user, _granted(TRACK)))


def _own_key(server: Server) -> tuple[str, bool]:
    """A new key, and whether this server serves it: a node of a cluster serves some slots only."""
    for _ in range(_MOST_NODES):
        key = _new_key(server)
        if server.serves(key):
            return key, True
        if slot_of(key) == slot_of(_new_key(server)):
            break  # the prefix has a hash tag, so all names are in this slot, on another node
    return key, False


def _new_key(server: Server) -> str:
    return own_key(server.prefix)


def _granted(commands: Iterable[str]) -> list[str]:
    return [f"+{command}" for command in commands]
