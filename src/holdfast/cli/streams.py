"""Standard streams of the command line: writing to stderr never blocks, and all three streams are open.

A write to stderr blocks if its pipe is full and nothing reads it, or if Ctrl-S has stopped its terminal. Then
``holdfast run`` could not pass on signals, end the command or release the lock. So messages go into a bounded queue,
and a daemon thread writes them. A message that does not fit, or cannot be written, is dropped. O_NONBLOCK does not
help: it belongs to the open file, which the command and the shell share.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final

MOST_CHUNKS: Final = 1000
LAST_WAIT_S: Final = 2.0  # for messages that are not written yet at the end


def open_missing_streams() -> None:
    """Open /dev/null for each standard stream that was closed (``2>&-``).

    Otherwise the next file or socket gets that number, and the command may write to the connection to the server.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:  # because the stream was closed
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


class Outbox(io.RawIOBase):
    """A raw stream that never blocks: its own thread writes to the file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._chunks: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        if self._chunks.qsize() < MOST_CHUNKS:
            self._chunks.put(chunk)
        return len(chunk)

    def start(self) -> None:
        """Start the writing thread. Call it after the last fork: a process with threads cannot fork safely."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="holdfast-stderr", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None  # no thread can be started: only the exit code is left

    def finish(self) -> None:
        """Write the remaining messages, but wait only briefly for a reader."""
        self.start()
        self._chunks.put(None)
        if self._thread is not None:
            self._thread.join(LAST_WAIT_S)

    def _write_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while (chunk := self._chunks.get()) is not None:
            try:
                while chunk:
                    chunk = chunk[self._write_some(chunk) :]
            except OSError:
                pass  # the reader is gone, or the disk is full

    def _write_some(self, chunk: bytes) -> int:
        try:
            return os.write(self._fd, chunk)
        except BlockingIOError:  # another process that shares the file has set O_NONBLOCK
            select.select([], [self._fd], [])
            return 0


@contextmanager
def unblocked_stderr() -> Iterator[Callable[[], None]]:
    """A context in which sys.stderr never blocks. Call what it yields after the last fork, to start writing."""
    before = sys.stderr
    try:
        outbox = Outbox(before.fileno())
    except OSError:  # a stream in memory, as tests use: it does not block
        yield lambda: None
        return
    before.flush()
    sys.stderr = io.TextIOWrapper(outbox, before.encoding, "backslashreplace", write_through=True)
    try:
        yield outbox.start
    finally:
        sys.stderr = before
        outbox.finish()
