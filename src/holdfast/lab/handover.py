"""Holds that are handed over, as a search sees it: whatever lock a row has, some of its clients give it away by a
ticket, and some look for a ticket before they get in line.

A ticket is posted where everybody can read it, on the same server; so it can be lost, late, read by two, and be there
long after it was of any use. Who finds it used up gets in line like anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from holdfast.errors import HoldfastError, InvalidConfig, NotAcquired
from holdfast.lab.machine import Cancelled
from holdfast.lab.rows import fenced_config
from holdfast.lab.site import Site
from holdfast.lab.state import Config
from holdfast.lab.visits import NEWCOMER, ask, cast_in, give_back, stay
from holdfast.protocol.effects import STOPPED, Command, StepFailed, call
from holdfast.protocol.handover import adopt, hand_over, read_ticket
from holdfast.protocol.lock import release_lease

__all__ = ["handover_config"]

BOARD: Final = "tickets"
GIVES: Final = "gb"
TAKES: Final = "tb"


def handover_config(make: Callable[..., Config] = fenced_config, roles: str = "gtn", **bounds: Any) -> Config:
    """That row, whose clients give (g), take (t), do both (b), or neither (n)."""
    # What was handed over, and adopted by nobody, stays for its ttl. So a waiter behind one that has fallen silent may
    # have to wait until that one is struck off, and for its own next refresh: longer than anybody stays.
    config = make(**{"clients": len(roles), "idle_us_per_fault": 1_500_000, **bounds})

    async def visit(site: Site) -> None:
        name = site.machine.name
        await _visit(site, "n" if name == NEWCOMER else cast_in(roles, name))

    return config._replace(program=visit, alike=config.alike and len(set(roles)) == 1)


async def _visit(site: Site, role: str) -> None:
    lock = site.visit.make_lock(site.machine)
    ticket = await _look(site) if role in TAKES else ""
    lease = await ask(site, _come_in(lock, ticket, site.visit.patience))
    if lease is None:
        return
    site.begin(lease)
    await stay(site)
    site.leave()
    await give_back(site, _pass_on(lease) if role in GIVES else release_lease(lease))


async def _look(site: Site) -> str:
    """For a ticket. It has not begun to want the lock, and nobody need wait for it."""
    try:
        found = await site.machine.run(_on_the_board("GET", BOARD))
    except (HoldfastError, Cancelled):
        return ""
    return found.decode() if found else ""


def _come_in(lock: Any, ticket: str, patience: float | None) -> Generator[Any, Any, Any]:
    if ticket:
        try:
            return (yield from adopt(lock, read_ticket(ticket, "")))
        except (NotAcquired, InvalidConfig):
            pass  # it was of no more use, or for something else
    return (yield from lock._acquire(patience))


def _pass_on(lease: Any) -> Generator[Any, Any, None]:
    try:
        ticket = yield from hand_over(lease)
    except STOPPED:
        if lease._hold in lease._driver.book.holds:
            yield from release_lease(lease)
        raise
    yield from _on_the_board("SET", BOARD, str(ticket), "PX", "60000")


def _on_the_board(*words: str) -> Generator[Any, Any, Any]:
    """Once. If that fails, there is no ticket, and what was handed over ends by its ttl."""
    try:
        return (yield from call(Command(words), 1.0))
    except StepFailed:
        return None
