"""The local state of one client, to which a search can return.

A generator cannot be copied. But the inputs of a client determine what it does, so its local state is the list of its
inputs. Local states are interned, and the effect of an input on each is computed once, for all states of the search
that share it. To compute it, a machine is rebuilt by feeding it the same inputs; or reused, if one is still at that
point.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.lab.search.site import Input, Site
from holdfast.lab.simulation.process import is_awaited


class Local:
    """The local state of one client, and what the search sees of it."""

    def __init__(self, parent: Local | None, came_by: Input, make: Callable[[], Site]) -> None:
        self.parent = parent
        self.came_by = came_by
        self.make = make
        # Equal for equal inputs, also in other processes that were forked from the same parent. It uses the text of the
        # input, because -1 and -2 have the same hash in Python, and TTL answers both.
        self.mark: int = hash((0 if parent is None else parent.mark, repr(came_by)))
        # Whether the client has had an input after its start.
        self.moved: bool = parent is not None and (parent.moved or came_by[0] != "start")
        self.next: dict[Input, Local] = {}
        self.live: Site | None = None

    def look(self, site: Site) -> None:
        self.live = site
        self.notes = tuple(site.notes)
        self.requests = tuple(request for request, _ in site.requests.values())
        self.awaited = frozenset(number for number, (_, answer) in site.requests.items() if is_awaited(answer))
        self.timers = site.timers()
        self.stage = site.stage
        self.holds = site.granted
        self.granted_us = site.granted_us
        self.fence = site.fence
        self.until_us = site.until_us
        self.wants_us = site.wants_us
        self.waiting = site.waiting
        self.left = site.left
        self.settled = site.is_settled()
        self.asleep = site.is_asleep()
        self.links = tuple(site.links)
        self.closed_links = tuple(site.closed_links)
        self.shared_leases = site.shared_leases()

    def site(self) -> Site:
        """A machine in this state, for one use."""
        site, self.live = self.live, None
        if site is not None:
            return site
        inputs: list[Input] = []
        local: Local | None = self
        while local is not None and local.parent is not None:
            inputs.append(local.came_by)
            local = local.parent
        site = self.make()
        for an_input in reversed(inputs):
            site.feed(an_input)
        return site

    def after(self, an_input: Input) -> Local:
        """The local state after that input."""
        found = self.next[an_input] = Local(self, an_input, self.make)
        site = self.site()
        site.feed(an_input)
        found.look(site)
        return found
