"""The command of ``holdfast run``: start it, signal it, wait for it, and kill it if ``holdfast run`` ends first.

Three processes. A command must end when its lock is no longer renewed. But ``holdfast run`` can be killed by SIGKILL or
stopped by SIGSTOP, and then cannot end the command. So it forks two processes at the start, before it acquires:

    launcher   waits for the order to start, which contains the fence, then *becomes* the command by exec. It is forked
               early because threads (the keeper) run once the lock is held, and Python code between fork and exec is
               only safe without threads. Starting the command then costs one exec.
    guard      waits at a pipe. The pipe ends when ``holdfast run`` has ended, for whatever reason; the guard then kills
               the command's process group. The pipe also tells it until when the lock is valid, so it kills the group
               in time if ``holdfast run`` hangs, is stopped, or is suspended by Ctrl-Z.

What that covers. The guard ends the whole process group, on every Unix. On Linux the command itself also has
PR_SET_PDEATHSIG, in case the guard is killed too; the kernel clears it for a setuid program, and grandchildren do not
have it. Not covered: a descendant that has left the group (a daemon that called setsid), a process of a user that we
may not signal (sudo), and what a command leaves running when it ends by itself. The lock is released when the command
ends, and ``holdfast run`` exits with the command's exit code.

Terminals. The command has its own process group, so that a signal reaches all of it and not ``holdfast run``. Only one
group at a time may read from a terminal. If stdin and stdout are a terminal and we are in its foreground, the command
is put there, as by a shell: editors and prompts work, and Ctrl-C, Ctrl-\\ and Ctrl-Z reach the command directly and
once. In a pipeline (``holdfast run x -- cmd | less``) our group keeps the terminal, because the other end of the pipe
may need it. Ctrl-C then reaches us and is passed on. If the command needs the terminal (a password prompt), the kernel
stops it with SIGTTIN or SIGTTOU, and it gets the terminal then. If Ctrl-Z suspends the command, we suspend ourselves,
because the shell waits for that. The lock is not renewed meanwhile, and the guard ends the command if it is not resumed
in time.
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

_PR_SET_PDEATHSIG: Final = 1
_IGNORED_BY_PYTHON: Final = {getattr(signal, name, 0) for name in ("SIGPIPE", "SIGXFSZ")}
_TICK_S: Final = 1.0  # short, because a sleep does not count the time that the machine was suspended


class Ended(NamedTuple):
    """The command has ended: its exit code, or 128 + N if signal N ended it."""

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
        """The process group that may read from the terminal; None if there is no terminal, or it has hung up."""
        try:
            return None if self._fd is None else os.tcgetpgrp(self._fd)
        except OSError:
            return None

    def give(self, group: int) -> None:
        if self._fd is None:
            return
        # From the background, this call stops the caller by SIGTTOU unless the signal is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:
            pass  # the terminal hung up, or the group has just ended
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Child:
    """One command. Create it in the main thread, before other threads are started: it forks."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._terminal = Terminal()
        self._home = os.getpgrp()
        self._parent = os.getpid()
        self._over = False
        self._done = False
        order, self._order = os.pipe()
        self._verdict, verdict = os.pipe()
        leash, self._leash = os.pipe()
        os.set_blocking(self._leash, False)  # a stopped guard must not block us
        # Block signals, so that none arrives in a forked process before it knows its role.
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
                os.close(verdict)  # start() learns from the end of this pipe that the command runs
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
                return  # no order: the lock was not acquired, or ``holdfast run`` has ended
            text += more
        changes: dict[str, str | None] = json.loads(text)
        environment = {name: value for name, value in os.environ.items() if name not in changes}
        environment.update((name, value) for name, value in changes.items() if value is not None)
        if os.isatty(0) and os.isatty(1) and self._terminal.foreground() == self._home:
            self._terminal.give(os.getpid())
        # Undo what Python changed. Signals that were ignored at the start stay ignored, as with nohup.
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
        """In a forked process: close the parent's ends, else the pipes would not end when the parent does."""
        for fd in (self._order, self._verdict, self._leash):
            os.close(fd)

    # In ``holdfast run`` --------------------------------------------------------------------------------------------

    def start(self, changes: Mapping[str, str | None]) -> None:
        """Start the command with these changes to its environment (None removes). OSError if it cannot be run."""
        _write(self._order, json.dumps(changes).encode() + b"\n")
        os.close(self._order)
        self._order = -1
        problem = os.read(self._verdict, 64)  # empty once exec has closed the other end
        if problem:
            self._over = True
            os.waitpid(self.pid, 0)
            number = int(problem)
            raise OSError(number, os.strerror(number))

    def good_until(self, when: float) -> None:
        """ReportLoss the guard to kill the command at this time of our clock, unless it is told a later time."""
        _write(self._leash, b"%.6f\n" % when)

    def poll(self) -> Ended | Stopped | None:
        """Whether the command has ended or was stopped since the last call; None if neither."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            return Stopped(os.WSTOPSIG(status))
        self._over = True
        code = os.waitstatus_to_exitcode(status)
        return Ended(128 - code if code < 0 else code)

    def signal(self, signum: int) -> bool:
        """Send a signal to the command's group; returns whether a process is left in it."""
        return _signal_group(self.pid, signum)

    def suspended(self, signum: int, announce: Callable[[], object]) -> None:
        """After the command was stopped: give it the terminal if it needs it, else stop too until we are resumed.

        Without a terminal no shell waits for us to stop, so we go on and the lock is kept.
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
            os.killpg(ours, signal.SIGTSTP)  # the whole job, as Ctrl-Z does: the shell waits for all of it
        else:
            os.kill(os.getpid(), signal.SIGTSTP)
        # We continue after SIGCONT, or at once if no shell controls the job.
        signal.signal(signal.SIGTSTP, handler)
        if had_terminal and self._terminal.foreground() == ours:
            self._terminal.give(self.pid)
        self.signal(signal.SIGCONT)

    def dismiss(self) -> None:
        """Kill the command if it has not ended, take the terminal back, and leave no process behind."""
        if self._done:
            return
        self._done = True
        if not self._over:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        # The guard has nothing left to kill. End it before its pipe ends.
        os.kill(self._guard, signal.SIGKILL)
        os.waitpid(self._guard, 0)
        if self._terminal.foreground() == self.pid:
            self._terminal.give(self._home)
        self._terminal.close()
        for fd in {self._order, self._verdict, self._leash} - {-1}:
            os.close(fd)


def _never_return(task: Callable[[], None]) -> NoReturn:
    """In a forked process: run the task and exit, so that the caller's code never runs a second time."""
    try:
        task()
    finally:
        os._exit(127)


def _make_group(pid: int) -> None:
    """Put a process in its own group. Parent and child both call this, because either may run first."""
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
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(0)


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # PermissionError: on macOS, if all of them are zombies
        return False
    return True


def _write(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, BlockingIOError):
        pass  # the reader was killed or stopped; poll() reports the command's state
