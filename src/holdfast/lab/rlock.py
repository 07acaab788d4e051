"""A reentrant lock as a search sees it: everybody takes it, takes it once more by another object, and gives both back.

Some stay while they have it twice, some when they have given it back once. Meanwhile another task of the same client
tries to give it back, or to pass for its owner. It owns nothing, and is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from holdfast.errors import HoldfastError, LeaseLost, NotHeld
from holdfast.lab.machine import Cancelled
from holdfast.lab.rows import LAB_TERMS, NAME, QuietLease, fenced_config
from holdfast.lab.site import Site
from holdfast.lab.state import Config
from holdfast.lab.visits import AT_ONCE, NEWCOMER, ask, cast_in, give_back, stay
from holdfast.lease import ENDED
from holdfast.names import keys_of
from holdfast.protocol import rlock as protocol
from holdfast.protocol.effects import caller

__all__ = ["rlock_config"]


class QuietReentrantLease(protocol.ReentrantLease, QuietLease):
    __slots__ = ()


def rlock_config(cast: str = "212", **bounds: Any) -> Config:
    """For each client how often it has the lock while it stays: twice (2), or still once (1)."""
    keys, terms = keys_of(NAME), replace(LAB_TERMS, cohort=0)

    def make_locks(driver: Any) -> tuple[Any, Any]:
        """Two objects of one client: who owns what is known to both."""
        owned: protocol.Owned = WeakValueDictionary()
        one, other = (protocol.BaseRLock(driver, keys, terms, QuietReentrantLease, owned) for _ in range(2))
        return one, other

    async def visit(site: Site) -> None:
        await _nest(site, cast_in(cast, site.machine.name) if site.machine.name != NEWCOMER else "1")

    config = fenced_config(cohort=0, **{"clients": len(cast), "leaves_us": AT_ONCE, **bounds})
    return config._replace(make_lock=make_locks, program=visit, alike=len(set(cast)) == 1)


async def _nest(site: Site, stays_at: str) -> None:
    run = site.machine.run
    lock, other = site.visit.make_lock(site.machine)
    lease = await ask(site, lock._acquire(site.visit.patience))
    if lease is None:
        return
    site.begin(lease)
    _note_level(site, lease, 1)
    levels = 1
    try:
        same = await run(other._enter())
        levels += same is lease
    except LeaseLost:
        pass  # which was known by then
    _note_level(site, lease, levels)
    site.spawn(_trespass(site, other, lease), site.machine)
    if stays_at == "2":
        await stay(site)
    if levels == 2:
        try:
            await run(other._leave(None) or _nothing())
        except (HoldfastError, Cancelled) as error:
            site.note("unreleased", what=type(error).__name__)
        levels -= 1
        _note_level(site, lease, levels)
    if stays_at == "1":
        await stay(site)
    site.leave()
    await give_back(site, lock._release(), wholly=True)
    if site.stage == "over":
        _note_level(site, lease, levels - 1)


def _note_level(site: Site, lease: Any, levels: int) -> None:
    site.note("level", what=f"{levels} {'over' if lease._hold.phase is ENDED else 'kept'}")


async def _trespass(site: Site, lock: Any, lease: Any) -> None:
    refused = not await site.machine.run(_owns(lock))
    for attempt in (lock._release(), protocol.release_level(lease)):
        try:
            await site.machine.run(attempt)
            refused = False
        except NotHeld:
            pass
    site.note("trespass", what="refused" if refused else "let in")


def _owns(lock: Any) -> Any:
    """Whether whoever runs this would be let in without asking the server."""
    me = yield from caller()
    return lock._find(me) is not None


def _nothing() -> Any:
    """What is left to be run if it was done at once."""
    return
    yield
