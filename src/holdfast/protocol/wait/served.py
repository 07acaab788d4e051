"""What a step is about, and what its reply shows of the server: whether it takes something new.

Invariant. A server that is full, loading or a replica answers some steps and refuses others. It serves again once it
has written something new, or has served a step that it refused before; a clean-up that wrote nothing shows nothing.
"""

from __future__ import annotations

from typing import Final

from holdfast.protocol.effects import Command, Step

# Steps that take something new. A server that serves one of them serves them all.
_TAKING: Final = frozenset(
    ("acquire", "multi_acquire", "pool_acquire", "adopt", "multi_adopt", "pool_adopt", "latch_count_down")
)
_CLAIMED: Final = 2  # as in lua/cache/look.lua
BURYING: Final = frozenset(("abandon", "multi_abandon", "pool_abandon"))


def name_of(op: Step | Command) -> str:
    return op.script if isinstance(op, Step) else str(op.args[0])


def has_written(op: Step | Command, reply: object) -> bool:
    """Whether the server has written something new for it. An abandon says whether it has written its tombstone."""
    if not isinstance(op, Step):
        return False
    if op.script == "cache_look":
        return isinstance(reply, list) and reply[0] == _CLAIMED  # a full server still serves the values that it has
    buried = op.script in BURYING and op.args[-1] != "0" and isinstance(reply, list) and reply[-1] == 1
    return buried or op.script in _TAKING


def key_of(op: Step | Command) -> str:
    return op.keys[0] if isinstance(op, Step) else str(op.args[1]) if len(op.args) > 1 else ""
