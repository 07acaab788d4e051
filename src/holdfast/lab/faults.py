"""What can go wrong in a search: the kinds of fault, by name."""

from __future__ import annotations

from typing import Final

__all__ = ["BEFALLS_ALL", "DAILY", "FAULTS", "TREACHERY"]

FAULTS: Final = {
    "crash": "a client ends at once, before or after its step was executed, or while it holds or waits",
    "stall": "a client does nothing for half a ttl, and then goes on",
    "pause": "a client does nothing for longer than a ttl, and then goes on",
    "skew": "the wall clock of a client is wrong by more than a ttl",
    "lost_request": "a step never reaches the server",
    "lost_reply": "a step is executed, and its sender does not learn of it; or a wake-up is lost",
    "late_reply": "a step is executed, and its reply arrives late, perhaps after its sender has given it up",
    "duplicate": "a step is executed, and once more later on",
    "delay": "a step is executed only after its sender has given it up, past later steps of the same client",
    "cancel": "whoever waits for a client cancels it (asyncio) or hits Ctrl-C",
    "script_flush": "the server forgets its scripts",
    "restart": "the server starts again, empty",
    "failover": "a replica takes over that has not got the last writes",
    "eviction": "the server throws the key away to make room",
    "clock_jump": "the server's clock jumps ahead by more than a ttl",
    "clock_back": "the server's clock is set back by half a ttl",
}

BEFALLS_ALL: Final = frozenset({"restart", "failover", "eviction", "script_flush", "clock_jump", "clock_back"})

# What happens to anybody every day is searched first, then what networks and impatient callers do; and last, what
# breaks any lock that leans on the word of one server: that it does not forget, and that its clock does not jump.
DAILY: Final = frozenset({"crash", "stall", "pause"})
TREACHERY: Final = frozenset({"restart", "failover", "eviction", "clock_jump", "clock_back"})
