"""Threads for what takes long, so that it cannot delay the renewal of leases.

A blocking client has two that call functions of the user: one calls ``on_lost``, the other calls the hooks of
``on_event`` for what the keeper reports. If a hook hangs, holders are still told that they have lost a lease. With
``replicas=`` it has one more for each primary, which waits until replicas have confirmed renewals.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable

from holdfast.engines import greenlets

log = logging.getLogger("holdfast")

Task = Callable[[], object]


class Background:
    """Runs functions one after the other in a daemon thread, which starts with the first function."""

    def __init__(self, name: str, most: int = 0) -> None:
        """``most``: how many functions may wait for their turn; 0: any number."""
        self._name = name
        self._most = most
        self._marks: list[greenlets.Mark] = []
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._starting = threading.Lock()

    def run(self, task: Task) -> bool:
        """Run a function soon. False if too many wait. RuntimeError if no thread can be started."""
        if self._most and self._tasks.qsize() >= self._most:
            return False
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run_all, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._tasks.put(task)
        return True

    def _run_all(self) -> None:
        self._marks += greenlets.mark()
        tasks = self._tasks
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException:  # even sys.exit(): it would end the thread, and nothing would be called any more
                if tasks is not self._tasks:
                    raise  # in a forked child, this ends the greenlet
                log.exception("a function that %s called has failed", self._name)
            del task  # it may have the last reference to a lease

    def close(self) -> None:
        """Let the thread end after its last function."""
        self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, unless the caller is that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: begin again."""
        while self._marks:
            self._marks.pop().end()
        self._thread = None
        self._tasks = queue.SimpleQueue()
        self._starting = threading.Lock()


class Lanes:
    """Runs functions beside each other, and in each lane one after the other: one thread for each lane."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[str, Background] = {}

    def run(self, lane: str, task: Task) -> None:
        """Run a function soon; now, if no thread can be started."""
        background = self._lanes.get(lane) or self._lanes.setdefault(lane, Background(self._name))
        try:
            background.run(task)
        except RuntimeError as error:
            if not is_exiting(error):
                task()

    def close(self, timeout: float) -> None:
        """Let the threads end, and wait for that."""
        for background in self._lanes.values():
            background.close()
        until = time.monotonic() + timeout
        for background in self._lanes.values():
            background.join(max(0.0, until - time.monotonic()))

    def forget(self) -> None:
        """In a forked child, where the threads do not exist: begin again."""
        for background in self._lanes.values():
            background.forget()
        self._lanes.clear()


def is_exiting(error: RuntimeError) -> bool:
    """Whether a thread could not be started because the interpreter is exiting, not because there are too many."""
    return sys.is_finalizing() or "shutdown" in str(error)
