"""What a search sees of a room: who is inside by the server's clock, and who would fit.

A room has no one key that says who has it, so what the search asks of the lock's key it asks here instead: whether a
waiter could come in, and whether an attempt that came to nothing has left a place behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.names import Keys
from holdfast.protocol.room import ALL, ANY, room_keys

__all__ = ["RoomView"]

WRITER: Final = -2.0


class RoomView:
    in_turn = True
    has_owner = False

    def __init__(self, keys: Keys, wanted: Mapping[str, str]) -> None:
        self._wanted = dict(wanted)  # by the name of the client
        self._holders = room_keys(keys)[0].encode()

    def inside(self, store: Any) -> dict[bytes, float]:
        """The holders, and the slot of each, as in lua/room.lua."""
        entries: dict[bytes, float] = store.values.get(self._holders, {})
        slots = {token: entries.get(b"slot " + token) for token, end in entries.items() if end > store.now_us}
        return {token: slot for token, slot in slots.items() if slot is not None}

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether that client could come in, if it is its turn; or, if nobody waits, whether nobody is inside."""
        inside = self.inside(store)
        wanted = ALL if name is None else self._wanted[name]
        if not inside or wanted == ALL:
            return not inside
        alone = WRITER in inside.values()
        return not alone and (wanted == ANY or len(inside) < int(wanted[1:]))

    def has_place(self, store: Any, name: str) -> bool:
        return any(token.startswith(f"{name}-".encode()) for token in self.inside(store))
