"""A lock on memcached: an item that only its holder deletes or prolongs.

Invariant. ``add`` stores only a missing item, so the client whose token is in it holds the lock. A client deletes
(``md``) or rewrites (``cas``) the item only with the cas number at which it read its own token there. So a late holder
cannot change the item of a later holder.

Atomic: each command. A step is a *program*, as on etcd: a generator that yields commands, is sent their replies, and
returns what the script of that name would.

What it does not give. There is no fence: the item is all that memcached keeps. There is no queue: a waiter asks again
after a pause with jitter. A full memcached evicts items, locks among them; the holder learns of it at its next renewal,
and a second holder may start before that. An attempt that was given up may still be stored when its request arrives
late; its item then stays until it expires.

Clocks. memcached counts whole seconds, and an item expires at a tick: it may live almost a second less than its
exptime. So the exptime is the ttl, rounded up, and one second more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from hashlib import sha256
from math import ceil
from typing import Any, Final, TypeAlias

from holdfast.errors import Unsupported, rounded
from holdfast.protocol.effects import Command, Step, StepFailed, ask_server
from holdfast.protocol.replies import DONE, GONE, TAKEN

Program: TypeAlias = Generator[Command, Any, Any]

LONGEST: Final = 60 * 60 * 24 * 30  # seconds: a greater exptime is a time since 1970
_LONGEST_KEY: Final = 250
_STORED: Final = b"STORED"
_TRIES: Final = 3


def key_of(name: str) -> str:
    """The key of a lock: its name, if memcached allows that as a key; else a digest of it."""
    if name.isascii() and name.isprintable() and " " not in name and len(name) <= _LONGEST_KEY:
        return name
    return f"holdfast:hf1:{sha256(name.encode()).hexdigest()}"


def exptime(ttl_ms: int) -> int:
    """The seconds after which an item for this ttl expires."""
    seconds = ceil(ttl_ms / 1000) + 1
    if seconds > LONGEST:
        what = f"a ttl of {rounded(ttl_ms / 1000)} s on memcached"
        raise StepFailed(Unsupported(what, "give less than 30 days"), sent=False, retry=False)
    return seconds


class Items:
    """Until when the server keeps the items of this client, by token, as far as our clock can tell."""

    def __init__(self) -> None:
        self.last_until: dict[str, float] = {}

    def note(self, token: str, now: float, seconds: int) -> None:
        self.last_until[token] = now + seconds - 1

    def forget(self) -> None:
        self.last_until.clear()


def acquire(items: Items, step: Step, now: float) -> Program:
    key, token, ttl_ms = key_of(step.keys[0]), step.args[0], int(step.args[1])
    for _ in range(_TRIES):
        if (yield from ask_server(Command(("add", key, 0, exptime(ttl_ms), token)))) == _STORED:
            items.note(token, now, exptime(ttl_ms))
            return b"1"
        found = yield from ask_server(Command(("gets", key)))
        if found is None:
            continue  # it was freed just now
        if found[0] != token.encode():
            return [0, -1, 0, 0, found[0]]
        # An earlier try, whose answer was lost, has stored it: make its ttl full.
        if (yield from ask_server(Command(("cas", key, 0, exptime(ttl_ms), found[1], token)))) == _STORED:
            items.note(token, now, exptime(ttl_ms))
            return b"1"
    return [0, -1, 0, 0, b""]


def release(items: Items, step: Step, now: float) -> Program:
    key, token = key_of(step.keys[0]), step.args[0]
    items.last_until.pop(token, None)
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
    freed = yield from release(items, step, now)
    return [freed, 1]


def renew(items: Items, step: Step, now: float) -> Program:
    """Let the item last for this ttl from now on, and see that it is ours. It never gets shorter."""
    key, token, ttl_ms = key_of(step.keys[0]), step.args[0], int(step.args[1])
    while True:
        found = yield from ask_server(Command(("gets", key)))
        if found is None:
            return GONE
        if found[0] != token.encode():
            return TAKEN
        if now + ttl_ms / 1000 <= items.last_until.get(token, 0.0):
            return DONE
        stored = yield from ask_server(Command(("cas", key, 0, exptime(ttl_ms), found[1], token)))
        if stored == _STORED:
            items.note(token, now, exptime(ttl_ms))
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


_COMMANDS: Final = frozenset({"add", "cas", "gets", "md"})


def program_of(items: Items, op: Step | Command, now: float) -> Program:
    """The program of one step. A plain memcached command, as recipes send it, is a program of one request."""
    name = op.script if isinstance(op, Step) else str(op.args[0])
    if name in _PROGRAMS:
        return _PROGRAMS[name](items, op, now)
    if name in _COMMANDS and isinstance(op, Command):
        return _plain(op)
    raise StepFailed(Unsupported(f"{name} on memcached", "use redis:// or etcd://"), sent=False, retry=False)


def _plain(command: Command) -> Program:
    return (yield from ask_server(command))
