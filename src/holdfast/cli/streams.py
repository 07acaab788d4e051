"""Standard streams of the command line: stderr is never waited for, and none of the three is missing.

Telling must not delay acting. A write to stderr blocks while its pipe is full and nothing reads it, or while its
terminal is stopped by Ctrl-S; ``holdfast run`` would then pass on no signal, end no command and release no lock. So
messages go into a bounded queue and a daemon thread writes them; what does not fit, or cannot be written, is dropped.
O_NONBLOCK would be no solution: it belongs to the open file, which the command and the shell share.
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

__all__ = ["open_missing_streams", "unblocked_stderr"]

MOST_CHUNKS: Final = 1000
LAST_WAIT_S: Final = 2.0  # for messages that are still unwritten when all else is done


def open_missing_streams() -> None:
    """Open /dev/null for each standard stream that was closed (``2>&-``).

    Otherwise the next file or socket gets its number, and the command would write to the connection to the server.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:  # as Python leaves it if the stream was closed
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


class Outbox(io.RawIOBase):
    """A raw stream that never blocks: a thread of its own writes to the file descriptor."""

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
        """Begin to write. Not before the last fork: a process with threads cannot fork safely."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="holdfast-stderr", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None  # at a limit of threads: the exit code must do

    def finish(self) -> None:
        """Write what is left, but wait only briefly for a reader."""
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
    """Within, sys.stderr never blocks. Yields what starts the writing, to be called after the last fork."""
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
