"""Programs of the clients of a search: every client runs one, each on its own ``Site``.

A program reports its progress as the stage of its site. It reports what it does or learns as notes, which become events
(see ``invariants.history``). It may be cancelled wherever it waits. If a client learns that its lease is lost, it
ignores that: it continues, and writes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.simulation.process import Cancelled
from holdfast.protocol.effects import wait

NEWCOMER: Final = "N"  # the client that comes when all others are done
AT_ONCE: Final = ((0, 0),)  # a holder leaves at once, or when its stay is over; other rows search the times between


async def take_and_give_back(site: Site, what: str = "") -> None:
    """Acquire, stay for a while, release. ``what`` goes into the event of the grant."""
    lock = site.config.make_lock(site.machine)
    lease = await ask(site, lock._acquire(site.config.patience))
    if lease is not None:
        site.begin(lease, what=what)
        await stay(site)
        site.leave()
        await give_back(site, lock._release())


async def ask(site: Site, protocol: Generator[Any, Any, Any]) -> Any:
    """The lease; None if the lock was not acquired, which ends the visit."""
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


async def sleep(site: Site, seconds: float) -> bool:
    """Whether it slept that long; False if it was cancelled meanwhile."""
    try:
        await site.machine.run(wait(None, site.machine.now() + seconds))
    except Cancelled:
        return False
    return True


async def give_back(site: Site, protocol: Generator[Any, Any, Any], *, wholly: bool = False) -> None:
    """Release, and end the visit. ``wholly``: after a successful release, no key of the client may be left."""
    try:
        await site.machine.run(protocol)
    except (HoldfastError, Cancelled) as error:
        site.note("unreleased", what=type(error).__name__)
        site.stage = "done"
    else:
        site.note("released")
        site.stage = "over" if wholly else "done"


def role_of(site: Site, cast: str, newcomer: str) -> str:
    """The letter of the cast for that client. If there are fewer letters than clients, the letters repeat."""
    name = site.machine.name
    return newcomer if name == NEWCOMER else cast["ABCDEFGH".index(name) % len(cast)]
