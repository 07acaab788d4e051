"""An election: candidates that lead for a term or two, and observers that ask for the leader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import NEVER, Config, State
from holdfast.lab.search.visits import AT_ONCE, NEWCOMER, ask, give_back, role_of, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, QuietLease, fenced_config
from holdfast.names import keys_of
from holdfast.protocol.kinds.election import BaseElection, BaseTerms
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.wait.contact import SHORTEST_CALL

OVERDUE_US: Final = round(SHORTEST_CALL * 1e6)  # how long the last renewal may still be under way


def election_config(cast: str = "RRO", **bounds: Any) -> Config:
    """``cast`` has a letter for each client. R: it leads and resigns. T: it leads for two terms in a loop, and the
    first term ends at once. O: it observes."""
    keys = keys_of(NAME)
    config = fenced_config(cohort=0, **{"clients": len(cast), "leaves_us": AT_ONCE, **bounds})

    def make_lock(driver: Any) -> Any:
        wait = None if driver.name == NEWCOMER else config.patience
        return BaseLock(driver, keys, replace(LAB_OPTIONS, cohort=0, wait=wait), QuietLease)

    async def visit(site: Site) -> None:
        lock = make_lock(site.machine)
        role = role_of(site, cast, newcomer="R")
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
    lease = await ask(site, lock._acquire(lock._options.wait))
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
        await give_back(site, terms._end(), wholly=True)  # as the next round of the loop does


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
    """The new owner of the key, and its fence. The owner may not know yet; without pub/sub no other event shows it."""
    if was.store == state.store:
        return
    before, (value, fences) = (
        (model.server.lock(mark)[0], model.server.store(mark).values.get(fence_key, b"0 0 "))
        for mark in (was.store, state.store)
    )
    if value is not None and before != (value, fences):
        fence, _, tail = fences.split(b" ")
        yield model.names.index(value[:1].decode()), "elected", fence.decode() if value[-8:] == tail else "None"


def _watch_leaders(model: Any, state: State) -> Iterator[tuple[int, str, str]]:
    """Leaders that rely on their lease for longer than the server keeps it, or were not told of its end."""
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
            could_know_us = max(local.until_us, state.since[client])  # it may just have resumed after a pause
            if state.now_us > could_know_us + OVERDUE_US:
                yield client, "overdue", ""
