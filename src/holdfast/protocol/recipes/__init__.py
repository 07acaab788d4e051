"""Recipes: widely deployed lock algorithms, each as it was written, by name.

They share locks with programs that still use these algorithms, are searched in the lab, and help to move to
client.lock. Each module says what its lock guarantees and which pitfalls it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from holdfast.errors import InvalidConfig, InvalidName
from holdfast.lease import BaseLease
from holdfast.names import Keys, keys_of
from holdfast.options import LockOptions
from holdfast.protocol.recipes.algorithm import Algorithm
from holdfast.protocol.recipes.base import BaseRecipe, FencelessLease
from holdfast.protocol.recipes.getset import GetSet
from holdfast.protocol.recipes.getset_equal import GetSetEqual
from holdfast.protocol.recipes.memcached_add import MemcachedAdd
from holdfast.protocol.recipes.multi import Multi
from holdfast.protocol.recipes.set_nx import SetNXToken
from holdfast.protocol.recipes.set_nx_plain import SetNXPlain
from holdfast.protocol.recipes.setnx import SetNX
from holdfast.protocol.recipes.setnx_expire import SetNXExpire
from holdfast.protocol.recipes.setnx_repair import SetNXRepair
from holdfast.protocol.recipes.watch import Watch
from holdfast.protocol.recipes.watch_blind import WatchBlind

RECIPES: Final[dict[str, type[Algorithm]]] = {
    "setnx": SetNX,
    "setnx_expire": SetNXExpire,
    "setnx_repair": SetNXRepair,
    "multi": Multi,
    "getset": GetSet,
    "getset_equal": GetSetEqual,
    "watch_blind": WatchBlind,
    "watch": Watch,
    "set_nx_plain": SetNXPlain,
    "set_nx": SetNXToken,
    "memcached_add": MemcachedAdd,
}

FENCED: Final = "holdfast"  # the recipe name that means client.lock itself

_OPTIONS: Final = LockOptions(renew=False, on_lost="ignore", cohort=0)


def options_of(name: str) -> dict[str, Any]:
    """The options of a recipe, and their defaults."""
    return {option.name: option.default for option in fields(RECIPES[name])}


def algorithm_of(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm of that recipe with these options; InvalidConfig if one of them is unknown."""
    if not isinstance(name, str) or name not in RECIPES:
        raise InvalidConfig(f"recipe {name!r:.60}", f"there are {', '.join(RECIPES)} and {FENCED}")
    known = {option.name: option.metadata["check"] for option in fields(RECIPES[name])}
    for option in options:
        if option not in known:
            raise InvalidConfig(f"{option:.60}= of the recipe {name!r}", f"it takes {', '.join(sorted(known))}")
    return RECIPES[name](**{option: known[option](option, value) for option, value in options.items()})


def make(
    driver: Any,
    name: str,
    key: str,
    *,
    namespace: str = "",
    options: Mapping[str, Any] | None = None,
    timeout: float = 5.0,
    lock_class: type[BaseRecipe[Any]] = BaseRecipe,
    lease_class: type[BaseLease] = FencelessLease,
) -> Any:
    """A recipe lock on that key. ``timeout`` limits each command, in seconds."""
    algorithm = algorithm_of(name, options or {})
    keys = _keys_of(key, namespace + algorithm.prefix, algorithm)
    lock_options = replace(_OPTIONS, wait=algorithm.wait, timeout=timeout)
    return lock_class(driver, keys, lock_options, lease_class, algorithm)


def _keys_of(key: str, prefix: str, algorithm: Algorithm) -> Keys:
    """The only key of a recipe. The rules for names do not apply: they protect side keys, which a recipe does not have,
    and a deployed lock may have braces in its key."""
    if not isinstance(key, str):
        raise InvalidName(key, f"a name is a str, not {type(key).__name__}")
    if algorithm.server != "redis":  # memcached takes no spaces in a key
        return keys_of(key, prefix)
    if not key:
        raise InvalidName(key, "it is empty")
    main = prefix + key
    try:
        main.encode()
    except UnicodeEncodeError:
        raise InvalidName(key, "it contains a lone surrogate, which cannot be sent") from None
    return Keys(key, main, main, (main, "", "", ""), "", "")
