"""Clients that do more than acquire and release.

What a client does is written as letters:

| letter | what the client does |
|---|---|
| a | acquires; 0: without waiting; i: with so little patience that it often gives up, and abandons its place |
| t | adopts the hold of the posted ticket, if there is one; else acquires |
| s | stays |
| + - | extends its lease by more than a ttl; by less |
| d | changes from writer to reader |
| k | hands over, and keeps the ticket: if that fails, it relies on its lease |
| h | hands over, and posts the ticket |
| r | releases |
| l | leaves: its lease ends, and the lock stays taken for a while |
| p | pauses, and holds nothing meanwhile |
| o | is an operator: breaks the hold that it sees |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import NEWCOMER, ask, give_back, sleep, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.breaking import break_hold
from holdfast.lab.subjects.handover import come_in, find_ticket, pass_on
from holdfast.lab.subjects.rows import TTL
from holdfast.protocol.effects import Effects
from holdfast.protocol.kinds.handover import hand_over
from holdfast.protocol.kinds.rwlock import downgrade_lease
from holdfast.protocol.leases import extend_lease, leave_lease, release_lease

_IMPATIENT: Final = 0.3
_PAUSE: Final = 0.4
_LEAVES_FOR: Final = 0.5
_LONGER, _SHORTER = TTL + 1.0, 0.5

Make = Callable[..., Config]


def visits_config(make: Make, *visits: str, **bounds: Any) -> Config:
    """A lock of ``make``; for each client, what it does. A newcomer acquires and releases."""
    # A hold that its client has left, or handed over, lasts for a while: see handover_config.
    letters = {*"".join(visits)}
    outlasts = {"idle_us_per_fault": 1_500_000} if letters & {*"hl"} else {}
    # A client that adopts may come when there is a ticket.
    config = make(**{"clients": len(visits), "late": "t" in letters, **outlasts, **bounds})

    async def program(site: Site) -> None:
        name = site.machine.name
        await _Visit(site).perform("ar" if name == NEWCOMER else visits["ABCDEFGH".index(name)])

    return config._replace(program=program, alike=len(set(visits)) == 1)


class _Visit:
    """One client, and the lease that it has, if any."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = site.config.make_lock(site.machine)  # the same object for all its holds
        self._lease: Any = None

    async def perform(self, letters: str) -> None:
        site = self._site
        for letter in letters:
            if letter in "a0it":
                self._lease = await self._come_in(letter)
                if self._lease is not None:
                    site.begin(self._lease)
                    site.stage = "acts"
            elif letter == "p":
                await sleep(site, _PAUSE)
            elif letter == "o":
                await break_hold(site)
            elif self._lease is not None:
                await self._hold(letter, self._lease)

    async def _come_in(self, letter: str) -> Any:
        site = self._site
        ticket = await find_ticket(site) if letter == "t" else ""
        patience = {"i": _IMPATIENT, "0": 0.0}.get(letter, site.config.patience)
        return await ask(site, come_in(self._lock, ticket, patience))

    async def _hold(self, letter: str, lease: Any) -> None:
        site = self._site
        if letter == "s":
            site.stage, site.granted_us = "holds", site.now_us
            await stay(site)
            site.stage = "acts"
        elif letter in "+-dk":
            await self._change(letter, lease)
        else:
            site.leave()
            self._lease = None
            site.left = letter != "r"
            if letter == "r":
                await give_back(site, release_lease(lease))
            else:
                await give_back(site, pass_on(site, lease) if letter == "h" else leave_lease(lease, _LEAVES_FOR))

    async def _change(self, letter: str, lease: Any) -> None:
        site = self._site
        if letter == "d":
            site.note("shared", what="read")  # before the step: from now on it relies on no more
        changing: dict[str, Callable[[], Effects[Any]]] = {
            "d": lambda: downgrade_lease(lease),
            "k": lambda: hand_over(lease),
            "+": lambda: extend_lease(lease, _LONGER),
            "-": lambda: extend_lease(lease, _SHORTER),
        }
        try:
            await site.machine.run(changing[letter]())
        except (HoldfastError, Cancelled):
            return  # the lease is as it was
        if letter == "k":
            site.leave()
            site.stage, self._lease = "done", None
