"""A point in the life of one client, to which a search can come back.

A generator cannot be copied. But whatever a client does is decided by its inputs, so a point in its life is the list
of inputs that led there. Such points are interned, and the effect of an input on each is worked out once, however many
states of the search have it in common. Only then is a machine built again, by feeding it what it had before; or not
even that, if the machine that has just arrived there has not been led on since.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.lab.machine import is_awaited
from holdfast.lab.site import Input, Site

__all__ = ["Local"]


class Local:
    """A point in the life of one client, and what can be seen of it from outside."""

    __slots__ = (
        "asleep",
        "awaited",
        "came_by",
        "closed_links",
        "fence",
        "granted_us",
        "holds",
        "links",
        "live",
        "make",
        "mark",
        "moved",
        "next",
        "notes",
        "parent",
        "requests",
        "settled",
        "stage",
        "timers",
        "until_us",
        "waiting",
        "wants_us",
    )

    def __init__(self, parent: Local | None, came_by: Input, make: Callable[[], Site]) -> None:
        self.parent = parent
        self.came_by = came_by
        self.make = make
        # The same for the same life, also in another search of a process that was forked from the same parent.
        # By the text of the input, for Python gives -1 and -2 the same hash, and TTL answers both.
        self.mark: int = hash((0 if parent is None else parent.mark, repr(came_by)))
        self.moved: bool = parent is not None and (
            parent.moved or came_by[0] != "start"
        )  # anything has come of its coming
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
        self.settled = site.is_settled()
        self.asleep = site.is_asleep()
        self.links = tuple(site.links)
        self.closed_links = tuple(site.closed_links)

    def site(self) -> Site:
        """A machine at this point, for one use."""
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
        """Where that input leads."""
        found = self.next[an_input] = Local(self, an_input, self.make)
        site = self.site()
        site.feed(an_input)
        found.look(site)
        return found
