"""The cache as a search sees it: some ask for one value, some of them in the same process, and one invalidates it.

To compute is to stay for a while, which may be cancelled, or fail. When all is over, a newcomer who asks must have the
value, or the right to compute it; and all that is on the server must end by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import ComputeFailed, HoldfastError
from holdfast.lab.machine import Cancelled
from holdfast.lab.rows import LAB_TERMS, NAME, fenced_config
from holdfast.lab.site import Site
from holdfast.lab.state import NOBODY, Config, State
from holdfast.lab.visits import NEWCOMER, cast_in, stay
from holdfast.lease import Hold
from holdfast.protocol.effects import wait
from holdfast.protocol.entries import Json, Policy, entry_of
from holdfast.protocol.flights import Desk
from holdfast.protocol.stampede import ask, forget
from holdfast.protocol.turns import Turn

__all__ = ["cache_config"]

LATER: Final = 0.2  # when somebody asks who comes later, and finds others at it

_ENTRY: Final = entry_of(NAME)
_VALUE, _CLAIM = (key.encode() for key in _ENTRY.shared[:2])


class CacheView:
    """What there is to see of it on the server."""

    in_turn = False
    has_owner = False

    def is_free(self, store: Any, name: str | None) -> bool:
        """Nobody has to wait: it is there, or anybody may compute it."""
        return _VALUE in store.values or _CLAIM not in store.values

    def has_place(self, store: Any, name: str) -> bool:
        claim: bytes = store.values.get(_CLAIM, b"")
        return claim.startswith(f"{name}-".encode())

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        if was.store != state.store:
            before, now = (_stored(model.server.store(mark)) for mark in (was.store, state.store))
            if now != before and now:
                yield NOBODY, "stored", now


def _stored(store: Any) -> str:
    """Of which computation the value is; empty if there is none."""
    value: bytes = store.values.get(_VALUE, {}).get(b"value", b"")
    return value.decode().strip('"')


class Claim:
    """A turn at computing, with the face of a lease."""

    def __init__(self, site: Site, hold: Hold) -> None:
        self.fence = hold.fence
        self._hold = hold
        self._machine = site.machine

    @property
    def held(self) -> bool:
        return self._hold.valid(self._machine.now())


def cache_config(cast: str = "RVI", *, ttl: float = 3600.0, stale: float = 0.0, **bounds: Any) -> Config:
    """For each client what it does: it asks for the value (R), or a little later (L), or two of its tasks do the one
    and the other (V); it fails to compute it if it comes to that (F); or it changes what the value depends on, and
    invalidates it (D), and then asks (I)."""
    config = fenced_config(key=_ENTRY.shared[1], view=CacheView(), clients=len(cast), cohort=0, **bounds)

    async def visit(site: Site) -> None:
        newcomer = site.machine.name == NEWCOMER
        terms = replace(LAB_TERMS, cohort=0, wait=None if newcomer else config.patience)
        policy = Policy(round(ttl * 1000), round(stale * 1000), 0, 0.0, terms, Json())
        role = "R" if newcomer else cast_in(cast, site.machine.name)
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
    """What a client does, as the faces do it."""

    def __init__(self, site: Site, policy: Policy, *, fails: bool) -> None:
        self._site = site
        self._policy = policy
        self._fails = fails
        self._desk = Desk(site.machine)
        self._tasks = 0
        self._begun = 0
        self._computing = 0  # two may, if the turn of the first was lost
        self._under_way = self._asking = 0

    async def invalidate(self) -> bool:
        """Whether that was confirmed."""
        site = self._site
        site.stage, site.granted_us = "holds", site.now_us
        await stay(site)
        site.stage = "invalidates"
        site.note("changes")
        try:
            await site.machine.run(forget(self._desk, _ENTRY, self._policy.terms))
        except (HoldfastError, Cancelled):
            return False
        site.note("invalidated")
        return True

    async def read_later(self) -> None:
        site = self._site
        site.waiting += 1  # or will be
        try:
            await site.machine.run(wait(None, site.machine.now() + LATER))
        except Cancelled:
            pass
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
                turn = await site.machine.run(ask(self._desk, _ENTRY, self._policy))
            finally:
                self._asking -= 1
                site.waiting -= 1
            found = turn.read() if turn.hold is None else await self._compute(turn)
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

    async def _compute(self, turn: Turn) -> Any:
        site = self._site
        self._begun += 1
        name = f"{site.machine.name}{self._begun}"
        assert turn.hold is not None
        self._computing += 1
        site.begin(Claim(site, turn.hold))
        site.note("computes", what=name)
        try:
            try:
                await site.machine.run(site.stay())
            finally:
                self._computing -= 1
                site.leave()
            if self._fails:
                raise LookupError(name)
            packed = turn.pack(name)
        except BaseException as error:
            if isinstance(error, GeneratorExit) or not await site.machine.run(turn.fail(error)):
                raise
            return turn.read()
        return await site.machine.run(turn.store(packed))
