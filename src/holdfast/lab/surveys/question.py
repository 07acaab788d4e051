"""A question that the old texts leave open, answered by a complete search.

N clients read the same past deadline from the key, and then all send GETSET. Can two of them win? In one text, a client
wins if it gets back a past deadline (``getset``); in another text, if it gets back exactly the deadline that it had
read (``getset_equal``). Two clients may write the same deadline, if their clocks agree to the last digit. Does the
answer depend on that?
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.servers.store import START_US, Store
from holdfast.lab.subjects.rows import config_of

VARIANTS: Final = ("getset", "getset_equal")
MOST_CLIENTS: Final = 4


class Answer(NamedTuple):
    variant: str
    clients: int
    equal: bool  # two clients may write the same deadline
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
    """The holder has crashed; each of the clients tries once, and a winner does not release."""
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
