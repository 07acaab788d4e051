"""A latch: some clients count down, some wait, some do both, and two tasks may wait in one process.

A client that counts down does some work first, so that a latch can open at any time. A newcomer comes when all others
are done. It counts down by the whole count, in case others are missing, and must then pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import NOBODY, Config, State
from holdfast.lab.search.visits import NEWCOMER, role_of, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, fenced_config
from holdfast.names import keys_of
from holdfast.protocol.kinds.latch import BaseLatch

RETENTION: Final = 3600.0


class LatchView:
    """What a search reads of the latch from the store."""

    in_turn = False
    has_owner = False

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def stands(self, store: Any) -> str:
        """The count that is left, and the initial count; empty if there is no latch."""
        value: bytes = store.values.get(self._key, b"")
        return value.decode()

    def is_free(self, store: Any, name: str | None) -> bool:
        return self.stands(store).startswith("0 ")

    def is_blocked_by(self, store: Any, name: str) -> bool:
        return False

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        if was.store != state.store:
            before, now = (self.stands(model.server.store(mark)) for mark in (was.store, state.store))
            if now != before:
                yield NOBODY, "stands", now


def latch_config(cast: str = "VDD", count: int = 2, **bounds: Any) -> Config:
    """``cast`` has a letter for each client: it counts down (D), waits (W), counts down and then waits (B); or two of
    its tasks wait (V)."""
    keys, options = keys_of(NAME), replace(LAB_OPTIONS, cohort=0)
    key = f"{keys.head}latch{keys.tail}"
    view = LatchView(key)

    def make_lock(driver: Any) -> Any:
        return BaseLatch(driver, {}, keys, count=count, retention=RETENTION, options=options)

    async def visit(site: Site) -> None:
        latch = make_lock(site.machine)
        role = role_of(site, cast, newcomer=NEWCOMER)
        if role == NEWCOMER:
            for _ in range(count):
                await _count_down(site, latch, count)
            await _wait(site, latch, count)
            return
        if role in "DB":
            site.stage, site.granted_us = "holds", site.now_us
            await stay(site)
            if not await _count_down(site, latch, count):
                return
        if role == "V":
            site.spawn(_wait(site, latch, count), site.machine)
        if role in "WBV":
            await _wait(site, latch, count)

    return fenced_config(key=key, view=view, clients=len(cast), **bounds)._replace(
        make_lock=make_lock,
        program=visit,
        alike=False,
        heeds=frozenset({"latch_count_down"}),
        looks=view.look,
    )


async def _count_down(site: Site, latch: BaseLatch, count: int) -> bool:
    """Whether count_down succeeded. If not, the server may have counted it nevertheless."""
    site.stage = "counts"
    try:
        left = await site.machine.run(latch._count_down(1))
    except (HoldfastError, Cancelled) as error:
        site.note("uncounted", what=type(error).__name__)
        site.stage = "over"
        return False
    site.note("counted", what=f"{left} {count}")
    site.stage = "done"
    return True


async def _wait(site: Site, latch: BaseLatch, count: int) -> None:
    site.stage, site.wants_us = "wants", site.now_us
    site.waiting += 1
    site.note("wants")
    why, opened = "", False
    try:
        opened = await site.machine.run(latch._wait(site.config.patience))
    except (HoldfastError, Cancelled) as error:
        why = type(error).__name__
    site.waiting -= 1
    if opened:
        site.served = True
        site.note("passed", what=str(count))
    else:
        site.note("refused", what=why)
    if not site.waiting:
        site.stage = "done"
