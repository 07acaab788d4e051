"""The rows of the matrix: the fenced lock, and each recipe.

A row consists of a lock and the bounds of its search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import InvalidConfig
from holdfast.lab.search.state import NEVER, Config
from holdfast.lab.servers.memcached import Memcached
from holdfast.lab.servers.store import Store
from holdfast.lease import BaseLease
from holdfast.names import keys_of
from holdfast.options import LockOptions
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.recipes import FENCED, RECIPES, algorithm_of, options_of
from holdfast.protocol.recipes.algorithm import Algorithm
from holdfast.protocol.recipes.base import BaseRecipe, FencelessLease
from holdfast.protocol.recipes.deadline import Deadlined

TTL: Final = 3.0
PACE: Final = {"sleep": 1.6}  # seconds between tries; chosen so that tries and expiries do not coincide
# How long a holder stays at most. The mistake of setnx_repair shows only in the last half second.
STAY_US: Final = {"setnx_repair": 2_900_000}
TIMEOUT: Final = 1.0  # of one command
NAME: Final = "foo"

# A row is the name of a recipe, or a name and a variant. A variant differs from the recipe in these options.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "setnx_repair:as_written": {"repair": "as_written"},
    "getset:same_value": {"release": "same_value"},
    "getset:del": {"release": "del"},
}

# The fenced lock, and each recipe, followed by its variants.
ROWS: Final = (FENCED, *sorted([*RECIPES, *VARIANTS], key=lambda row: [*RECIPES].index(row.partition(":")[0])))

LAB_OPTIONS: Final = LockOptions(ttl=TTL)


def config_of(row: str, **bounds: Any) -> Config:
    """The configuration of that row; ``bounds`` are fields of Config."""
    if row == FENCED:
        return fenced_config(**bounds)
    name = row.partition(":")[0]
    if name not in RECIPES or (row != name and row not in VARIANTS):
        raise InvalidConfig(f"recipe {row!r:.60}", f"there are {', '.join(ROWS)}")
    return recipe_config(name, **VARIANTS.get(row, {}))._replace(**bounds)


def recipe_config(name: str, **options: Any) -> Config:
    """A recipe with these options; the other options are defaults of the lab."""
    options = {**PACE, **({"ttl": TTL} if "ttl" in options_of(name) else {}), **options}
    return scheme_config(algorithm_of(name, options))._replace(stay_us=STAY_US.get(name, 1_700_000))


def scheme_config(scheme: Algorithm) -> Config:
    """A lock of that algorithm, which need not be a recipe."""
    keys = keys_of(NAME, scheme.prefix)
    options = replace(LAB_OPTIONS, timeout=TIMEOUT, cohort=0, renew=False)
    return Config(
        make_lock=lambda driver: BaseRecipe(driver, keys, options, FencelessLease, scheme),
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
    """A lease that does not warn when it is dropped: a search drops clients at any time."""

    __slots__ = ()

    def __del__(self) -> None:
        pass


def crowd_config(make: Callable[..., Config] | None = None, **bounds: Any) -> Config:
    """A lock (by default the fenced lock) whose keeper refreshes its waiters in a batch, even if there are few."""
    config = (make or fenced_config)(**bounds)

    def make_lock(driver: Any) -> Any:
        driver.router.crowd.most_alone = 0
        return config.make_lock(driver)

    return config._replace(make_lock=make_lock)


def fenced_config(**bounds: Any) -> Config:
    """The fenced lock. ``bounds`` may also have fields of ``LockOptions``, such as ``cohort``."""
    options = replace(
        LAB_OPTIONS, **{name: bounds.pop(name) for name in list(bounds) if name in LockOptions.__dataclass_fields__}
    )
    keys = keys_of(NAME)
    return Config(
        make_lock=lambda driver: BaseLock(driver, keys, options, QuietLease),
        key=keys.main,
        deadline_us=lambda value, expires_us: expires_us,
        new_store=Store,
        ttl_us=round(options.ttl * 1e6),
        mortal=True,
    )._replace(**bounds)
