"""The body of an ``async with``, which is cancelled when the lease that it relies on is lost.

As asyncio.timeout does it: the task is cancelled once, and on the way out that one cancellation is taken back and
becomes an error, unless somebody else has cancelled the task too, in which case theirs goes on.
"""

from __future__ import annotations

import asyncio

__all__ = ["Body"]


class Body:
    __slots__ = ("_others", "cut", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self.task = task
        self.cut = False  # we have cancelled it
        self._others = task.cancelling()

    def cancel(self) -> None:
        if not self.cut and not self.task.done():
            self.cut = True
            self.task.cancel("the lease of this block was lost")

    async def leave(self, error: BaseException | None) -> tuple[BaseException | None, bool]:
        """The error of a body that we have cancelled, less that cancellation; and whether it was what ended it."""
        ours_alone = self.task.uncancel() <= self._others
        if isinstance(error, asyncio.CancelledError):
            return (None, True) if ours_alone else (error, False)
        if ours_alone:
            try:
                await asyncio.sleep(0)  # the body ended before our cancellation reached it: it is met here
            except asyncio.CancelledError as cancelled:
                if self.task.cancelling() > self._others:  # and with it somebody else's, which goes on
                    return cancelled, False
        return error, False
