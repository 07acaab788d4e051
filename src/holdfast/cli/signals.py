"""Signals for ``holdfast run``: kept until they are passed on, or raised to end the wait for the lock."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PASSING: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)  # without effect before the command is started


class Signalled(KeyboardInterrupt):
    """A signal came during the wait for the lock. A KeyboardInterrupt, so that the attempt leaves no key behind."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class Inbox:
    """Signals and other wake-ups for the main thread."""

    def __init__(self) -> None:
        self._interrupts = False
        self._signals: deque[int] = deque()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._take_on((*ENDING, signal.SIGCHLD))

    def _take_on(self, signals: Sequence[signal.Signals]) -> None:
        for signum in signals:
            # A signal that was ignored at the start stays ignored (nohup, a background job of a script), but not
            # SIGCHLD: if it is ignored, we cannot learn how the command ended.
            if signum is signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._receive)

    def begin_passing(self) -> None:
        """Pass signals on from now on, because there is a command."""
        self._take_on(PASSING)
        # While the command has the terminal we are in the background, where writing a message could stop us.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._interrupts and signum in ENDING:
            self._interrupts = False  # once: a second signal must not interrupt the removal of the key
            raise Signalled(signum)
        if signum != signal.SIGCHLD:
            self._signals.append(signum)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A context in which a signal raises Signalled."""
        hook = sys.unraisablehook
        sys.unraisablehook = partial(self._go_unraised, hook)
        self._interrupts = True
        try:
            for signum in self.take():  # came before this context
                if signum in ENDING:
                    raise Signalled(signum)
            yield
        finally:
            self._interrupts = False
            sys.unraisablehook = hook

    def _go_unraised(self, hook: Callable[[Any], object], unraisable: Any) -> None:
        """Send a signal again that was raised in a destructor, which cannot raise."""
        signalled = unraisable.exc_value
        if not isinstance(signalled, Signalled):
            hook(unraisable)
            return
        self._interrupts = True
        again = threading.Timer(0.01, os.kill, (os.getpid(), signalled.signum))
        again.daemon = True
        again.start()

    def take(self) -> list[int]:
        signals = []
        while self._signals:
            signals.append(self._signals.popleft())
        return signals

    def wake(self) -> None:
        try:
            os.write(self._write, b"\0")
        except OSError:
            pass  # the pipe is full, so the main thread wakes anyway; or it is closed

    def wait(self, timeout: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, timeout))
        if ready:
            os.read(self._read, 4096)
