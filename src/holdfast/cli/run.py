"""``holdfast run NAME... -- COMMAND``: a command that runs while it holds a lock, and not a moment longer.

Theory of operation. The main thread sits in one loop until the command ends. It wakes for signals, which it passes
on; for news of the command; for the loss of a lease; and at least every second, because a sleeping thread does not
notice that its machine was suspended. Each time round it compares what is left of the lease with two margins:

    remaining < a third of the ttl (at most 10 s)    renewal has been failing for a while: SIGTERM
    remaining < a tenth of the ttl (at most 1 s)     SIGKILL, so that the command is dead before its lock is free
    remaining < half of that                         the guard's turn, should we not have got round to it

A lease that is renewed at a third of its ttl never has less than about half of it left, so a healthy one is far from
all of them. A lease whose key was taken or deleted is lost already: SIGTERM at once, SIGKILL after a short grace.
At ``--max-hold`` the command gets SIGTERM, and the lock is renewed until it has really ended.

Several names are taken one after the other, in sorted order, so that two who want the same ones cannot wait for each
other; they are given back in reverse.

What ``--json`` says: waiting, acquired, busy, unavailable, lost, exited and released; and, where people are told more,
local (no server was named), keeping (--at-least), suspended (Ctrl-Z) and unreleased (the server was gone at the end).
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple

import click

from holdfast.blocking import Client, Lease, Lock, connect
from holdfast.cli import BUSY, LOST, UNAVAILABLE, USAGE, Voice, duration
from holdfast.cli.child import Child, Ended, Stopped
from holdfast.drivers.clock import now
from holdfast.errors import (
    HoldfastError,
    InvalidConfig,
    InvalidName,
    LeaseLost,
    NotAcquired,
    NotHeld,
    ServerSilent,
    Unavailable,
    Unsupported,
)

__all__ = ["Margins", "margins", "run"]

SHORTEST_TTL: Final = 0.1  # below that, a scheduler's whim would cost the lock
TICK_S: Final = 1.0
GROUP_TICK_S: Final = 0.02
LONGEST_NOTICE_S: Final = 10.0
LONGEST_GRACE_S: Final = 2.0
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PASSING: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)  # these mean nothing before there is a command


class Margins(NamedTuple):
    """How many seconds before the end of the lease what is done about it."""

    notice: float  # SIGTERM
    last: float  # SIGKILL
    grace: float  # between the two where the lease is gone already


def margins(ttl: float) -> Margins:
    return Margins(min(ttl / 3, LONGEST_NOTICE_S), min(ttl / 10, 1.0), min(ttl / 3, LONGEST_GRACE_S))


class Doom(NamedTuple):
    """The command must end, and by when."""

    kill_at: float
    silent: bool  # the server does not answer, so a release would only cost time


class Signalled(KeyboardInterrupt):
    """A signal came while we waited for the lock. A KeyboardInterrupt, so that the attempt leaves no key behind."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class Inbox:
    """Signals and other reasons to wake up, for the main thread."""

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
            # What was ignored when we came stays so (nohup, a background job of a script), but a parent that ignores
            # SIGCHLD would keep us from learning how the command ended.
            if signum is signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._receive)

    def begin_passing(self) -> None:
        """From now on there is a command to pass signals on to."""
        self._take_on(PASSING)
        # While the command has the terminal we are in its background, where a message of ours could stop us.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._interrupts and signum in ENDING:
            self._interrupts = False  # once: what it sets off, the removal of a key, must not be cut short
            raise Signalled(signum)
        if signum != signal.SIGCHLD:
            self._signals.append(signum)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a signal raises Signalled."""
        self._interrupts = True
        try:
            for signum in self.take():  # it came before
                if signum in ENDING:
                    raise Signalled(signum)
            yield
        finally:
            self._interrupts = False

    def take(self) -> list[int]:
        signals = []
        while self._signals:
            signals.append(self._signals.popleft())
        return signals

    def ring(self) -> None:
        try:
            os.write(self._write, b"\0")
        except OSError:
            pass  # so full that it rings anyway, or closed because all is over

    def wait(self, timeout: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, timeout))
        if ready:
            os.read(self._read, 4096)


class Run:
    """One ``holdfast run``."""

    def __init__(
        self,
        client: Client,
        names: Sequence[str],
        argv: Sequence[str],
        voice: Voice,
        *,
        wait: float | None,
        ttl: float,
        at_least: float,
        max_hold: float | None,
        label: str,
    ) -> None:
        self._client = client
        self._argv = argv
        self._voice = voice
        self._wait = wait
        self._ttl = ttl
        self._margins = margins(ttl)
        self._at_least = at_least
        self._max_hold = max_hold
        # The locks first: a name that cannot be used is refused before anything of this process is changed.
        self._locks = [client.lock(name, ttl=ttl, label=label, on_lost=self._wake) for name in names]
        self._inbox = Inbox()
        self._leases: list[Lease] = []
        self._held_since = 0.0
        self._started = False
        self._doom: Doom | None = None
        self._told_guard = 0.0

    def _wake(self, _: Lease) -> None:
        self._inbox.ring()

    def run(self) -> int:
        """Do it all; the exit code. To be called in the main thread, which must be the only one."""
        child = Child(self._argv)
        try:
            code = self._acquire()
            return self._run(child) if code is None else code
        finally:
            child.dismiss()
            self._client.close()

    # Taking the locks -----------------------------------------------------------------------------------------------

    def _acquire(self) -> int | None:
        """Take all of them; an exit code if that was in vain, and nothing is held then."""
        try:
            with self._inbox.interrupting():
                code = self._acquire_all()
        except Signalled as stopped:
            code = 128 + stopped.signum
        except HoldfastError as error:
            code = self._refused(error)
        if code is not None:
            self._leases.clear()
            # Asked of the locks, because an attempt may have succeeded as it was interrupted, before we heard of it.
            for lock in reversed(self._locks):
                try:
                    lock.release()
                except HoldfastError:
                    pass  # not held, or out of reach; then the keeper's last try or the ttl ends it
        return code

    def _refused(self, error: HoldfastError) -> int:
        if isinstance(error, Unsupported):
            self._voice.say("unavailable", str(error), error=True)
            return USAGE
        if isinstance(error, NotAcquired) and not isinstance(error, Unavailable):
            self._voice.say("busy", str(error), name=error.name)
            return BUSY
        self._voice.say("unavailable", str(error), error=True)
        return UNAVAILABLE

    def _acquire_all(self) -> int | None:
        started = now()
        until = None if self._wait is None else started + self._wait
        for lock in self._locks:
            lease = self._acquire_one(lock, until)
            waited = round(now() - started, 3)
            if lease is None:
                self._voice.say(
                    "busy",
                    f"lock {lock.name!r} is held by someone else (waited {waited:.3g} s); "
                    "wait longer with --wait, or come back later",
                    name=lock.name,
                    waited=waited,
                )
                return BUSY
            self._leases.append(lease)
            self._voice.say("acquired", name=lease.name, fence=lease.fence, waited=waited)
        self._held_since = now()
        return None

    def _acquire_one(self, lock: Lock, until: float | None) -> Lease | None:
        try:
            lease = lock.acquire(blocking=False)
        except ServerSilent:
            if until is not None and now() >= until:
                raise
            lease = None
        if lease is not None or (until is not None and now() >= until):
            return lease
        left = None if until is None else until - now()
        patience = "" if left is None else f", at most {left:.3g} s"
        self._voice.say("waiting", f"waiting for lock {lock.name!r}{patience}", name=lock.name)
        return lock.acquire(timeout=-1 if left is None else max(0.0, left))

    # Running the command --------------------------------------------------------------------------------------------

    def _run(self, child: Child) -> int:
        self._inbox.begin_passing()
        self._doom = self._judge()  # the first of several may have been lost while we waited for the last
        if self._doom is not None:
            self._release()
            return LOST
        self._tell_guard(child)
        try:
            child.start(self._environment())
        except OSError as error:
            return self._not_started(error)
        self._started = True
        code = self._watch(child)
        if self._doom is not None:
            self._clear_away(child)
        self._voice.say("exited", code=code)
        child.dismiss()
        if self._doom is not None:
            self._release()
            return LOST
        lingered = self._linger()
        lost = self._release()
        return LOST if lost and not lingered else code

    def _environment(self) -> dict[str, str | None]:
        fences = {lease.name: lease.fence for lease in self._leases}
        return {
            "HOLDFAST_NAME": " ".join(fences),
            "HOLDFAST_FENCE": str(max(fences.values())),
            "HOLDFAST_FENCES": json.dumps(fences, ensure_ascii=False) if len(fences) > 1 else None,
        }

    def _not_started(self, error: OSError) -> int:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        code = NOT_FOUND if missing else NOT_EXECUTABLE
        advice = "check its spelling and PATH" if missing else "check its permissions and its first line (#!)"
        self._voice.say(
            "exited",
            f"{self._argv[0]!r} cannot be run: {os.strerror(error.errno or 0)}; {advice}",
            error=True,
            code=code,
        )
        self._release()
        return code

    def _watch(self, child: Child) -> int:
        """Stay with the command until it ends; its exit code."""
        tick = min(TICK_S, self._ttl / 10)
        while True:
            for signum in self._inbox.take():
                child.signal(signum)
            change = child.poll()
            if isinstance(change, Ended):
                if self._doom is None and change.code == 128 + signal.SIGKILL and now() >= self._told_guard:
                    reason = "it was not renewed in time, because holdfast was stopped or suspended"
                    self._doom = self._pronounce(self._leases[0], reason, 0.0)
                return change.code
            if isinstance(change, Stopped):
                child.suspended(change.signum, self._announce_suspension)
                continue
            if self._doom is None:
                self._doom = self._judge()
                if self._doom is not None:
                    child.signal(signal.SIGTERM)
                    child.signal(signal.SIGCONT)  # a stopped command could not heed it
            self._tell_guard(child)
            next_look = now() + tick
            if self._doom is not None:
                if now() >= self._doom.kill_at:
                    child.signal(signal.SIGKILL)
                else:
                    next_look = min(next_look, self._doom.kill_at)
            elif self._max_hold is not None:
                next_look = min(next_look, self._held_since + self._max_hold)
            self._inbox.wait(next_look - now())

    def _judge(self) -> Doom | None:
        """Whether the command must end; if so, say why."""
        for lease in self._leases:
            if lease.lost.is_set():
                return self._pronounce(lease, _why_lost(lease), self._margins.grace)
            left = lease.remaining()
            if left < self._margins.notice:
                reason = f"it could not be renewed and ends in {left:.3g} s (see whether the server is well)"
                return self._pronounce(lease, reason, left - self._margins.last, silent=True)
        if self._max_hold is not None and self._held_since and now() >= self._held_since + self._max_hold:
            reason = f"--max-hold of {self._max_hold:g} s is over"
            return self._pronounce(self._leases[0], reason, self._margins.notice)
        return None

    def _pronounce(self, lease: Lease, reason: str, grace: float, *, silent: bool = False) -> Doom:
        if not self._started:
            what = "was not started; try again"
        elif grace > 0:
            what = f"was told to end and is killed in {grace:.3g} s; see what it left undone"
        else:
            what = "was killed; see what it left undone"
        self._voice.say(
            "lost",
            f"lock {lease.name!r} is lost: {reason}. The command {what}",
            error=True,
            name=lease.name,
            fence=lease.fence,
            reason=reason,
        )
        return Doom(now() + grace, silent)

    def _tell_guard(self, child: Child) -> None:
        if self._doom is not None:
            good_until = self._doom.kill_at + self._margins.last / 2
        else:
            left = min(lease.remaining() for lease in self._leases)
            good_until = now() + left - self._margins.last / 2
        if abs(good_until - self._told_guard) > 0.005:
            self._told_guard = good_until
            child.good_until(good_until)

    def _announce_suspension(self) -> None:
        left = min(lease.remaining() for lease in self._leases)
        self._voice.say(
            "suspended",
            f"suspended: {self._names()} is not renewed meanwhile, and the command is killed in {left:.3g} s",
            left=round(left, 3),
        )

    def _clear_away(self, child: Child) -> None:
        """The command has ended because it had to; what it started must end by the same time."""
        assert self._doom is not None
        while child.signal(0) and now() < self._doom.kill_at:
            self._inbox.wait(GROUP_TICK_S)
        child.signal(signal.SIGKILL)

    # Giving the locks back ------------------------------------------------------------------------------------------

    def _linger(self) -> bool:
        """Keep the locks for ``--at-least`` so long, or until a signal; whether that took any time."""
        until = self._held_since + self._at_least
        if now() >= until or any(lease.lost.is_set() for lease in self._leases):
            return False
        self._inbox.take()  # those were for the command
        self._voice.say("keeping", f"the command has ended; {self._names()} is kept for {until - now():.3g} s more")
        while now() < until and not any(signum in ENDING for signum in self._inbox.take()):
            if any(lease.lost.is_set() for lease in self._leases):
                break
            self._inbox.wait(min(until - now(), TICK_S))
        return True

    def _names(self) -> str:
        return "lock " + ", ".join(repr(lease.name) for lease in self._leases)

    def _release(self) -> bool:
        """Give back what is held; whether it turned out to be lost."""
        lost = False
        while self._leases:
            lease = self._leases.pop()
            if self._doom is not None and self._doom.silent and lease.remaining() < self._margins.notice:
                warnings.simplefilter("ignore", ResourceWarning)  # it is dropped on purpose: it ends by itself
                continue
            try:
                lease.release()
            except LeaseLost as error:
                lost = True
                if self._doom is None:
                    self._voice.say(
                        "lost", str(error), error=True, name=lease.name, fence=lease.fence, reason=error.reason
                    )
            except HoldfastError as error:
                self._voice.say(
                    "unreleased",
                    f"lock {lease.name!r} was not given back, and ends by itself within {self._ttl:g} s: {error}",
                    error=True,
                    name=lease.name,
                )
            else:
                self._voice.say("released", name=lease.name)
        return lost


def _why_lost(lease: Lease) -> str:
    try:
        lease.check()
    except LeaseLost as error:
        return error.reason
    except NotHeld:
        pass
    return "it is no longer held"


class RunCommand(click.Command):
    """A command with a command in it, which begins after ``--``."""

    sections: Final = {
        "Taking the lock": ("wait", "url", "label"),
        "Keeping it": ("ttl", "at_least", "max_hold"),
        "Output": (),  # all the others
    }

    examples: Final = (
        (
            "cron, on several machines whose clocks differ: one does it, the others skip it",
            "0 3 * * *  holdfast run --quiet --wait 0 --at-least 5m backup -- backup.sh",
        ),
        (
            "one deployment at a time; give up after ten minutes, and end one that takes an hour",
            "holdfast run --wait 10m --max-hold 1h deploy:web -- ./deploy.sh",
        ),
        (
            "two locks, and a fence for what is written",
            "holdfast run users orders -- sh -c './migrate --fence \"$HOLDFAST_FENCE\"'",
        ),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:split])
        ctx.meta["holdfast.argv"] = args[split + 1 :]
        if not args[split + 1 :] and not ctx.resilient_parsing:
            raise click.UsageError("what is to be run? Write it after '--': holdfast run NAME -- COMMAND", ctx)
        return rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] NAME... -- COMMAND [ARG]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, names in self.sections.items():
            rows = [records.pop(name) for name in names] if names else list(records.values())
            with formatter.section(click.style(title, bold=True)):
                formatter.write_dl([row for row in rows if row is not None])
        with formatter.section(click.style("Exit codes", bold=True)):
            formatter.write_dl(
                [
                    ("COMMAND's own", "128 + N if signal N ended it, 127 if it was not found, 126 if it cannot be run"),
                    ("75", "busy: the lock was not to be had within --wait"),
                    ("76", "lost: the lock was lost or --max-hold reached, and COMMAND was ended"),
                    ("69", "unavailable: no server could be used"),
                    ("64", "usage: an option, a name or a URL is wrong"),
                ]
            )
        with formatter.section(click.style("COMMAND's environment", bold=True)):
            formatter.write_dl(
                [
                    ("HOLDFAST_NAME", "the name, or the names with a space between"),
                    ("HOLDFAST_FENCE", "a number that is greater for every later holder: the largest, of several"),
                    ("HOLDFAST_FENCES", "with several names, the fence of each, as JSON"),
                ]
            )
        with formatter.section(click.style("Examples", bold=True)):
            for remark, line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{click.style('# ' + remark, dim=True)}\n")
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


@click.command(
    cls=RunCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    short_help="Run a command while holding a lock.",
)
@click.argument("names", metavar="NAME", nargs=-1, required=True)
@click.option(
    "--wait",
    callback=duration(),
    metavar="DURATION",
    help="How long to wait for it; 0 tries once.  [default: for ever]",
)
@click.option("--url", metavar="URL", help="The server.  [default: HOLDFAST_URL, else local://, which is this machine]")
@click.option(
    "--label", metavar="TEXT", help="A word for people who look at who holds what.  [default: COMMAND's name]"
)
@click.option(
    "--ttl",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    default="30",
    help="When the lock is free again should this machine fall silent; renewed until then.  [default: 30]",
)
@click.option(
    "--at-least",
    callback=duration(),
    metavar="DURATION",
    default="0",
    help="Keep the lock at least so long, even if COMMAND ends sooner. For cron jobs on clocks that differ.",
)
@click.option(
    "--max-hold",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    help="End COMMAND after so long: SIGTERM, and SIGKILL soon after.",
)
@click.option("--json", "as_json", is_flag=True, help="Say what happens on stderr, as one JSON object per line.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing but errors. That the lock is busy is not one.")
@click.pass_context
def run(
    ctx: click.Context,
    *,
    names: tuple[str, ...],
    wait: float | None,
    url: str | None,
    label: str | None,
    ttl: float,
    at_least: float,
    max_hold: float | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run COMMAND while holding the lock NAME, and give it back when COMMAND ends.

    Of all who ask the same server for the same NAME, one at a time runs. Signals are passed on to COMMAND. Should the
    lock be lost, COMMAND is ended before anybody else can have it; should holdfast itself be killed, COMMAND is
    killed too. Several NAMEs are taken in sorted order.

    DURATION is in seconds, or has a unit: 250ms, 90s, 5m, 1h.
    """
    argv: list[str] = ctx.meta["holdfast.argv"]
    if max_hold is not None and at_least > max_hold:
        raise click.UsageError("--at-least is longer than --max-hold; make it shorter", ctx)
    voice = Voice(as_json=as_json, quiet=quiet)
    url = url or os.environ.get("HOLDFAST_URL")
    if not url:
        url = "local://"
        voice.say(
            "local",
            "no server was named, so locks reach no further than this machine (local://); "
            "name one with --url or HOLDFAST_URL",
        )
    try:
        return Run(
            connect(url),
            sorted(set(names)),
            argv,
            voice,
            wait=wait,
            ttl=ttl,
            at_least=at_least,
            max_hold=max_hold,
            label=os.path.basename(argv[0]) if label is None else label,
        ).run()
    except (InvalidName, InvalidConfig) as error:
        raise click.UsageError(str(error), ctx) from error
