"""Bells: how word from the server reaches those who wait for it.

Invariant. Bells are hints. Whatever is lost, late or doubled here costs time, never safety: a waiter asks again every
half second, and the keeper asks about every hold it keeps. What arrives is matched by token (a grant, which serves
one acquisition) or by key (somebody wrote it), never by order.

A client has one listener, whatever the number of its waiters, and one channel, whose name nobody else can guess or
would want to. A notification is ``token fence now_us slot``: at that time of the server's clock the lock was granted to
that token, for the ttl that its waiter has asked for (slot -1: no numbered permit). It has no duration, so a forged one
cannot stretch anything. Or it is ``token ask now_us pause_ms``: the waiter should send its step again after that pause.
A notification about a cached value has the key of its claim in place of the token: it is for every search of this
client that waits for that value. One of them may leave before it comes, and the others must hear of it all the same.

Clocks. ``Hold.rung`` places the server's time on ours, by the last step that brought back both; see ``lease``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from holdfast.lease import MAX_FENCE, Hold, Word
from holdfast.protocol.asks import Asks
from holdfast.protocol.effects import Bell
from holdfast.protocol.keepalive import Book
from holdfast.protocol.waiting import MUTE

__all__ = ["Switchboard"]

MOST_ASKS: Final = 500  # waiters' steps under way at once
MOST_NESTED: Final = 8  # locks of one caller that the server is told of

_PARTS: Final = 4
_LONGEST_PAUSE_MS: Final = 500  # a waiter that paused for longer would lose its place in the queue


class Switchboard:
    """Who in this process waits for word from the server. Single dict operations, so any thread may call."""

    def __init__(self, book: Book, new_bell: Callable[[], Bell], most_asks: int = MOST_ASKS) -> None:
        self.new_bell = new_bell
        self.asks = Asks(most_asks, new_bell)
        self.crowd = book.crowd
        self.channel = ""  # on which bells for this client are rung; set by its driver
        self.armed = False  # whether they are heard just now; set by its engine
        self.mute = False  # whether the server has forbidden it
        self.waiting: dict[str, Hold] = {}  # by token
        self.searching: dict[str, dict[Hold, None]] = {}  # by key of the claim: all that wait for that cached value
        self.watching: dict[str, Hold] = {}  # by key: the waiter who is first in the queue, and has it watched
        self._book = book

    def enlist(self, hold: Hold) -> str:
        """Let bells for this hold find it. On which channel they should be rung; empty as long as nobody listens.

        Who is in the queue already keeps its place while the listener is away.
        """
        if self.armed:
            self.waiting[hold.token] = hold
            return self.channel
        return MUTE if self.mute or hold.queued else ""

    def join_search(self, hold: Hold) -> None:
        """Let notifications that name the key of this hold reach it, beside all others that wait for that key."""
        key, group = hold.keys.main, None
        while group is None or self.searching.get(key) is not group:  # another thread has just dismissed the last one
            group = self.searching.setdefault(key, {})
            group[hold] = None

    def holds_any(self) -> bool:
        return bool(self._book.holds)

    def held_by(self, caller: Hashable) -> str:
        """The tokens that this thread or task holds through this client, as an acquire step says them."""
        return "".join([f";{hold.token}" for hold in self._book.held_by(caller)[:MOST_NESTED]])

    def is_crowded(self) -> bool:
        """Whether the keeper shows the presence of the waiters, because there are many."""
        return len(self.waiting) > self.crowd.most_alone

    def dismiss(self, hold: Hold) -> None:
        """It waits no longer."""
        self.waiting.pop(hold.token, None)
        group = self.searching.get(hold.keys.main)
        if group is not None:
            group.pop(hold, None)
            if not group:
                self.searching.pop(hold.keys.main, None)
                if group:  # another thread has joined it meanwhile
                    self.searching.setdefault(hold.keys.main, group)
        self.crowd.leave(hold)
        if self.watching:
            for key in hold.mains:
                if self.watching.get(key) is hold:
                    self.watching.pop(key, None)

    def deliver(self, message: bytes, now: float) -> None:
        """A notification has come. One that is malformed, or for no waiter of ours, is ignored."""
        parts = message.decode(errors="replace").rsplit(" ", _PARTS - 1)  # a key may have spaces
        waiter = self.waiting.get(parts[0])
        holds = [waiter] if waiter is not None else list(self.searching.get(parts[0], ()))
        if not holds or (word := _read(parts, now)) is None:
            return
        for hold in holds:
            hold.word = word
            if hold.bell is not None:  # else it has not come to wait yet, and will look before it does
                hold.bell.ring()

    def touched(self, key: str) -> None:
        """Somebody else wrote that key: whoever has it watched should look."""
        waiter = self.watching.pop(key, None)
        if waiter is not None and waiter.bell is not None:
            waiter.bell.ring()
        self._book.look_at(key)

    def look_again(self) -> None:
        """The listener was away: anything may have happened meanwhile, so everybody looks. The keeper does for a crowd,
        unless the client was closed."""
        asleep = self.crowd.members if not self._book.closed else {}
        for waiter in list(self.waiting.values()):
            if waiter.bell is not None and waiter.token not in asleep:
                waiter.bell.ring()
        self._book.look_for_crowd()
        self._book.look_at_all()

    def is_needed(self) -> bool:
        """Whether anybody would miss the listener."""
        return bool(self.waiting or self._book.is_watching())

    def forget(self) -> None:
        """In a forked child, or a new event loop: whoever waited is not here."""
        self.armed = False
        self.asks.forget()
        self.waiting.clear()
        self.searching.clear()
        self.watching.clear()


def _read(parts: list[str], now: float) -> Word | None:
    if len(parts) != _PARTS:
        return None
    _, fence, at_us, last = parts
    try:
        if fence == "ask":
            return Word(0, int(at_us), now, pause_ms=max(0, min(int(last), _LONGEST_PAUSE_MS)))
        word = Word(int(fence), int(at_us), now, int(last))
    except ValueError:
        return None
    return word if 0 < word.fence <= MAX_FENCE else None
