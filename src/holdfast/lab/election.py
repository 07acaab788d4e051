"""An election as a search sees it: candidates who lead for a term or two, and onlookers who ask who leads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.machine import Cancelled
from holdfast.lab.rows import LAB_TERMS, NAME, QuietLease, fenced_config
from holdfast.lab.site import Site
from holdfast.lab.state import NEVER, Config, State
from holdfast.lab.visits import AT_ONCE, NEWCOMER, ask, cast_in, give_back, stay
from holdfast.names import keys_of
from holdfast.protocol.election import BaseElection, BaseTerms
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.retry import SHORTEST_CALL

__all__ = ["election_config"]

OVERDUE_US: Final = round(SHORTEST_CALL * 1e6)  # a last try at a renewal may be under way for so long


def election_config(cast: str = "RRO", **bounds: Any) -> Config:
    """For each client what it does: it leads and resigns (R), leads for two terms in a loop, the first of which
    is over at once (T), or looks on (O)."""
    keys = keys_of(NAME)
    config = fenced_config(cohort=0, **{"clients": len(cast), "leaves_us": AT_ONCE, **bounds})

    def make_lock(driver: Any) -> Any:
        wait = None if driver.name == NEWCOMER else config.patience
        return BaseLock(driver, keys, replace(LAB_TERMS, cohort=0, wait=wait), QuietLease)

    async def visit(site: Site) -> None:
        lock = make_lock(site.machine)
        role = "R" if site.machine.name == NEWCOMER else cast_in(cast, site.machine.name)
        if role == "O":
            await _look_on(site, BaseElection(site.machine, lock))
        elif role == "R":
            await _resign(site, lock)
        else:
            await _lead_twice(site, lock)

    def look(model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        yield from _elected(model, was, state, keys.shared[1].encode())
        yield from _watch_leaders(model, state)

    return config._replace(make_lock=make_lock, program=visit, alike=len(set(cast)) == 1, looks=look)


async def _resign(site: Site, lock: BaseLock[QuietLease]) -> None:
    lease = await ask(site, lock._acquire(lock._terms.wait))
    if lease is not None:
        site.begin(lease)
        await stay(site)
        site.leave()
        await give_back(site, lock._release(), wholly=True)


async def _lead_twice(site: Site, lock: BaseLock[QuietLease]) -> None:
    terms = BaseTerms(site.machine, lock)
    for stays in (False, True):
        lease = await ask(site, terms._begin())
        if lease is None:
            return
        site.begin(lease)
        if stays:
            await stay(site)
        site.leave()
        await give_back(site, terms._end(), wholly=True)  # with which the next round would begin, too


async def _look_on(site: Site, election: BaseElection[QuietLease]) -> None:
    for again in (True, False):
        site.stage = "asks"
        site.note("asks")
        try:
            leader = await site.machine.run(election._leader())
        except (HoldfastError, Cancelled) as error:
            site.note("untold", what=type(error).__name__)
        else:
            site.note("told", what="nobody" if leader is None else f"{leader.host} {leader.fence}")
        if again:
            site.stage, site.granted_us = "holds", site.now_us
            await stay(site)
    site.stage = "done"


def _elected(model: Any, was: State, state: State, fence_key: bytes) -> Iterator[tuple[int, str, str]]:
    """Whose the key is, and with which fence, from now on. It may not know yet; and if it cannot hear bells, nothing
    else says so."""
    if was.store == state.store:
        return
    before, (value, fence) = (
        (model.server.lock(mark)[0], model.server.store(mark).values.get(fence_key, b""))
        for mark in (was.store, state.store)
    )
    if value is not None and before != (value, fence):
        yield model.names.index(value[:1].decode()), "elected", fence.decode()


def _watch_leaders(model: Any, state: State) -> Iterator[tuple[int, str, str]]:
    """Whether anybody counts on more than the server gives it, or was not told that its time is up."""
    value, expires_us = model.server.lock(state.store)
    for client, mark in enumerate(state.locals):
        local = model.locals[mark]
        if not local.holds or local.until_us is None or state.stopped[client] == NEVER:
            continue
        if local.until_us > state.now_us:
            left_us = 0 if expires_us is None else expires_us - model.server.now_us(state.store)
            its_own = value is not None and value.startswith(f"{model.names[client]}-".encode())
            if not its_own or local.until_us > state.now_us + left_us:
                yield client, "outlives", ""
        elif not state.stopped[client] and not state.held_back[client]:
            could_know_us = max(local.until_us, state.since[client])  # it may just have gone on, after a pause
            if state.now_us > could_know_us + OVERDUE_US:
                yield client, "overdue", ""
