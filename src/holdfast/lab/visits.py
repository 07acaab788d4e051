"""What the clients of a search do, as programs: each is run by every client, on a ``Site`` of its own.

A program says how far it is by the stage of its site, and what it does or learns by notes, which become events (see
``check``). It may be cancelled wherever it waits, and its clients are as stubborn as clients are: who is told that its
lease is lost goes on all the same, and writes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.machine import Cancelled
from holdfast.lab.site import Site

__all__ = ["AT_ONCE", "NEWCOMER", "ask", "cast_in", "give_back", "stay", "take_and_give_back"]

NEWCOMER: Final = "N"  # who comes when all is over
AT_ONCE: Final = ((0, 0),)  # when one may leave before its stay is over; what the mutex does in between is known


async def take_and_give_back(site: Site, what: str = "") -> None:
    """Acquire, stay for a while, release. ``what`` is told of the grant: see ``check``."""
    lock = site.visit.make_lock(site.machine)
    lease = await ask(site, lock._acquire(site.visit.patience))
    if lease is not None:
        site.begin(lease, what=what)
        await stay(site)
        site.leave()
        await give_back(site, lock._release())


async def ask(site: Site, protocol: Generator[Any, Any, Any]) -> Any:
    """What it gets; None if it did not get it, and then its visit is over."""
    site.stage, site.wants_us = "wants", site.now_us
    site.note("wants")
    why = ""
    lease = None
    try:
        lease = await site.machine.run(protocol)
    except (HoldfastError, Cancelled) as error:
        why = type(error).__name__
    if lease is None:
        site.stage = "over"
        site.note("refused", what=why)
    return lease


async def stay(site: Site) -> None:
    try:
        await site.machine.run(site.stay())
    except Cancelled:
        pass


async def give_back(site: Site, protocol: Generator[Any, Any, Any], *, wholly: bool = False) -> None:
    """And its visit is over; ``wholly``: if it went well, nothing of it may be left."""
    try:
        await site.machine.run(protocol)
    except (HoldfastError, Cancelled) as error:
        site.note("unreleased", what=type(error).__name__)
        site.stage = "done"
    else:
        site.note("released")
        site.stage = "over" if wholly else "done"


def cast_in(cast: str, name: str) -> str:
    """What that client does, of a letter for each; if there are more clients than letters, they begin again."""
    return cast["ABCDEFGH".index(name) % len(cast)]
