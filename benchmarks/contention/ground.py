"""The memory that the locks guard: shared by all participants of a run, in all processes.

For each lock there are three machine words: the number of the holder, the count of acquisitions, and the last fence. A
participant that enters must find no holder, and writes its own number. When it leaves, that number must still be there.
The count is read, then written, without protection, so two holders at once would lose an increment. At the end the
count must equal the number of all acquisitions. None of this costs a request.

After these words comes a log of the holders of the first lock in their order: one word for each acquisition, until the
log is full.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["Ground"]

_WORD: Final = 8
_PER_LOCK: Final = 3
_LOGGED: Final = 1 << 18

Step = Callable[[int], bool]  # takes the participant's number (from 1); False: another participant is inside


class Ground:
    def __init__(self, path: Path, locks: int) -> None:
        self._locks = locks
        size = (locks * _PER_LOCK + _LOGGED) * _WORD
        with path.open("ab") as file:
            file.truncate(size)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._memory).cast("q")

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def steps(self, lock: int) -> tuple[Step, Step]:
        """Functions to enter and to leave. Call them while the lock is held; both are short."""
        words, inside, count = self._words, lock * _PER_LOCK, lock * _PER_LOCK + 1
        log = self._locks * _PER_LOCK
        last_logged = log + _LOGGED - 1

        def enter(me: int) -> bool:
            alone = not words[inside]
            words[inside] = me
            number = words[count]
            words[count] = number + 1
            if not lock and log + number < last_logged:
                words[log + number] = me
            return alone

        def leave(me: int) -> bool:
            still = words[inside] == me
            words[inside] = 0
            return still

        return enter, leave

    def fence(self, lock: int) -> Step:
        """A function that checks that a fence is greater than all earlier ones. Call it while the lock is held."""
        words, last = self._words, lock * _PER_LOCK + 2

        def rises(fence: int) -> bool:
            before, words[last] = words[last], fence
            return fence > before

        return rises

    @property
    def entered(self) -> int:
        """The count of acquisitions of all locks. It is too low if two holders were inside at once."""
        return sum(self._words[lock * _PER_LOCK + 1] for lock in range(self._locks))

    def order(self) -> list[int]:
        """The holders of the first lock, in their order."""
        log = self._locks * _PER_LOCK
        return list(self._words[log : log + min(self._words[1], _LOGGED - 1)])
