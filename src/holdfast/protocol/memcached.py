"""A lock on memcached: an item that only its holder deletes or prolongs.

Invariant. ``add`` stores only a missing item, so the client whose token is in it holds the lock. A client deletes
(``md``) or rewrites (``cas``) the item only with the cas number at which it read its own token there. So a late holder
cannot change the item of a later holder.

Atomic: each command. A step is a *program*, as on etcd: a generator that yields commands, is sent their replies, and
returns what the script of that name would.

Late requests. Every request that writes names the end of its item as a time of the server's clock. So an ``add`` that
arrives after its sender has given up leaves an item at most until the sender's own lease would have ended; after that
it stores nothing. A late ``cas`` or ``md`` finds another cas number, unless it is its sender's own item still.

What it does not give. There is no fence: the item is all that memcached keeps. There is no queue: a waiter asks again
after a pause with jitter. A full memcached evicts items, locks among them; the holder learns of it at its next renewal,
and a second holder may start before that.

Clocks. memcached reads its clock once a second and counts whole seconds. A server that was stopped for five seconds
answers the requests that have waited before it reads the clock again: an expiry that counts from "now" would be five
seconds too early, and the item would be gone at once. So ``Items`` keeps a reading of the server's clock, and an item
ends at a time that is computed from it. A reading is current because its request (``clock``) uses two new
connections, one after the other: one thread of memcached accepts connections and reads the clock, in turn, so it has
read the clock between the two. The reading is at most ``_BEHIND`` seconds behind the time of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from hashlib import sha256
from math import ceil
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.errors import Unsupported, rounded
from holdfast.options import drift
from holdfast.protocol.effects import Command, Step, StepFailed, ask_server
from holdfast.protocol.replies import DONE, GONE, TAKEN

Program: TypeAlias = Generator[Command, Any, Any]

LONGEST: Final = 60 * 60 * 24 * 30  # seconds; an exptime that is greater is a time since 1970, as all of ours are
_BEHIND: Final = 2.01  # seconds: up to one since the clock was read, one because it shows whole seconds; and rounding
_READ_AGAIN: Final = 100.0  # seconds after which the drift makes a reading useless: an item may outlive its ttl by 1 s
_LONGEST_KEY: Final = 250
_STORED: Final = b"STORED"
_TRIES: Final = 3
_NO_CAS: Final = 2**64 - 1


def key_of(name: str) -> str:
    """The key of a lock: its name, if memcached allows that as a key; else a digest of it."""
    if name.isascii() and name.isprintable() and " " not in name and len(name) <= _LONGEST_KEY:
        return name
    return f"holdfast:hf1:{sha256(name.encode()).hexdigest()}"


class Reading(NamedTuple):
    """The server's clock at one moment."""

    asked_at: float  # on our clock
    time: int  # seconds since 1970, on the server's; at most _BEHIND seconds less than its true time at ``asked_at``

    def latest(self, now: float) -> float:
        """A time that the server's clock does not show before ``now``."""
        age = now - self.asked_at
        return self.time + _BEHIND + age + drift(age)

    def earliest(self, now: float) -> float:
        """A time that the server's clock has passed by ``now``."""
        age = now - self.asked_at
        return self.time + age - drift(age)


class Items:
    """What a client knows about the server: its clock, and the ends of this client's items, by token."""

    def __init__(self) -> None:
        self.reading: Reading | None = None
        # The latest end that was asked for, on the server's clock. It is noted before the request: a renewal that
        # overlaps with an extension must not make the item shorter.
        self.ends: dict[str, int] = {}
        # The ends of items whose ``add`` was not answered, and may still arrive.
        self.late_adds: dict[str, int] = {}

    def doubt_clock(self) -> None:
        """The server may have been replaced or suspended: read its clock again before the next write."""
        self.reading = None

    def forget(self) -> None:
        self.doubt_clock()
        self.ends.clear()
        self.late_adds.clear()


def end_of(items: Items, token: str, ttl: float, now: float) -> Generator[Command, Any, int]:
    """When an item ends that is to last for this ttl from now on: a time of the server's clock, since 1970."""
    if ttl >= LONGEST:
        what = f"a ttl of {rounded(ttl)} s on memcached"
        raise StepFailed(Unsupported(what, "give less than 30 days"), sent=False, retry=False)
    reading = items.reading
    if reading is None:
        reading = items.reading = Reading(now, (yield from ask_server(Command(("clock",)))))
    elif now - reading.asked_at > _READ_AGAIN:
        time = yield from ask_server(Command(("clock", "again")))
        # A server that accepts no more connections can still renew: an old reading only lets an item last longer.
        reading = items.reading = reading if time is None else Reading(now, time)
    items.ends[token] = end = max(ceil(reading.latest(now) + ttl), items.ends.get(token, 0))
    return end


