"""Whether the machine stood still while a test ran.

A lease of half a second is lost, rightly, when its process is not let run for half a second, and a test that expects it
to be held then fails without any fault of the code. So a pulse is taken all the time: a thread that wants to wake up
every few milliseconds notes when it could not. That says nothing of the servers and programs that a test has started,
so the kernel is asked how long each of these waited for a CPU. In CI, a test that failed while the pulse stopped, or
while a process of its own was kept from running, runs once more, up to a limit for each process, and the summary shows
its first failure in full, because it may have been a race after all. A test that failed while the pulse was steady has
failed. So has a test in virtual time, whatever the pulse: one that did not connect, start a thread or a process, or
sleep does not depend on the clock.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

__all__ = ["Pulse"]

BEAT = 0.02
SAMPLE = 0.25  # how often the processes of the test are looked at
MOST_RERUNS = 3 if os.environ.get("CI") else 0  # in each process of a run
LONG = 0.15  # a stop that counts: what the leases of these tests have to spare
REAL = frozenset(
    {"socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "_thread.start_new_thread", "time.sleep"}
)


class Pulse:
    """A plugin of pytest: beats in a thread of its own, and has what failed while it stopped run again."""

    def __init__(self) -> None:
        self._stops: list[tuple[float, float]] = []  # when it beat again, after how long
        self._waits: dict[int, float] = {}  # of each process below this one, how long it has waited for a CPU so far
        self._real = False  # the test depends on the clock, or its fixtures do
        self._reruns = 0
        self._runner = threading.get_ident()
        sys.addaudithook(self._notice)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def longest_stop_since(self, moment: float) -> float:
        """In seconds; 0 when none counts."""
        return max((length for at, length in self._stops if at >= moment), default=0.0)

    def _notice(self, event: str, _: object) -> None:
        # Background threads of an earlier test may do what they like.
        if event in REAL and threading.get_ident() == self._runner:
            self._real = True

    def _beat(self) -> None:
        last = sampled = time.monotonic()
        while True:
            time.sleep(BEAT)
            now = time.monotonic()
            if now - last - BEAT > LONG:
                self._stops.append((now, now - last - BEAT))
            last = now
            if now - sampled > SAMPLE:
                sampled = now
                self._sample(now)

    def _sample(self, now: float) -> None:
        """Note the processes below this one that were ready to run, and were not let run, since the last sample."""
        waits = {pid: wait for pid in processes_below(os.getpid()) if (wait := time_waited(pid)) is not None}
        longest = max((wait - self._waits.get(pid, 0.0) for pid, wait in waits.items()), default=0.0)
        if longest > LONG:
            self._stops.append((now, longest))
        self._waits = waits

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        begun, self._real, self._runner = time.monotonic(), False, threading.get_ident()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        if failed:
            let_go_of_the_failure()
            if self._real and self._reruns < MOST_RERUNS and (stop := self.longest_stop_since(begun)):
                self._reruns += 1
                failed[0].outcome = "rerun"  # type: ignore[assignment]
                whole = "\n".join(report.longreprtext for report in failed)
                failed[0].longrepr = f"the machine stood still for {stop:.2f} s: once more\n{whole}"
                hook.pytest_runtest_logreport(report=failed[0])
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                let_go_of_the_failure()
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None  # type: ignore[comparison-overlap]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.getreports("rerun"):
            terminalreporter.write_line(f"RERUN {report.nodeid} - {report.longrepr}")
            for title, text in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(text)


def processes_below(pid: int) -> list[int]:
    """Its children, their children, and so on; none where the kernel does not tell."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *processes_below(child)]
    except OSError:
        pass  # it has ended meanwhile
    return found


def time_waited(pid: int) -> float | None:
    """For how many seconds its main thread was ready to run while others had the CPUs; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def let_go_of_the_failure() -> None:
    """A failed test leaves leases behind, in the frames of its error; the next one is not to be blamed for them."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
