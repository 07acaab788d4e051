"""The lock of production on memcached, on a model of memcached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from holdfast.lab.search.state import Config
from holdfast.lab.servers.memcached import Memcached
from holdfast.lab.subjects.rows import fenced_config

_LONGER_US: Final = 4_000_000  # an item may outlive its ttl by three seconds, and a waiter asks every 0.1 s


class Resumed(Memcached):
    """A server that was stopped for longer than a ttl, and answers two requests before it reads its clock."""

    stopped_us = 5_000_000
    waited = 2


def memcached_config(new_store: type[Memcached] = Memcached, **bounds: Any) -> Config:
    """A lock on memcached: it has no fence, and its waiters poll. So a client comes at any time, and waits briefly."""
    config = fenced_config(**{"clients": 2, "late": True, "patience": 0.3, **bounds})

    def make_lock(driver: Any) -> Any:
        lock = config.make_lock(driver)
        lock._options = replace(lock._options, fenced=False)
        return lock

    return config._replace(
        make_lock=make_lock, new_store=new_store, idle_us=800_000, newcomer_us=config.newcomer_us + _LONGER_US
    )
