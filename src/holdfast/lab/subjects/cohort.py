"""A lock that several tasks of each client want: they wait in the local queue, and pass the lease on.

Every event names the task, so invariants treat two tasks of a client like two clients. A cancellation hits the main
task of a client. The main task comes just before the other task (F), or a little later (S).
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.invariants.locks import PASSED
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import role_of, sleep, stay, take_and_give_back
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import fenced_config

LATER: Final = 0.02
SOON: Final = ((0, 30_000),)  # at once, or when the second task has come, while there is still time to pass the lock on
MAIN, OTHER = 1, 2


def cohort_config(cast: str = "FS", **bounds: Any) -> Config:
    """``cast`` has a letter for each client: its main task comes first (F) or second (S), or is its only task (1)."""
    config = fenced_config(**{"clients": len(cast), "leaves_us": SOON, **bounds})

    async def visit(site: Site) -> None:
        role = role_of(site, cast, newcomer="1")
        if role == "1":
            await take_and_give_back(site)
            return
        crew = _Crew(site)
        site.spawn(crew.visit(OTHER, later=False), site.machine)
        await crew.visit(MAIN, later=role == "S")

    return config._replace(program=visit, alike=len(set(cast)) == 1)


class _Crew:
    """The tasks of one client, and their common stage."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stages = {MAIN: "new", OTHER: "new"}

    async def visit(self, task: int, *, later: bool) -> None:
        site = self._site
        if later and not await sleep(site, LATER):
            self._move(task, "over")
            return
        lock = site.config.make_lock(site.machine)
        site.note("wants", task=task)
        self._move(task, "wants")
        lease, why = None, ""
        try:
            lease = await site.machine.run(lock._acquire(site.config.patience))
        except (HoldfastError, Cancelled) as error:
            why = type(error).__name__
        if lease is None:
            site.note("refused", what=why, task=task)
            self._move(task, "over")
            return
        if lease._hold.passed:  # if not, the server has minted the fence, and that is an event already
            site.note("minted", fence=lease.fence, task=task)
        self._move(task, "holds")
        site.begin(lease, task, PASSED if lease._hold.passed else "")
        await stay(site)
        site.leave(lease, task)
        self._move(task, "leaves")
        try:
            await site.machine.run(lock._release())
        except (HoldfastError, Cancelled) as error:
            site.note("unreleased", what=type(error).__name__, task=task)
            self._move(task, "done")
        else:
            site.note("released", task=task)
            self._move(task, "over")

    def _move(self, task: int, stage: str) -> None:
        """Set the stage of a task. The stage of the client is that of the task that is furthest from its end."""
        self._stages[task] = stage
        site, stages = self._site, self._stages.values()
        site.waiting = sum(one == "wants" for one in stages)
        before = site.stage
        site.stage = next(one for one in ("holds", "leaves", "wants", "new", "done", "over") if one in stages)
        if site.stage == "new":
            site.stage = "leaves"  # one is over, and the other has not begun
        if site.stage == "wants" != before:
            site.wants_us = site.now_us