def acquire(items: Items, step: Step, now: float) -> Program:
    key, token, ttl_ms = key_of(step.keys[0]), step.args[0], int(step.args[1])
    end = yield from end_of(items, token, ttl_ms / 1000, now)
    for _ in range(_TRIES):
        if (yield from _add(items, key, end, token)) == _STORED:
            return b"1"
        found = yield from ask_server(Command(("gets", key)))
        if found is None:
            continue  # it was freed just now
        if found[0] != token.encode():
            items.ends.pop(token, None)
            return [0, -1, 0, 0, found[0]]
        # An earlier try, whose answer was lost, has stored it: make its ttl full.
        if (yield from ask_server(Command(("cas", key, 0, end, found[1], token)))) == _STORED:
            return b"1"
    return [0, -1, 0, 0, b""]


def _add(items: Items, key: str, end: int, token: str) -> Generator[Command, Any, bytes]:
    earlier = items.late_adds.get(token)
    items.late_adds[token] = end
    reply: bytes = yield from ask_server(Command(("add", key, 0, end, token)))
    if earlier is None:
        items.late_adds.pop(token, None)
    return reply


def release(items: Items, step: Step, now: float) -> Program:
    key, token = key_of(step.keys[0]), step.args[0]
    items.ends.pop(token, None)
    while True:
        found = yield from ask_server(Command(("gets", key)))
        if found is None:
            return GONE
        if found[0] != token.encode():
            return TAKEN
        deleted = yield from ask_server(Command(("md", key, f"C{found[1]}")))
        if deleted != b"EX":  # else it was written since, perhaps by our own keeper: look again
            return DONE if deleted == b"HD" else GONE


def abandon(items: Items, step: Step, now: float) -> Program:
    """Remove the item. Nothing can stop a late ``add``, so the keeper repeats this until it would store nothing.

    Where a tombstone is wanted, it ends with a write that changes nothing, because no item has that cas number. A full
    server refuses it. A client whose calls fail learns so that the server is back: see ``let_keeper_ask``.
    """
    freed = yield from release(items, step, now)
    token = step.args[0]
    end = items.late_adds.get(token)
    if end is not None and (items.reading is None or items.reading.earliest(now) < end):
        return [freed, 0]
    if int(step.args[1]):
        yield from ask_server(Command(("cas", key_of(step.keys[0]), 0, -1, _NO_CAS, token)))
    items.late_adds.pop(token, None)
    return [freed, 1]


def renew(items: Items, step: Step, now: float) -> Program:
    """Let the item last for this ttl from now on, and see that it is ours. It never gets shorter."""
    key, token, ttl = key_of(step.keys[0]), step.args[0], int(step.args[1]) / 1000
    while True:
        found = yield from ask_server(Command(("gets", key)))
        if found is None:
            return GONE
        if found[0] != token.encode():
            return TAKEN
        end = yield from end_of(items, token, ttl, now)
        if (yield from ask_server(Command(("cas", key, 0, end, found[1], token)))) == _STORED:
            return DONE
        # It was written or deleted since, perhaps by another step of ours: look again.


def exists(items: Items, command: Command, now: float) -> Program:
    found = yield from ask_server(Command(("gets", key_of(str(command.args[1])))))
    return int(found is not None)


_PROGRAMS: Final[dict[str, Callable[[Items, Any, float], Program]]] = {
    "acquire": acquire,
    "release": release,
    "abandon": abandon,
    "renew": renew,
    "EXISTS": exists,
}


_COMMANDS: Final = frozenset({"add", "cas", "gets", "md", "stats"})


def program_of(items: Items, op: Step | Command, now: float) -> Program:
    """The program of one step. A plain memcached command, of a recipe or the doctor, is a program of one request."""
    name = op.script if isinstance(op, Step) else str(op.args[0])
    if name in _PROGRAMS:
        return _PROGRAMS[name](items, op, now)
    if name in _COMMANDS and isinstance(op, Command):
        return _plain(op)
    raise StepFailed(Unsupported(f"{name} on memcached", "use redis:// or etcd://"), sent=False, retry=False)


def _plain(command: Command) -> Program:
    return (yield from ask_server(command))
