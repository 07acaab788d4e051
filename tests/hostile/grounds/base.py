"""What the harness needs of the servers of a run."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.hostile.plan import Fault, FaultKind
from tests.hostile.proxy import Proxy

__all__ = ["Ground", "Noted", "Route", "address_rewriter", "during"]

# What a fault tells the judges (tests/hostile/judges.py says what it means): ``displaces``, ``until``, ``places``,
# ``certain``, and what only a reader of the history wants to know.
Noted = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """How one worker process reaches the servers: through proxies of its own."""

    url: str
    proxies: Sequence[Proxy]

    @property
    def connections(self) -> list[str]:
        return [address for proxy in self.proxies for address in proxy.connections]


class Ground(ABC):
    """Servers, and the faults that they can have: each is a method, ``_kill_primary`` for "kill primary".

    A fault returns when it is over and the servers are in order again. What it returns is noted for the judges.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    engine: ClassVar[str]  # in holdfast.engines.capabilities
    faults: ClassVar[Mapping[str, FaultKind]]

    def __init__(self, note: Callable[..., None]) -> None:
        """``note`` writes an event into the history: of what the servers did by themselves."""
        self.note = note
        self.busy = threading.RLock()  # while a fault has the servers to itself, or they are looked at
        self.routes: dict[str, Route] = {}

    def strike(self, fault: Fault) -> Noted:
        act: Callable[[Fault], Noted | None] = getattr(self, "_" + fault.name.replace(" ", "_"))
        if not self.faults[fault.name].rest:
            return act(fault) or {}
        with self.busy:
            return act(fault) or {}

    @abstractmethod
    def route(self, place: str) -> Route:
        """A way of its own to the servers for this place; kept in ``routes``."""

    @abstractmethod
    def tokens(self) -> Iterable[tuple[str, bytes]]:
        """The tokens of holders and waiters, with the key that each is in; not those whose time is over."""

    def taken(self) -> list[str]:
        """The names of locks that are held, or are reserved for a waiter."""
        return sorted({key.partition(":hf1:")[0] for key, _ in self.tokens() if ":hf1:queue" not in key})

    @abstractmethod
    def stop(self) -> None:
        """End the servers."""

    def close(self) -> None:
        for route in self.routes.values():
            for proxy in route.proxies:
                proxy.close()
        self.stop()


def address_rewriter(ports: Mapping[int, int]) -> Callable[[bytes], bytes]:
    """Give a client other ports for these addresses on loopback: of Sentinels, of a cluster's map, of redirections.

    All ports have five digits, so the lengths in the reply stay true.
    """
    known = {str(port).encode(): str(other).encode() for port, other in ports.items()}
    assert all(len(port) == len(other) == 5 for port, other in known.items()), ports
    address = re.compile(rb"(127\.0\.0\.1(?::|\r\n(?:\$4\r\nport\r\n)?(?:\$5\r\n|:)))(\d{5})\b")
    return lambda reply: address.sub(lambda found: found[1] + known.get(found[2], found[2]), reply)


def during(
    seconds: float,
    proxies: Iterable[Proxy],
    begin: Callable[[Proxy], None],
    end: Callable[[Proxy], None] = Proxy.heal,
) -> None:
    """Let this happen to the proxies for a while."""
    begun = []
    try:
        for proxy in proxies:
            begin(proxy)
            begun.append(proxy)
        time.sleep(seconds)
    finally:
        for proxy in begun:
            end(proxy)
