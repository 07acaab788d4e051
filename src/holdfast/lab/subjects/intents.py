"""Locks on etcd, beyond acquire and release: what a client does with a hold, and what its requests may meet meanwhile.

What a client does is written as letters:

| letter | what the client does |
|---|---|
| a | acquires; 0: without waiting |
| t | adopts the hold of the posted ticket; without a ticket that can be used, acquires |
| s | stays |
| p | pauses for a moment, and then wants a lock again |
| + | extends its lease, by more than a ttl |
| d | changes from writer to reader |
| k | hands over, and keeps the ticket: if that fails, it relies on its lease |
| h | hands over, and posts the ticket |
| r | releases |

In "again" the giver takes its own ticket back if no other client was faster: as a second process of its kind would. The
keys that it has handed over have its name, so only the invariants of holders are judged there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import AT_ONCE, NEWCOMER, ask, give_back, sleep, stay
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.etcd import etcd_config
from holdfast.lab.subjects.handover import come_in, find_ticket, pass_on
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.protocol.effects import Effects
from holdfast.protocol.kinds.handover import hand_over
from holdfast.protocol.kinds.rwlock import downgrade_lease
from holdfast.protocol.leases import extend_lease, release_lease

_MOMENT: Final = 0.4  # seconds
_LONGER: Final = 4.0  # seconds, of a ttl of 3


def visits_config(make: Callable[..., Config], *visits: str, **bounds: Any) -> Config:
    """A lock of ``make``, and for each client what it does. A newcomer acquires and releases."""
    config = make(**{"clients": len(visits), "leaves_us": AT_ONCE, **bounds})

    async def program(site: Site) -> None:
        name = site.machine.name
        await _visit(site, "ar" if name == NEWCOMER else visits["ABCDEFGH".index(name)])

    return config._replace(program=program, alike=len(set(visits)) == 1)


async def _visit(site: Site, letters: str) -> None:
    lock, lease = site.config.make_lock(site.machine), None
    for letter in letters:
        if letter in "a0t":
            ticket = await find_ticket(site) if letter == "t" else ""
            lease = await ask(site, come_in(lock, ticket, 0.0 if letter == "0" else site.config.patience))
            if lease is not None:
                site.begin(lease)
        elif letter == "p":
            await sleep(site, _MOMENT)
        elif lease is None:
            continue
        elif letter == "s":
            await stay(site)
        elif letter in "+dk":
            await _use(site, letter, lease)
        else:
            site.leave()
            await give_back(site, release_lease(lease) if letter == "r" else pass_on(site, lease))
            lease = None


async def _use(site: Site, letter: str, lease: Any) -> None:
    using: Effects[Any]
    if letter == "d":
        site.note("shared", what="read")  # before the step: it relies on no more from now on
        using = downgrade_lease(lease)
    else:
        using = extend_lease(lease, _LONGER) if letter == "+" else hand_over(lease)
    try:
        await site.machine.run(using)
    except (HoldfastError, Cancelled):
        pass  # the lease is as it was


ETCD_EXTENDED: Final = partial(visits_config, etcd_config, "a+htr", "tr", late=True, leaves_us=())
ETCD_AGAIN: Final = partial(visits_config, etcd_config, "ahptr", "tsr", late=True)
ETCD_FAILS: Final = partial(visits_config, etcd_config, "aksr", "ar", stay_us=5_600_000, leaves_us=())
ETCD_TRIES: Final = partial(visits_config, partial(etcd_config, semaphore_config, permits=1), "0sr", "0r")
ETCD_READER: Final = partial(
    visits_config, partial(etcd_config, partial(rwlock_config, "WRW")), "adsr", "0r", "ar", leaves_us=()
)
