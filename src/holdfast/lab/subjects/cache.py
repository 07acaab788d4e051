"""The cache: clients ask for one value, some of them in the same process, and one client invalidates it.

A computation takes a while, and may be cancelled, or fail. When all clients are done, a newcomer must get the value, or
the turn to compute it; and all keys on the server must have a ttl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import ComputeFailed, HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import NOBODY, Config, State
from holdfast.lab.search.visits import NEWCOMER, role_of, sleep, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, fenced_config
from holdfast.protocol.cache.computation import Computation
from holdfast.protocol.cache.entry import Json, Policy, entry_of
from holdfast.protocol.cache.lookup import ask, forget
from holdfast.protocol.cache.singleflight import Group
from holdfast.protocol.hold import Hold

LATER: Final = 0.2  # when a late task asks, and finds a computation under way

_ENTRY: Final = entry_of(NAME)
_VALUE, _CLAIM = (key.encode() for key in _ENTRY.shared[:2])


class CacheView:
    """What a search reads of the cache from the store."""

    in_turn = False
    has_owner = False

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether no client has to wait: the value is there, or may be computed."""
        return _VALUE in store.values or _CLAIM not in store.values

    def is_blocked_by(self, store: Any, name: str) -> bool:
        claim: bytes = store.values.get(_CLAIM, b"")
        return claim.startswith(f"{name}-".encode())

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        if was.store != state.store:
            before, now = (_stored(model.server.store(mark)) for mark in (was.store, state.store))
            if now != before and now:
                yield NOBODY, "stored", now


def _stored(store: Any) -> str:
    """The computation of the stored value; empty if there is no value."""
    value: bytes = store.values.get(_VALUE, {}).get(b"value", b"")
    return value.decode().strip('"')


class Claim:
    """A turn at computing, with the interface of a lease."""

    def __init__(self, site: Site, hold: Hold) -> None:
        self.fence = hold.fence
        self._hold = hold
        self._machine = site.machine

    @property
    def held(self) -> bool:
        return self._hold.valid(self._machine.now())


def cache_config(cast: str = "RVI", *, ttl: float = 3600.0, stale: float = 0.0, **bounds: Any) -> Config:
    """``cast`` has a letter for each client. R: it asks for the value. L: it asks a little later. V: one of its tasks
    does R, another L. F: it asks, and its computations fail. D: it changes the source of the value, and invalidates the
    value. I: it does D, and then asks."""
    config = fenced_config(key=_ENTRY.shared[1], view=CacheView(), clients=len(cast), cohort=0, **bounds)

    async def visit(site: Site) -> None:
        newcomer = site.machine.name == NEWCOMER
        options = replace(LAB_OPTIONS, cohort=0, wait=None if newcomer else config.patience)
        policy = Policy(round(ttl * 1000), round(stale * 1000), 0, 0.0, options, Json())
        role = role_of(site, cast, newcomer="R")
        reader = Reader(site, policy, fails=role == "F")
        if role in "DI" and not (await reader.invalidate() and role == "I"):
            site.stage = "over"
            return
        if role == "V":
            site.spawn(reader.read_later(), site.machine)
        if role == "L":
            await reader.read_later()
        else:
            await reader.read()

    return config._replace(
        program=visit,
        alike=len(set(cast)) == 1,
        mortal=True,
        heeds=frozenset({"cache_drop", "cache_store"}),
        looks=CacheView().look,
    )


class Reader:
    """A client of the cache, which does what the blocking and asyncio interfaces do."""

    def __init__(self, site: Site, policy: Policy, *, fails: bool) -> None:
        self._site = site
        self._policy = policy
        self._fails = fails
        self._singleflight = Group(site.machine)
        self._tasks = 0
        self._begun = 0
        self._computing = 0  # two at most: the turn of the first may have been lost
        self._under_way = self._asking = 0

    async def invalidate(self) -> bool:
        """Whether the invalidation was confirmed."""
        site = self._site
        site.stage, site.granted_us = "holds", site.now_us
        await stay(site)
        site.stage = "invalidates"
        site.note("changes")
        try:
            await site.machine.run(forget(self._singleflight, _ENTRY, self._policy.options))
        except (HoldfastError, Cancelled):
            return False
        site.note("invalidated")
        return True

    async def read_later(self) -> None:
        site = self._site
        site.waiting += 1  # it counts as a waiter already
        await sleep(site, LATER)
        site.waiting -= 1
        await self.read()

    async def read(self) -> None:
        site = self._site
        self._tasks += 1
        task = str(self._tasks)
        if not self._asking:
            site.wants_us = site.now_us
        self._under_way += 1
        self._asking += 1
        site.waiting += 1
        if site.stage != "holds":
            site.stage = "wants"
        site.note("asks", what=task)
        try:
            try:
                computation = await site.machine.run(ask(self._singleflight, _ENTRY, self._policy))
            finally:
                self._asking -= 1
                site.waiting -= 1
            found = computation.read() if computation.hold is None else await self._compute(computation)
        except ComputeFailed as error:
            site.note("fails", what=f"{task} {error.message}")
        except (HoldfastError, LookupError, Cancelled):
            site.note("refused")
        else:
            site.served = True
            site.note("gets", what=f"{task} {found}")
        self._under_way -= 1
        if self._computing:
            site.stage = "holds"
        elif site.waiting:
            site.stage = "wants"
        else:
            site.stage = "leaves" if self._under_way else "over"

    async def _compute(self, computation: Computation) -> Any:
        site = self._site
        self._begun += 1
        name = f"{site.machine.name}{self._begun}"
        assert computation.hold is not None
        self._computing += 1
        site.begin(Claim(site, computation.hold))
        site.note("computes", what=name)
        try:
            try:
                await site.machine.run(site.stay())
            finally:
                self._computing -= 1
                site.leave()
            if self._fails:
                raise LookupError(name)
            packed = computation.pack(name)
        except BaseException as error:
            if isinstance(error, GeneratorExit) or not await site.machine.run(computation.fail(error)):
                raise
            return computation.read()
        return await site.machine.run(computation.store(packed))
