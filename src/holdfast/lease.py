"""What a user holds: the view of one acquisition that ``acquire`` returns.

The record behind it is a Hold (protocol/hold.py), which protocols write and the keeper renews. They are two objects
because the keeper refers to the record all the time: a lease that the user drops can still be collected, and noticed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

if TYPE_CHECKING:
    from holdfast.protocol.hold import Hold

MAX_FENCE: Final = 2**53 - 1  # up to here Lua and JSON count exactly; must match lua/include/fence.lua


def _tell(lease: ref[BaseLease], on_lost: Callable[[Any], object]) -> object:
    """Call on_lost, unless the lease was dropped. The reference is weak: a hold must not keep its lease alive."""
    alive = lease()
    return None if alive is None else on_lost(alive)


class BaseLease:
    """What ``acquire`` returns. Always true; ends when it is released, lost, or dropped."""

    __slots__ = ("__weakref__", "_driver", "_hold")

    def __init__(self, driver: Any, hold: Hold) -> None:
        self._driver = driver
        self._hold = hold
        if callable(hold.options.on_lost):
            told = partial(_tell, ref(self), hold.options.on_lost)
            if hold.options.cancels:
                hold.observer = told
            else:
                hold.notify = told

    @property
    def name(self) -> str:
        return self._hold.keys.name

    @property
    def key(self) -> str:
        """The name with its namespace, as messages show it."""
        return self._hold.keys.key

    @property
    def token(self) -> str:
        """What the lock's key holds on the server. It is a capability: keep it out of logs."""
        return self._hold.token

    @property
    def fence(self) -> int:
        """A number that is greater for every later holder. Let the resource refuse a lower fence than it has seen.

        On memcached, which has no fences, it is None.
        """
        fence: Any = self._hold.public_fence
        return fence  # type: ignore[no-any-return]

    @property
    def fences(self) -> dict[str, int]:
        """The fence of each name, where several were locked at once; ``fence`` is the largest."""
        return self._hold.fences(self.fence)

    @property
    def held(self) -> bool:
        """Whether the holder may still rely on it."""
        return self._hold.valid(self._driver.now())

    def remaining(self) -> float:
        """Seconds for which the holder may still rely on it, a safe lower bound; 0.0 when it is over."""
        return self._hold.remaining(self._driver.now())

    @property
    def reason(self) -> str:
        """Why it was lost; empty as long as it is not."""
        return self._hold.reason or self._hold.why_lost(self._driver.now())

    def check(self) -> None:
        """Raise LeaseLost unless it is still held (NotHeld if it was released)."""
        self._hold.check(self._driver.now())

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise TypeError("a Lease cannot be pickled: use hand_over(), or acquire the lock in the other process")

    def __repr__(self) -> str:
        hold = self._hold
        permit = f" ({hold.permit})" if hold.permit else ""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        fence = f", fence {self.fence}" if self.fence is not None else ""
        return f"<{hold.state(self._driver.now())} {kind} on {self.key!r}{permit}{fence}>"

    def __del__(self) -> None:
        # At interpreter shutdown these attributes may be gone already, and a warning would not be shown.
        try:
            hold = self._hold
            registry = self._driver.registry
            if hold in registry.holds and hold.drop(registry):
                if registry.closed:  # close() has released it
                    return
                warnings.warn(
                    f"a lease on {hold.key!r} was dropped without release(): it is not renewed any more",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        except (AttributeError, TypeError):
            pass
