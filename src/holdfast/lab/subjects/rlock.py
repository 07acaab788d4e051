"""A reentrant lock: each client acquires it, acquires it again by another object, and releases both.

Some clients stay while they hold it twice, some after the first release. Meanwhile another task of the same client
tries to release it, and to acquire it as its owner. That task owns nothing, and must be refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from holdfast.errors import HoldfastError, LeaseLost, NotHeld
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import AT_ONCE, ask, give_back, role_of, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, QuietLease, fenced_config
from holdfast.names import keys_of
from holdfast.protocol.effects import caller
from holdfast.protocol.hold import ENDED
from holdfast.protocol.kinds import rlock as protocol


class QuietReentrantLease(protocol.ReentrantLease, QuietLease):
    __slots__ = ()


def rlock_config(cast: str = "212", **bounds: Any) -> Config:
    """``cast`` says for each client its level while it stays: 2, or 1 (after the first release)."""
    keys, options = keys_of(NAME), replace(LAB_OPTIONS, cohort=0)

    def make_locks(driver: Any) -> tuple[Any, Any]:
        """Two objects of one client, which share its table of owners."""
        owned: protocol.Owned = WeakValueDictionary()
        one, other = (protocol.BaseRLock(driver, keys, options, QuietReentrantLease, owned) for _ in range(2))
        return one, other

    async def visit(site: Site) -> None:
        await _nest(site, role_of(site, cast, newcomer="1"))

    config = fenced_config(cohort=0, **{"clients": len(cast), "leaves_us": AT_ONCE, **bounds})
    return config._replace(make_lock=make_locks, program=visit, alike=len(set(cast)) == 1)


async def _nest(site: Site, stays_at: str) -> None:
    run = site.machine.run
    lock, other = site.config.make_lock(site.machine)
    lease = await ask(site, lock._acquire(site.config.patience))
    if lease is None:
        return
    site.begin(lease)
    _note_level(site, lease, 1)
    levels = 1
    try:
        same = await run(other._enter())
        levels += same is lease
    except LeaseLost:
        pass  # the client has noticed the loss already
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
    """Whether the calling task counts as the owner, and could acquire without asking the server."""
    me = yield from caller()
    return lock._find(me) is not None


def _nothing() -> Any:
    """A protocol that does nothing, for a release that is complete already."""
    return
    yield
