"""Holds that are handed over: some clients hand over by a ticket, and some look for a ticket before they acquire.

A ticket is written to a key on the same server. So it can be lost, arrive late, be read by two clients, and exist after
its use. If a client finds that its ticket is used up, it acquires as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from holdfast.errors import HoldfastError, InvalidConfig, NotAcquired
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import ask, give_back, role_of, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.simulation.programs import PLAIN
from holdfast.lab.subjects.rows import fenced_config
from holdfast.protocol.effects import STOPPED, Command, StepFailed, call
from holdfast.protocol.intents.requests import Get, GrantLease, Put, Txn
from holdfast.protocol.kinds.handover import adopt, hand_over, read_ticket
from holdfast.protocol.leases import release_lease

BOARD: Final = "tickets"
GIVES: Final = "gb"
TAKES: Final = "tb"
_TIMEOUT: Final = 1.0
_KEPT: Final = 60  # seconds


def handover_config(make: Callable[..., Config] = fenced_config, roles: str = "gtn", **bounds: Any) -> Config:
    """The row of ``make``, whose clients hand over (g), adopt (t), do both (b), or neither (n)."""
    # A hold that was handed over and not adopted lasts for its ttl. So a waiter behind a silent waiter may have to wait
    # until the silent one is removed from the queue, and for its own next refresh: longer than any client stays.
    config = make(**{"clients": len(roles), "idle_us_per_fault": 1_500_000, **bounds})

    async def visit(site: Site) -> None:
        await _visit(site, role_of(site, roles, newcomer="n"))

    return config._replace(program=visit, alike=config.alike and len(set(roles)) == 1)


async def _visit(site: Site, role: str) -> None:
    lock = site.config.make_lock(site.machine)
    ticket = await find_ticket(site) if role in TAKES else ""
    lease = await ask(site, come_in(lock, ticket, site.config.patience))
    if lease is None:
        return
    site.begin(lease)
    await stay(site)
    site.leave()
    await give_back(site, pass_on(site, lease) if role in GIVES else release_lease(lease))


async def find_ticket(site: Site) -> str:
    """The posted ticket, or "". The client does not want the lock yet, so other waiters need not wait for it."""
    try:
        found: str = await site.machine.run(_read_board(site))
    except (HoldfastError, Cancelled):
        return ""
    return found


def come_in(lock: Any, ticket: str, patience: float | None) -> Generator[Any, Any, Any]:
    """Adopt, or acquire without a ticket that can be used."""
    if ticket:
        try:
            return (yield from adopt(lock, read_ticket(ticket, "")))
        except (NotAcquired, InvalidConfig):
            pass  # the ticket was used up, or for another lock
    return (yield from lock._acquire(patience))


def pass_on(site: Site, lease: Any) -> Generator[Any, Any, None]:
    """Hand over, and post the ticket."""
    try:
        ticket = yield from hand_over(lease)
    except STOPPED:
        if lease._hold in lease._driver.registry.holds:
            yield from release_lease(lease)
        raise
    yield from _write_board(site, str(ticket))


# A request for the ticket's key is sent once. If it fails, there is no ticket, and the hold expires by its ttl.


def _read_board(site: Site) -> Generator[Any, Any, str]:
    try:
        if site.machine.session is None:
            found = yield from call(Command(("GET", BOARD)), _TIMEOUT)
            return found.decode() if found else ""
        answer = yield from call(_plain(site, Txn((), (Get(BOARD),))), _TIMEOUT)
        items = answer.result.results[0].items
        return str(items[0].value) if items else ""
    except StepFailed:
        return ""


def _write_board(site: Site, ticket: str) -> Generator[Any, Any, None]:
    try:
        if site.machine.session is None:
            yield from call(Command(("SET", BOARD, ticket, "PX", str(_KEPT * 1000))), _TIMEOUT)
            return
        granted = yield from call(_plain(site, GrantLease(_KEPT)), _TIMEOUT)
        yield from call(_plain(site, Txn((), (Put(BOARD, ticket, granted.result.lease),))), _TIMEOUT)
    except StepFailed:
        pass


def _plain(site: Site, request: Any) -> Command:
    return Command((PLAIN, request, site.machine.router.channel))
