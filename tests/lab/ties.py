"""Which part of a schedule has the same outcome on a server that is a little late, as every real server is.

The search lets steps take no time, so two times can be equal there: a waiter that asks every half second is silent for
exactly a second, and that is not too long. A millisecond more is. A real run cannot decide such a tie, so it is cut
before.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.lab.replay.real import _kind
from holdfast.lab.search.model import Model
from holdfast.lab.search.server import Done, Server
from holdfast.lab.search.site import Request
from holdfast.lab.search.state import Choice, Config

__all__ = ["LATE_US", "without_ties"]

LATE_US: Final = 250_000


class Tie(Exception):
    """A step would have another outcome at most ``LATE_US`` earlier or later."""


class _Strict(Server):
    """A server that refuses ties: each step is also executed with the clock set forward, and set back."""

    def execute(self, store_mark: int, request: Request, channel: str) -> Done:
        if len({self._outcome(mark, request, channel) for mark in self._around(store_mark)}) > 1:
            raise Tie
        return super().execute(store_mark, request, channel)

    def later(self, store_mark: int, us: int) -> int:
        then = super().later(store_mark, us)
        if len({self.lock(mark)[0] for mark in self._around(then)}) > 1:
            raise Tie
        return then

    def _around(self, store_mark: int) -> list[int]:
        return [super(_Strict, self).later(store_mark, us) for us in (-LATE_US, 0, LATE_US)]

    def _outcome(self, store_mark: int, request: Request, channel: str) -> tuple[Any, ...]:
        """What a replay compares."""
        done = super().execute(store_mark, request, channel)
        woken = tuple(sorted(name for name, _ in done.notifications))
        return _kind(done.replies), woken, self.lock(done.store)[0]


def without_ties(config: Config, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """These choices, up to the first whose outcome is a tie."""
    model = Model(config._replace(most_faults=len(choices)))
    model.asks_newcomers = False
    model.server = _Strict(config.new_store(), config.key.encode(), config.queue.encode())
    state = model.first()
    for place, choice in enumerate(choices):
        try:
            state, _ = model.after(state, choice)
        except Tie:
            return choices[:place]
    return choices
