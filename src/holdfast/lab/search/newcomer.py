"""A client that comes when all others are done: it must get the lock, or they have left something behind."""

from __future__ import annotations

from holdfast.lab.search.server import Server
from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config


def is_served(server: Server, config: Config, store: int, now: int) -> bool:
    """Whether a new client gets the lock within a ttl and the bound."""
    site = Site("N", config._replace(patience=None))
    end = now + config.ttl_us + config.newcomer_us
    site.feed(("start", now))
    while not site.served:
        if site.requests:
            request, _ = next(iter(site.requests.values()))
            done = server.execute(store, request, "bell:N")
            store = done.store
            site.feed(("answer", now, request.number, done.replies))
            for channel, text in done.notifications:
                if channel == b"bell:N":
                    site.feed(("bell", now, text))
        else:
            timers = site.timers()
            if not timers or timers[0] > end:
                break
            store = server.later(store, max(0, timers[0] - now))
            now = max(now, timers[0])
            site.feed(("time", now))
    served = site.served
    site.discard()
    return served
