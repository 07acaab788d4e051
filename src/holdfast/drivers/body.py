"""The body of an ``async with``, which is cancelled when its lease is lost.

As in asyncio.timeout, the task is cancelled once. When the body is left, that cancellation is undone, and the lock
raises LeaseLost instead. If other code has cancelled the task too, the task stays cancelled.
"""

from __future__ import annotations

import asyncio


class Body:
    __slots__ = ("_others", "cut", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self.task = task
        self.cut = False  # whether we have cancelled it
        self._others = task.cancelling()

    def cancel(self) -> None:
        if not self.cut and not self.task.done():
            self.cut = True
            self.task.cancel("the lease of this block was lost")

    async def leave(self, error: BaseException | None) -> tuple[BaseException | None, bool]:
        """The body's error, or None for our own cancellation; and whether our cancellation ended the body."""
        ours_alone = self.task.uncancel() <= self._others
        if isinstance(error, asyncio.CancelledError):
            return (None, True) if ours_alone else (error, False)
        if ours_alone:
            try:
                await asyncio.sleep(0)  # the body ended before our cancellation arrived, which is raised here
            except asyncio.CancelledError as cancelled:
                if self.task.cancelling() > self._others:  # other code cancelled the task too
                    return cancelled, False
        return error, False
