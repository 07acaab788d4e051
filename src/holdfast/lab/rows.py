"""The rows of the matrix: each lock of history, and the fenced lock, as a search sees it.

A row is a lock and the bounds within which it is explored, nothing else. What comes of it is found by the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any, Final
from weakref import WeakValueDictionary

from holdfast.errors import InvalidConfig
from holdfast.lab.memcached import Memcached
from holdfast.lab.rooms import RoomView
from holdfast.lab.state import NEVER, Config
from holdfast.lab.store import Store
from holdfast.lease import BaseLease, Terms
from holdfast.names import keys_of
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.recipes import FENCED, RECIPES, options_of, scheme_of
from holdfast.protocol.recipes.base import BaseRecipe, FencelessLease
from holdfast.protocol.recipes.deadline import Deadlined
from holdfast.protocol.recipes.scheme import Scheme
from holdfast.protocol.room import ALL, ANY, room_keys
from holdfast.protocol.rwlock import BaseReader, BaseWriteLease, BaseWriter, Insiders
from holdfast.protocol.semaphore import BasePermit, BaseSemaphore

__all__ = [
    "LAB_TERMS",
    "NAME",
    "ROWS",
    "QuietLease",
    "config_of",
    "crowd_config",
    "fenced_config",
    "recipe_config",
    "rwlock_config",
    "scheme_config",
    "semaphore_config",
]

TTL: Final = 3.0
PACE: Final = {"sleep": 1.6}  # between tries: so that they do not all fall on the beats of the ttl
# How long a holder stays at most; what the program with the repair gets wrong shows in the last half second only.
STAY_US: Final = {"setnx_repair": 2_900_000}
TIMEOUT: Final = 1.0  # of one command
NAME: Final = "foo"

# A row is the name of a recipe, or a name and a variant of it, by the option that makes the difference.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "setnx_repair:as_written": {"repair": "as_written"},
    "getset:same_value": {"release": "same_value"},
    "getset:del": {"release": "del"},
}

ROWS: Final = (
    "setnx",
    "setnx_expire",
    "setnx_repair",
    "setnx_repair:as_written",
    "multi",
    "getset",
    "getset:same_value",
    "getset:del",
    "getset_equal",
    "watch_blind",
    "watch",
    "set_nx_plain",
    "set_nx",
    "memcached_add",
    FENCED,
)

LAB_TERMS: Final = Terms(
    ttl=TTL,
    wait=None,
    renew=True,
    max_hold=None,
    on_lost=None,
    label="",
    cohort=64,
    timeout=5.0,
    fence_retention=3600.0,
)


def config_of(row: str, **bounds: Any) -> Config:
    """What is explored for that row; ``bounds`` are fields of Config."""
    if row == FENCED:
        return fenced_config(**bounds)
    name = row.partition(":")[0]
    if name not in RECIPES or (row != name and row not in VARIANTS):
        raise InvalidConfig(f"recipe {row!r:.60}", f"there are {', '.join(ROWS)}")
    return recipe_config(name, **VARIANTS.get(row, {}))._replace(**bounds)


def recipe_config(name: str, **options: Any) -> Config:
    """A lock of history with those options; if not otherwise said, at the pace of the lab."""
    options = {**PACE, **({"ttl": TTL} if "ttl" in options_of(name) else {}), **options}
    return scheme_config(scheme_of(name, options))._replace(stay_us=STAY_US.get(name, 1_700_000))


def scheme_config(scheme: Scheme) -> Config:
    """Any lock of that kind, known or not."""
    keys = keys_of(NAME, scheme.prefix)
    terms = replace(LAB_TERMS, timeout=TIMEOUT, cohort=0, renew=False)
    return Config(
        make_lock=lambda driver: BaseRecipe(driver, keys, terms, FencelessLease, scheme),
        key=keys.main,
        deadline_us=scheme.deadline_us,
        new_store=Memcached if scheme.server == "memcached" else Store,
        by_server=not isinstance(scheme, Deadlined),
        ttl_us=round(TTL * 1e6),
        stay_us=1_700_000,
        leaves_us=((0, NEVER),),
        late=True,
        polls=True,
        patience=3.2,
        idle_us=round(scheme.sleep * 1e6) + 100_000,
        idle_us_per_fault=round((scheme.sleep + TIMEOUT) * 1e6) + 100_000,
    )


class QuietLease(BaseLease):
    """A search drops clients in the middle of their lives, and nobody is to be warned of that."""

    __slots__ = ()

    def __del__(self) -> None:
        pass


class QuietPermit(BasePermit, QuietLease):
    __slots__ = ()


class QuietWriteLease(BaseWriteLease, QuietLease):
    __slots__ = ()


_CLIENTS: Final = "ABCDEFGH"


def semaphore_config(permits: int = 2, **bounds: Any) -> Config:
    """A semaphore, of which everybody wants a permit."""
    keys, terms = keys_of(NAME), replace(LAB_TERMS, cohort=0)
    config = _room_config(dict.fromkeys(_CLIENTS, f"n{permits}"), bounds)
    return config._replace(make_lock=lambda driver: BaseSemaphore(driver, keys, terms, QuietPermit, permits))


def rwlock_config(modes: str = "RWR", **bounds: Any) -> Config:
    """A readers-writer lock: for each client whether it is a reader (R) or a writer (W). A newcomer writes."""
    keys, terms = keys_of(NAME), replace(LAB_TERMS, cohort=0)
    wanted = {name: ANY if mode == "R" else ALL for name, mode in zip(_CLIENTS, cycle(modes), strict=False)}

    def make_lock(driver: Any) -> Any:
        insiders: Insiders = WeakValueDictionary()
        if wanted.get(driver.name) == ANY:
            return BaseReader(driver, keys, terms, QuietLease, insiders)
        return BaseWriter(driver, keys, terms, QuietWriteLease, insiders)

    return _room_config(wanted, {"clients": len(modes), **bounds})._replace(make_lock=make_lock)


def crowd_config(make: Callable[..., Config] | None = None, **bounds: Any) -> Config:
    """A lock, if not otherwise said the fenced one, with a keeper that speaks for its waiters, however few they are."""
    config = (make or fenced_config)(**bounds)

    def make_lock(driver: Any) -> Any:
        driver.board.crowd.most_alone = 0
        return config.make_lock(driver)

    return config._replace(make_lock=make_lock)


def _room_config(wanted: dict[str, str], bounds: dict[str, Any]) -> Config:
    keys = keys_of(NAME)
    return fenced_config(key=room_keys(keys)[0], view=RoomView(keys, wanted), **bounds)


def fenced_config(**bounds: Any) -> Config:
    """The fenced lock. ``cohort`` and what else ``Terms`` has may be said, too."""
    terms = replace(
        LAB_TERMS, **{name: bounds.pop(name) for name in list(bounds) if name in Terms.__dataclass_fields__}
    )
    keys = keys_of(NAME)
    return Config(
        make_lock=lambda driver: BaseLock(driver, keys, terms, QuietLease),
        key=keys.main,
        deadline_us=lambda value, expires_us: expires_us,
        new_store=Store,
        ttl_us=round(terms.ttl * 1e6),
        mortal=True,
    )._replace(**bounds)
