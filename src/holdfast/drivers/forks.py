"""What a forked child must know: whatever a driver has, connections, threads, leases, is the parent's."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["watch"]


class Forgetful(Protocol):
    def forget(self) -> None:
        """In a forked child: let go of everything, without a word to the server."""


_drivers: WeakSet[Forgetful] = WeakSet()


def watch(driver: Forgetful) -> None:
    """See to it that this driver forgets in every forked child."""
    _drivers.add(driver)


def _forget_all() -> None:
    for driver in list(_drivers):
        driver.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
