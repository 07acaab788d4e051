"""Inspection: the locks of a server, their holders and their waiters.

Invariant. Inspection changes nothing on the server, and each of its steps does bounded work there: a part of the keys
(SCAN, never KEYS), or one page of the holders and waiters of a lock. Each page is true at one moment, on the server;
two pages, or two locks, are seen one after the other.

Names are found by their side keys (``order:42:hf1:fence:...``), because a main key can be any key of the server. So
a lock that only clients of another library use is not listed, unless a Holdfast client waits for it; ``inspect`` of its
name shows it. The fence of a lock is remembered after its release: such a name is found, and has no holder.

Atomic: the inspect step, which writes nothing, and each part of a scan. A name that exists during the whole scan is
found at least once; this module shows it once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.holder import Broken, LockInfo
from holdfast.names import WIRE, Keys, keys_of
from holdfast.options import LockOptions
from holdfast.protocol.effects import SCANNED, Command, Effects, Step, StepFailed, call_each, clock, scan, wait
from holdfast.protocol.inspection.history import read_entry
from holdfast.protocol.inspection.reading import PAGE, Seen, keys_read, seen_in
from holdfast.protocol.retry import Tries, outage, until_answered

BATCH: Final = 50  # locks that are read in one go
_MARK: Final = f":{WIRE}:"
_NOT_IN_USE: Final = ("gone:", "guard", "cache:value", "cache:failure", "cache:waiters", "history")


def inspect_step(keys: Keys, first: int = 0) -> Step:
    return Step("inspect_lock", keys_read(keys), (str(first), str(PAGE)))


def look(keys: Keys, options: LockOptions, limit: int = PAGE) -> Effects[list[Seen]]:
    """What a name is in use as, with at most that many holders and waiters."""
    pages = seen_in(keys, (yield from ask(inspect_step(keys), keys, options)))
    first = PAGE
    while first < limit and any(max(seen.holder_count, seen.waiter_count) > first for seen in pages):
        more = seen_in(keys, (yield from ask(inspect_step(keys, first), keys, options)))
        of_kind = {seen.kind: seen for seen in more}
        pages = [seen.joined(of_kind.get(seen.kind, seen)) for seen in pages]
        first += PAGE
    return pages


def inspect(keys: Keys, options: LockOptions, limit: int) -> Effects[LockInfo | None]:
    """What is known of one lock; None if it is free and no client waits for it."""
    seen = yield from look(keys, options, limit)
    return seen[0].info() if seen else None


def history(keys: Keys, options: LockOptions) -> Effects[list[Broken]]:
    """How a lock was broken, the latest first."""
    step = Command(("LRANGE", f"{keys.head}history{keys.tail}", 0, -1))
    entries = yield from ask(step, keys, options)
    return [broken for entry in entries if (broken := read_entry(entry, keys.name, keys.key)) is not None]


def ask(step: Step | Command, keys: Keys, options: LockOptions) -> Effects[Any]:
    """The reply to a step that can be sent again."""
    try:
        reply, *_ = yield from until_answered(lambda: step, options, jitter=keys.key)
    except StepFailed as failed:
        raise outage(failed, f"lock {keys.key!r}", options.timeout) from failed.__cause__
    return reply


class BaseLocks:
    """The locks of a server whose names match a pattern, as an iterator."""

    def __init__(self, driver: Any, namespace: str, pattern: str, options: LockOptions) -> None:
        self._driver = driver
        self._namespace = namespace
        self._asked = pattern
        self._pattern = pattern_of(f"{escaped(namespace)}{pattern}")
        self._options = options
        self._cursor: str | None = ""  # None: the scan is over
        self._known: set[str] = set()  # names that were found
        self._names: deque[str] = deque()  # to be read
        self._found: deque[LockInfo] = deque()  # to be returned
        self._scanned = 0

    @property
    def scanned(self) -> int:
        """How many keys of the server were looked at so far."""
        return self._scanned

    def _next(self) -> Effects[LockInfo | None]:
        """The next lock; None after the last one."""
        while not self._found:
            if len(self._names) >= BATCH or (self._names and self._cursor is None):
                yield from self._read()
            elif self._cursor is not None:
                yield from self._scan(self._cursor)
            else:
                return None
        return self._found.popleft()

    def _scan(self, cursor: str) -> Effects[None]:
        """Look at the next part of the keys. After a failover a part may be missing: the scan goes on elsewhere."""
        now = yield from clock()
        tries = Tries(self._options, now, now + self._options.timeout)
        while True:
            try:
                cursor, keys = yield from scan(cursor, self._pattern, tries.timeout(now))
                break
            except StepFailed as failed:
                now = yield from clock()
                pause = tries.pause_after(failed, now)
                if pause is None:
                    raise outage(failed, f"the list of locks like {self._asked!r}") from failed.__cause__
                now = yield from wait(None, now + pause)
        self._cursor = cursor or None
        self._scanned += SCANNED
        for key in keys:
            name = _name_in(key, self._namespace)
            if name is not None and name not in self._known:
                self._known.add(name)
                self._names.append(name)

    def _read(self) -> Effects[None]:
        batch = min(BATCH, len(self._names))
        locks = [keys_of(self._names.popleft(), self._namespace) for _ in range(batch)]
        steps = [inspect_step(keys) for keys in locks]
        replies = yield from call_each(steps, self._options.call_timeout)
        for keys, step, reply in zip(locks, steps, replies, strict=True):
            found = (yield from ask(step, keys, self._options)) if isinstance(reply, StepFailed) else reply
            self._found += [seen.info() for seen in seen_in(keys, found)]


def _name_in(key: bytes, namespace: str) -> str | None:
    """The name of the lock whose side key that is; None if the key shows no use of the lock, or is not ours."""
    found = side_key(key, namespace)
    return found[0] if found is not None and shows_use(found[1]) else None


def side_key(key: bytes, namespace: str = "") -> tuple[str, str] | None:
    """The name of the lock whose side key that is, and what follows the mark; None if the key is not ours."""
    try:
        main, _, part = key.decode().partition(_MARK)
        name = main.removeprefix(namespace)
        keys = keys_of(name, namespace)
    except (UnicodeDecodeError, HoldfastError):
        return None
    return (name, part) if part.endswith(keys.tail) else None


def shows_use(part: str) -> bool:
    """Whether a side key of this purpose may exist only because the lock is in use, or was a moment ago."""
    return not part.startswith(_NOT_IN_USE)


def pattern_of(names: str) -> str:
    """The pattern of the side keys of names that match a pattern."""
    return f"{names}{_MARK}*"


def escaped(namespace: str) -> str:
    """The namespace as a pattern that matches only itself."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in namespace)
