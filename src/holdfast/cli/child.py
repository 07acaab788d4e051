"""The command that ``holdfast run`` guards: started, signalled, waited for, and never left alone.

Three processes, and why. A command must not go on when whoever renews its lock is gone, and ``holdfast run`` can be
killed by SIGKILL, or stopped by SIGSTOP, where it can do nothing any more. So two processes are forked at the very
beginning, before the lock is asked for:

    launcher   waits for the order to start, which brings the fence, then *becomes* the command by exec. Forked early
               because by the time the lock is held there are threads (the keeper), and Python code between fork and
               exec is only sound where there are none. It also makes the start cost nothing but the exec.
    guard      waits at a pipe, and kills the command's process group when the pipe ends, for that means that
               ``holdfast run`` has ended, however it did. Through the pipe it is told until when the lock is good, so
               that it also kills the group in time if ``holdfast run`` hangs, is stopped, or is suspended by Ctrl-Z.

What that covers. The guard ends the whole process group, on every Unix. On Linux the command itself also has
PR_SET_PDEATHSIG, in case the guard is killed too; the kernel clears that one for a setuid program, and it does not
reach grandchildren. Elsewhere the guard is all there is. Nothing covers a descendant that has left the group (a
daemon that called setsid) or that runs as a user whom we may not signal (sudo), nor what the command left running
when it ended by itself: the lock is given back when the command ends, and its exit code is ours.

Terminals. The command has a process group of its own, so that it can be signalled as a whole and we are not hit.
But only one group at a time may read from a terminal. When stdin and stdout are a terminal and we are in its
foreground, the command is put there, as a shell would do: editors and prompts work, and Ctrl-C, Ctrl-\\ and Ctrl-Z
reach the command directly and once. In a pipeline (``holdfast run x -- cmd | less``) the terminal stays where it is,
because the other end of the pipe may need it; Ctrl-C then reaches us and is passed on, and a command that does want
the terminal (a password prompt) is stopped by the kernel with SIGTTIN or SIGTTOU and is given it then. A command
suspended by Ctrl-Z suspends us too, since that is what the shell waits for; nobody renews meanwhile, and the guard
ends the command if it is not resumed in time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from holdfast.drivers.clock import now

__all__ = ["Child", "Ended", "Stopped"]

_PR_SET_PDEATHSIG: Final = 1
_IGNORED_BY_PYTHON: Final = {getattr(signal, name, 0) for name in ("SIGPIPE", "SIGXFSZ")}
_TICK_S: Final = 1.0  # a sleep does not count the time that the machine was suspended, so it must be a short one


class Ended(NamedTuple):
    """The command is over: its exit code, or 128 + N if signal N ended it."""

    code: int


class Stopped(NamedTuple):
    """The command was stopped by this signal."""

    signum: int


class Terminal:
    """The controlling terminal, if there is one."""

    def __init__(self) -> None:
        self._fd: int | None
        try:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def foreground(self) -> int | None:
        """The process group that may read from it; None if there is no terminal (any more)."""
        try:
            return None if self._fd is None else os.tcgetpgrp(self._fd)
        except OSError:
            return None

    def give(self, group: int) -> None:
        if self._fd is None:
            return
        # Whoever does this from the background is stopped by SIGTTOU, unless it is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:
            pass  # the terminal hung up, or the group has just ended: nothing to give, or nobody to give it to
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Child:
    """One command. Make it in the main thread, before there are others: it forks."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._terminal = Terminal()
        self._home = os.getpgrp()
        self._parent = os.getpid()
        self._over = False
        self._done = False
        order, self._order = os.pipe()
        self._verdict, verdict = os.pipe()
        leash, self._leash = os.pipe()
        os.set_blocking(self._leash, False)  # a guard that somebody has stopped must not stop us
        # Blocked, so that no signal finds a process of ours that does not know yet which of the three it is.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(leash)
                _never_return(lambda: self._launch(argv, order, verdict, mask))
            _make_group(self.pid)
            self._guard = os.fork()
            if self._guard == 0:
                os.close(order)
                os.close(verdict)  # whose end is how start() learns that the command runs
                _never_return(lambda: self._stand_guard(leash))
            _make_group(self._guard)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in (order, verdict, leash):
            os.close(fd)

    # In the launcher ------------------------------------------------------------------------------------------------

    def _launch(self, argv: Sequence[str], order: int, verdict: int, mask: set[int]) -> None:
        _make_group(0)
        self._let_go()
        _die_with(self._parent)
        text = b""
        while not text.endswith(b"\n"):
            more = os.read(order, 65536)
            if not more:
                return  # there will be no order: the lock was not obtained, or whoever wanted it is gone
            text += more
        changes: dict[str, str | None] = json.loads(text)
        environment = {name: value for name, value in os.environ.items() if name not in changes}
        environment.update((name, value) for name, value in changes.items() if value is not None)
        if os.isatty(0) and os.isatty(1) and self._terminal.foreground() == self._home:
            self._terminal.give(os.getpid())
        # What Python has changed for itself is put back; what was ignored when we came stays so, as with nohup.
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)) or signum in _IGNORED_BY_PYTHON:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            os.execvpe(argv[0], list(argv), environment)
        except OSError as error:
            os.write(verdict, str(error.errno).encode())

    # In the guard ---------------------------------------------------------------------------------------------------

    def _stand_guard(self, leash: int) -> None:
        _make_group(0)
        self._let_go()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        good_until = float("inf")
        while True:
            ready, _, _ = select.select([leash], [], [], max(0.0, min(good_until - now(), _TICK_S)))
            if ready:
                text = os.read(leash, 65536)
                if not text:
                    break  # ``holdfast run`` is gone
                good_until = float(text.split()[-1])
            elif now() >= good_until:
                break
        _signal_group(self.pid, signal.SIGKILL)
        if self._terminal.foreground() == self.pid:
            self._terminal.give(self._home)

    def _let_go(self) -> None:
        """In a forked process: close the parent's ends, or its end would not be the end of the pipes."""
        for fd in (self._order, self._verdict, self._leash):
            os.close(fd)

    # In ``holdfast run`` --------------------------------------------------------------------------------------------

    def start(self, changes: Mapping[str, str | None]) -> None:
        """Let it begin, with these changes to its environment (None: without). OSError if it cannot be run."""
        _write(self._order, json.dumps(changes).encode() + b"\n")
        os.close(self._order)
        self._order = -1
        problem = os.read(self._verdict, 64)  # ends without a word when exec closes the other end
        if problem:
            self._over = True
            os.waitpid(self.pid, 0)
            number = int(problem)
            raise OSError(number, os.strerror(number))

    def good_until(self, when: float) -> None:
        """Let the guard know until when the command may go on, on our clock, if it hears no more from us."""
        _write(self._leash, b"%.6f\n" % when)

    def poll(self) -> Ended | Stopped | None:
        """What has become of it since the last look, if anything."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            return Stopped(os.WSTOPSIG(status))
        self._over = True
        code = os.waitstatus_to_exitcode(status)
        return Ended(128 - code if code < 0 else code)

    def signal(self, signum: int) -> bool:
        """Send a signal to all of its group; whether anybody is left there."""
        return _signal_group(self.pid, signum)

    def suspended(self, signum: int, announce: Callable[[], object]) -> None:
        """It was stopped: give it the terminal if that is all it wants, or stop as well until we are resumed.

        Where there is no terminal, nobody waits for us to stop, so we go on and the lock is kept.
        """
        ours, foreground = self._home, self._terminal.foreground()
        if foreground is None:
            return
        if foreground == ours and signum in (signal.SIGTTIN, signal.SIGTTOU):
            self._terminal.give(self.pid)
            self.signal(signal.SIGCONT)
            return
        announce()
        had_terminal = foreground == self.pid
        if had_terminal:
            self._terminal.give(ours)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        if foreground in (ours, self.pid):
            os.killpg(ours, signal.SIGTSTP)  # all of the job, as Ctrl-Z does: the shell waits for every part of it
        else:
            os.kill(os.getpid(), signal.SIGTSTP)
        # We are here again when somebody says SIGCONT, or at once where there is no shell to say it.
        signal.signal(signal.SIGTSTP, handler)
        if had_terminal and self._terminal.foreground() == ours:
            self._terminal.give(self.pid)
        self.signal(signal.SIGCONT)

    def dismiss(self) -> None:
        """It has ended, or is not wanted any more: take the terminal back, and leave no process behind."""
        if self._done:
            return
        self._done = True
        if not self._over:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        # The guard has nothing left to kill. It goes first, before its pipe ends.
        os.kill(self._guard, signal.SIGKILL)
        os.waitpid(self._guard, 0)
        if self._terminal.foreground() == self.pid:
            self._terminal.give(self._home)
        self._terminal.close()
        for fd in {self._order, self._verdict, self._leash} - {-1}:
            os.close(fd)


def _never_return(task: Callable[[], None]) -> NoReturn:
    """In a forked process: whatever happens, our caller's code must not run there a second time."""
    try:
        task()
    finally:
        os._exit(127)


def _make_group(pid: int) -> None:
    """Both sides do it, so that it is done whichever runs first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        try:
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        except (ImportError, OSError, AttributeError):
            pass  # an unusual build of Python or libc; the guard is still there
    if os.getppid() != parent:  # it died before we asked to be told
        os._exit(0)


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # PermissionError: macOS says so when all of them are zombies
        return False
    return True


def _write(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, BlockingIOError):
        pass  # the reader was killed or stopped by somebody; what has become of the command, poll() will tell
