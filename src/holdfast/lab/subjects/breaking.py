"""A lock that an operator breaks: one client of the row inspects the lock, and breaks the hold that it has seen.

The holder whose lock was broken may be stopped, and notice late. So mutual exclusion is not guaranteed here. Fences
must still rise, and a resource that checks them must refuse that holder once the next holder has written.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import role_of, take_and_give_back
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.rows import LAB_OPTIONS, NAME, fenced_config
from holdfast.names import keys_of
from holdfast.protocol.inspection.breaking import break_lock, check_break
from holdfast.protocol.inspection.locks import inspect

OPERATOR: Final = "o"


def breaking_config(roles: str = "nno", **bounds: Any) -> Config:
    """The fenced lock, whose clients use it (n), or break it once (o)."""
    config = fenced_config(**{"clients": len(roles), **bounds})

    async def visit(site: Site) -> None:
        if role_of(site, roles, newcomer="n") == OPERATOR:
            await break_hold(site)
        else:
            await take_and_give_back(site)

    return config._replace(program=visit, alike=False)


async def break_hold(site: Site) -> None:
    """Break the current hold, once. The operator does not want the lock itself."""
    keys, machine = keys_of(NAME), site.machine
    try:
        info = await machine.run(inspect(keys, LAB_OPTIONS, 1))
        if info is not None and info.holders:
            wanted = check_break(NAME, info.holders[0].fence, info.holders[0].id, "it is stuck", "")
            await machine.run(break_lock(machine, keys, LAB_OPTIONS, wanted))
    except (HoldfastError, Cancelled):
        pass
    site.stage = "over"
