"""A question that the old texts leave open, answered by an exhausted search.

N clients find the same deadline in the key, past, and then all send GETSET. Can two of them win? One text says that
whoever gets back a past deadline has won (``getset``), another that whoever gets back exactly what it had read has
(``getset_equal``). And does it matter whether two clients may write the same deadline, because their clocks agree to
the last digit, or each writes another?
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from holdfast.lab.explorer import Explorer
from holdfast.lab.rows import config_of
from holdfast.lab.state import Config
from holdfast.lab.store import START_US, Store

__all__ = ["Answer", "answers", "two_winners"]

VARIANTS: Final = ("getset", "getset_equal")
MOST_CLIENTS: Final = 4


class Answer(NamedTuple):
    variant: str
    clients: int
    equal: bool  # whether two may write the same deadline
    two_win: bool
    states: int
    exhausted: bool

    def __str__(self) -> str:
        clocks = "may be equal" if self.equal else "all differ"
        found = "two can win" if self.two_win else "never two win"
        bound = "every interleaving" if self.exhausted else "not all interleavings"
        return f"{self.variant}, {self.clients} clients, deadlines {clocks}: {found} ({bound}, {self.states} states)"


def answers() -> Iterator[Answer]:
    for variant in VARIANTS:
        for equal in (True, False):
            for clients in range(2, MOST_CLIENTS + 1):
                yield two_winners(variant, clients, equal=equal)


def two_winners(variant: str, clients: int, *, equal: bool) -> Answer:
    config = question_config(variant, clients, equal=equal)
    explorer = Explorer(config, invariants=["MutualExclusion"])
    exhausted = explorer.search(0)
    return Answer(variant, clients, equal, bool(explorer.broken), explorer.states, exhausted)


def question_config(variant: str, clients: int, *, equal: bool) -> Config:
    """Somebody died with the lock; each of the others tries once, and whoever wins does not leave."""
    config = config_of(variant)

    def left_over() -> Any:
        store = Store()
        store.execute("SET", config.key, START_US - 1_000_000)
        return store

    return config._replace(
        new_store=left_over,
        clients=clients,
        kinds=(),
        late=False,
        patience=0.0,
        leaves_us=(),
        tick_us=0 if equal else 1,
    )
