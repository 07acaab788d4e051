"""Forks: connections, threads and leases of a driver belong to the parent, so a child must forget them."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forgetful(Protocol):
    def forget(self) -> None:
        """In a forked child: drop everything, and send nothing to the server."""


_drivers: WeakSet[Forgetful] = WeakSet()


def watch(driver: Forgetful) -> None:
    """Call ``forget`` of this driver in every forked child."""
    _drivers.add(driver)


def _forget_all() -> None:
    for driver in list(_drivers):
        driver.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
