"""Runs a plan: real servers, worker processes with a route of their own, and a monitor that samples the holders."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import httpx
import redis

from tests.hostile.grounds import GROUNDS, Ground, Noted
from tests.hostile.history import Event, Recorder, read_history
from tests.hostile.judges import RECOVERY, SETTLED, SLACK
from tests.hostile.place import Place
from tests.hostile.plan import WORKERS, Fault, make_plan
from tests.hostile.proxy import worst_lag_since
from tests.hostile.worker import PERMITS

__all__ = ["Harness"]

_TOKEN = re.compile(rb".+-(\d+)(?:-.*)?\.[0-9a-f]{32}")
LONGEST_CALL = 8.0
LONG_LAG = 0.5  # of the proxies, in seconds: what comes late then was not a client's fault


class Harness:
    """One run. ``run`` returns its history."""

    def __init__(
        self,
        seed: int,
        seconds: float,
        folder: Path,
        *,
        ground: str = "single",
        only: Sequence[str] = (),
        mistake: str = "",
    ) -> None:
        self.seed = seed
        self.only = only
        self.seconds = seconds
        self.folder = folder
        self.mistake = mistake
        self.recorder = Recorder(folder, "harness")
        self._kind = GROUNDS[ground]
        self._over = threading.Event()

    def run(self) -> list[Event]:
        plan = make_plan(self.seed, self.seconds, self._kind.faults, self.only)
        self.places: dict[str, Place] = {}
        with contextlib.closing(self._kind(self.recorder.note)) as self.ground:
            self.recorder.note("permits", s=PERMITS)
            try:
                for name in WORKERS:
                    self.places[name] = self._settle_in(name, self.ground)
                for place in self.places.values():
                    place.hear(b"ready", 30.0)
                monitor = threading.Thread(target=self._monitor)
                monitor.start()
                self._strike_all(plan)
                self._over.set()
                monitor.join()
                self._settle()
            finally:
                self._over.set()
                for place in self.places.values():
                    place.kill()
        self._note_tracebacks()
        self.recorder.close()
        return read_history(self.folder)

    def _settle_in(self, name: str, ground: Ground) -> Place:
        route = ground.route(name)
        terms = {"engine": ground.engine, "seed": self.seed, "mistake": self.mistake}
        return Place(name, route, self.folder, self.recorder, terms)

    def _strike_all(self, plan: list[Fault]) -> None:
        """Each fault in a thread of its own, for it may last while the next ones strike."""
        begun = monotonic()
        threads = []
        for fault in plan:
            time.sleep(max(0.0, begun + fault.at - monotonic()))
            threads.append(threading.Thread(target=self._strike, args=(fault,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        # On a busy machine a fault may have ended late.
        quiet = RECOVERY + 0.1 if plan else 0.0
        time.sleep(max(quiet, begun + self.seconds - monotonic()))

    def _strike(self, fault: Fault) -> None:
        begun = monotonic()
        method = fault.name.replace(" ", "_")
        noted: Noted = {}
        try:
            if hasattr(Place, method):
                noted = getattr(self.places[fault.target], method)(fault) or {}
            else:
                noted = self.ground.strike(fault)
        except Exception as error:  # else it would end the thread unseen, and the run would be judged without it
            self.recorder.note("foreign", text=f"the fault {fault.name!r} failed: {error!r}")
        self.recorder.note("fault", **{"name": fault.name, "begun": begun, "target": fault.target, **noted})

    def _monitor(self) -> None:
        """Sample which names are taken. While the servers are away there are no samples."""
        looked_at = monotonic()
        while not self._over.wait(0.1):
            if (lag := worst_lag_since(looked_at)) > LONG_LAG:
                # Servers and clients had to wait as well, for their messages at least.
                self.recorder.note("fault", name="busy machine", begun=monotonic() - lag, target="")
            looked_at = monotonic()
            try:
                with self.ground.busy:
                    self.recorder.note("sample", taken=self.ground.taken())
            except (redis.RedisError, httpx.HTTPError):
                pass
            except Exception as error:  # else it would end the thread unseen
                self.recorder.note("foreign", text=f"the monitor failed: {error!r}")

    def _settle(self) -> None:
        """Have the workers release everything, look at what is left, then have them close, and look again."""
        for place in self.places.values():
            place.say()
        for place in self.places.values():
            place.hear(b"idle", LONGEST_CALL + SLACK + 5.0)
        idle = monotonic()
        alive = [place.process.pid for place in self.places.values() if place.process.poll() is None]
        while tokens := self._tokens_left(alive):
            if monotonic() - idle > SETTLED:
                break
            time.sleep(0.1)
        self.recorder.note("left", tokens=tokens, alive=alive, after=monotonic() - idle)
        for place in self.places.values():
            place.say()
        for place in self.places.values():
            place.hear(b"closed", LONGEST_CALL + SLACK)
        until = monotonic() + SETTLED
        while (others := self._connections()) and monotonic() < until:
            time.sleep(0.05)
        self.recorder.note("connections", count=len(others), list=others)

    def _tokens_left(self, alive: list[int]) -> list[tuple[str, int]]:
        found = ((key, _TOKEN.fullmatch(token)) for key, token in self.ground.tokens())
        return [(key, int(match[1])) for key, match in found if match and int(match[1]) in alive]

    def _connections(self) -> list[str]:
        return [f"{place.name} {each}" for place in self.places.values() for each in place.route.connections]

    def _note_tracebacks(self) -> None:
        """What a worker has printed, but has not caught, such as an exception at its end or in a forked child."""
        for path in sorted(self.folder.glob("*.stderr")):
            text = path.read_text(errors="replace")
            if count := text.count("Traceback (most recent call last)"):
                last = text.rstrip().rpartition("\n")[2]
                self.recorder.note("foreign", text=f"{path.stem} printed {count} tracebacks, at last: {last}")
