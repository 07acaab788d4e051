"""The locks of production on etcd, on a model of etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from holdfast.lab.search.state import Config, State
from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.servers.etcd import Etcd
from holdfast.lab.subjects.latch import LatchView, latch_config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.lab.subjects.rows import NAME, fenced_config
from holdfast.lab.subjects.scripted import visits_config
from holdfast.protocol.intents.layout import is_writer, kind_of, latch_key, name_of, queue_of, token_of, tombstone_key

# An etcd lease lasts a quarter longer than the ttl, and is a whole number of seconds.
_LONGER_US: Final = 2_000_000


class _Queue:
    """What a search reads from the store about the intents of one name."""

    has_owner = False
    in_turn = True

    def __init__(self, name: str, *, permits: int = 1) -> None:
        self._range = queue_of(name)
        self._permits = permits

    def is_free(self, store: Etcd, name: str | None) -> bool:
        intents = sorted(
            (item for key, item in store.items.items() if self._range.key <= key < self._range.end),
            key=lambda item: item.created,
        )
        before = intents
        for place, item in enumerate(intents):
            if name is not None and token_of(item).startswith(f"{name}-"):
                before = intents[:place]
                if kind_of(item.key) == "rwlock" and not is_writer(item):
                    return not any(map(is_writer, before))
                break
        return len(before) < self._permits

    def is_blocked_by(self, store: Etcd, name: str) -> bool:
        return any(
            token_of(item).startswith(f"{name}-")
            for key, item in store.items.items()
            if self._range.key <= key < self._range.end
        )


def etcd_config(make: Callable[..., Config] = fenced_config, *, permits: int = 1, **bounds: Any) -> Config:
    """A lock on etcd. ``make`` returns the configuration of the same lock on Redis."""
    config = make(**bounds)

    def make_lock(driver: Any) -> Any:
        lock = config.make_lock(driver)
        lock._options = replace(lock._options, passes=False)
        return lock

    # A waiter asks every half second, so it notices within that time that a key has ended with its lease.
    return config._replace(
        make_lock=make_lock,
        new_store=Etcd,
        view=_Queue(name_of(config.key), permits=permits),
        queue="",
        idle_us=700_000,
        newcomer_us=config.newcomer_us + _LONGER_US,
    )


class _Latch(LatchView):
    """A latch on etcd. That it was counted down shows in the tombstones of its tokens."""

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        if was.store != state.store:
            before, now = (model.server.store(mark).items for mark in (was.store, state.store))
            for key in now.keys() - before.keys():
                _, buried, token = key.partition(tombstone_key(NAME, ""))
                if buried:
                    yield model.names.index(token[0]), "executed", f"latch_count_down {token} 0 1"
        yield from super().look(model, was, state)


def etcd_latch_config(cast: str, count: int, **bounds: Any) -> Config:
    view = _Latch(latch_key(NAME))
    config = latch_config(cast, count, **bounds)
    return config._replace(
        new_store=Etcd, key=latch_key(NAME), view=view, looks=view.look, idle_us=700_000, heeds=frozenset()
    )


ETCD_LATCH: Final = ("ShutUntilZero", "NoLostWakeup", "NoOrphan")

# Two clients: a step is several requests, so three clients have more runs than can be explored in a minute.
SEMAPHORE: Final = partial(etcd_config, semaphore_config, permits=2, clients=2)
RWLOCK: Final = partial(etcd_config, rwlock_config, clients=2)

# What a client does with a hold, and what its requests may meet. AGAIN: the giver takes its own ticket back if no other
# client was faster, as a second process of its kind would.
EXTENDED: Final = partial(visits_config, etcd_config, "a+htr", "tr", leaves_us=())
AGAIN: Final = partial(visits_config, etcd_config, "ahptr", "tsr", leaves_us=AT_ONCE)
FAILS: Final = partial(visits_config, etcd_config, "aksr", "ar", stay_us=5_600_000, leaves_us=())
TRIES: Final = partial(
    visits_config, partial(etcd_config, partial(semaphore_config, 1)), "0sr", "0r", leaves_us=AT_ONCE
)
READER: Final = partial(
    visits_config, partial(etcd_config, partial(rwlock_config, "WRW")), "adsr", "0r", "ar", leaves_us=()
)
