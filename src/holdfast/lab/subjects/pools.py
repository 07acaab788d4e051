"""Permit pools: semaphores and readers-writer locks.

No single key names the holder of a pool. So the search asks ``PoolView`` instead: whether a waiter could get a permit,
and whether a failed attempt has left a permit behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any, Final
from weakref import WeakValueDictionary

from holdfast.lab.search.state import Config
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, QuietLease, fenced_config
from holdfast.names import Keys, keys_of
from holdfast.protocol.kinds.pool import ALL, ANY, pool_keys
from holdfast.protocol.kinds.rwlock import BaseReader, BaseWriteLease, BaseWriter, HoldsByCaller
from holdfast.protocol.kinds.semaphore import BasePermit, BaseSemaphore

_CLIENTS: Final = "ABCDEFGH"
WRITER: Final = -2.0


class PoolView:
    in_turn = True
    has_owner = False

    def __init__(self, keys: Keys, modes: Mapping[str, str]) -> None:
        self._modes = dict(modes)  # by the name of the client
        self._holders = pool_keys(keys)[0].encode()

    def inside(self, store: Any) -> dict[bytes, float]:
        """The holders, and the slot of each, as in lua/include/pool.lua."""
        entries: dict[bytes, float] = store.values.get(self._holders, {})
        slots = {token: entries.get(b"slot " + token) for token, end in entries.items() if end > store.now_us}
        return {token: slot for token, slot in slots.items() if slot is not None}

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether that client could get a permit at its turn; without a client, whether all permits are free."""
        inside = self.inside(store)
        mode = ALL if name is None else self._modes[name]
        if not inside or mode == ALL:
            return not inside
        alone = WRITER in inside.values()
        return not alone and (mode == ANY or len(inside) < int(mode[1:]))

    def is_blocked_by(self, store: Any, name: str) -> bool:
        return any(token.startswith(f"{name}-".encode()) for token in self.inside(store))


class QuietPermit(BasePermit, QuietLease):
    __slots__ = ()


class QuietWriteLease(BaseWriteLease, QuietLease):
    __slots__ = ()


def semaphore_config(permits: int = 2, **bounds: Any) -> Config:
    """A semaphore; each client wants a permit."""
    keys, options = keys_of(NAME), replace(LAB_OPTIONS, cohort=0)
    config = _pool_config(dict.fromkeys(_CLIENTS, f"n{permits}"), bounds)
    return config._replace(make_lock=lambda driver: BaseSemaphore(driver, keys, options, QuietPermit, permits))


def rwlock_config(modes: str = "RWR", **bounds: Any) -> Config:
    """A readers-writer lock. ``modes`` says for each client: a reader (R) or a writer (W). A newcomer is a writer."""
    keys, options = keys_of(NAME), replace(LAB_OPTIONS, cohort=0)
    of_client = {name: ANY if mode == "R" else ALL for name, mode in zip(_CLIENTS, cycle(modes), strict=False)}

    def make_lock(driver: Any) -> Any:
        insiders: HoldsByCaller = WeakValueDictionary()
        if of_client.get(driver.name) == ANY:
            return BaseReader(driver, keys, options, QuietLease, insiders)
        return BaseWriter(driver, keys, options, QuietWriteLease, insiders)

    return _pool_config(of_client, {"clients": len(modes), **bounds})._replace(make_lock=make_lock)


def _pool_config(modes: dict[str, str], bounds: dict[str, Any]) -> Config:
    keys = keys_of(NAME)
    return fenced_config(key=pool_keys(keys)[0], view=PoolView(keys, modes), **bounds)
