"""The body of an ``async with``, which is cancelled when the lease that it relies on is lost.

As asyncio.timeout does it: the task is cancelled once, and on the way out that one cancellation is taken back and
becomes an error, unless somebody else has cancelled the task too, in which case theirs goes on.
"""

from __future__ import annotations

import asyncio

__all__ = ["Body"]


class Body:
    __slots__ = ("_cancelled", "_others", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._others = task.cancelling()
        self._cancelled = False

    def cancel(self) -> None:
        if not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel("the lease of this block was lost")

    async def leave(self, error: BaseException | None) -> tuple[BaseException | None, bool]:
        """The body's error, less a cancellation of ours; and whether there was one."""
        if not self._cancelled:
            return error, False
        ours_alone = self._task.uncancel() <= self._others
        if isinstance(error, asyncio.CancelledError):
            return (None, True) if ours_alone else (error, False)
        if ours_alone:
            try:
                await asyncio.sleep(0)  # the body ended before our cancellation reached it: it is met here
            except asyncio.CancelledError as cancelled:
                if self._task.cancelling() > self._others:  # and with it somebody else's, which goes on
                    return cancelled, False
        return error, False
