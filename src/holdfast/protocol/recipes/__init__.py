"""The locks of history, each as it was written, by name.

They are here to be run beside what is still deployed, to be taken apart in the lab, and to be moved away from. Each
module says what its lock promises and which pits it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from holdfast.errors import InvalidConfig, InvalidName
from holdfast.lease import BaseLease, Terms
from holdfast.names import Keys, keys_of
from holdfast.protocol.recipes.base import BaseRecipe, FencelessLease
from holdfast.protocol.recipes.getset import GetSet
from holdfast.protocol.recipes.getset_equal import GetSetEqual
from holdfast.protocol.recipes.memcached_add import MemcachedAdd
from holdfast.protocol.recipes.multi import Multi
from holdfast.protocol.recipes.scheme import Scheme
from holdfast.protocol.recipes.set_nx import SetNXToken
from holdfast.protocol.recipes.set_nx_plain import SetNXPlain
from holdfast.protocol.recipes.setnx import SetNX
from holdfast.protocol.recipes.setnx_expire import SetNXExpire
from holdfast.protocol.recipes.setnx_repair import SetNXRepair
from holdfast.protocol.recipes.watch import Watch
from holdfast.protocol.recipes.watch_blind import WatchBlind

__all__ = ["FENCED", "RECIPES", "make", "options_of", "scheme_of"]

RECIPES: Final[dict[str, type[Scheme]]] = {
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

FENCED: Final = "holdfast"  # the name by which the faces know the lock that is none of these

_TERMS: Final = Terms(
    ttl=30.0,
    wait=None,
    renew=False,
    max_hold=None,
    on_lost="ignore",
    label="",
    cohort=0,
    timeout=5.0,
    fence_retention=3600.0,
)


def options_of(name: str) -> dict[str, Any]:
    """The options of a recipe, and their defaults."""
    return {option.name: option.default for option in fields(RECIPES[name])}


def scheme_of(name: str, options: Mapping[str, Any]) -> Scheme:
    """The recipe of that name with these options; InvalidConfig if there is no such thing."""
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
    """A lock of history on that key, for that driver. ``timeout`` is how long one command may take."""
    scheme = scheme_of(name, options or {})
    keys = _keys_of(key, namespace + scheme.prefix, scheme)
    terms = replace(_TERMS, wait=scheme.wait, timeout=timeout)
    return lock_class(driver, keys, terms, lease_class, scheme)


def _keys_of(key: str, prefix: str, scheme: Scheme) -> Keys:
    """The one key of a lock of history. It has no side keys, so what the rules for names guard against cannot happen;
    and who has deployed a lock with braces in its key must be able to name it."""
    if not isinstance(key, str):
        raise InvalidName(key, f"a name is a str, not {type(key).__name__}")
    if scheme.server != "redis":  # whose keys are words on a line
        return keys_of(key, prefix)
    if not key:
        raise InvalidName(key, "it is empty")
    main = prefix + key
    try:
        main.encode()
    except UnicodeEncodeError:
        raise InvalidName(key, "it contains a lone surrogate, which cannot be sent") from None
    return Keys(key, main, (main, "", "", ""), "", "")
