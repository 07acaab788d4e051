"""The memory that the locks guard: shared by all participants of a run, whatever process they are in.

For each lock there are three words: who is inside, how many have been, and the last fence. Whoever enters finds nobody
inside and writes its own number; whoever leaves finds that number still there. The count is read, then written, by
plain code, so that two at once would lose one: it must end at the number of all acquisitions. None of it costs a
request.

What follows is the order in which the first lock was had: one word an entry, as far as they last.
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

Step = Callable[[int], bool]  # given the participant's number (from 1), says whether all was well


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
        """How to enter and how to leave. What a lock guards is short: these run inside it."""
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
        """Whether this fence is greater than all before. To be asked inside the lock."""
        words, last = self._words, lock * _PER_LOCK + 2

        def rises(fence: int) -> bool:
            before, words[last] = words[last], fence
            return fence > before

        return rises

    @property
    def entered(self) -> int:
        """How often all the locks together were had, if no two were ever had at once."""
        return sum(self._words[lock * _PER_LOCK + 1] for lock in range(self._locks))

    def order(self) -> list[int]:
        """Who had the first lock, one after the other."""
        log = self._locks * _PER_LOCK
        return list(self._words[log : log + min(self._words[1], _LOGGED - 1)])
