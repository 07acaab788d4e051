"""A worker process: lanes (threads or tasks) that use every kind of lock at random, and write down what they see.

    python -m tests.hostile.worker FOLDER TERMS

The terms are JSON: the face, the URL, the engine, the name of the process, the seed, a mistake to plant, and how many
seconds after its first grant it forks. It works until a line comes on its standard input, says "idle", waits for
another line, closes its client, writes down what is left, and says "closed".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import holdfast
from holdfast.engines.capabilities import ENGINES
from tests.hostile.faces import FACES, Face, run_blocking
from tests.hostile.history import Recorder
from tests.hostile.mistakes import MISTAKES

__all__ = ["CLIENT_TIMEOUT", "LANES", "NAMES", "PERMITS"]

LANES = 4
PERMITS = 2
CLIENT_TIMEOUT = 2.0
NAMES = ("a", "b", "r", "w", "s", "e", "h")
BURST_NAMES = ("c", "d")
LONG_NAME = "l"
TTLS = (1.0, 1.0, 2.0, 4.0)
WAITS = (0.0, 0.3, 2.5, 2.5, 4.0)
LOOK_EVERY = 0.01
HANDED_TTL = 2.0
CACHE_TTL = 0.5
BURST = 20
LATE = 0.4  # seconds after which a request was sent again, to another server
LONG = 8.0  # longer than a failover takes
LATCH_COUNT = 2
FORKED_FOR = 3.0  # seconds for which a forked child works


class Lane:
    """One thread or task: each method uses one kind of lock, in a random way."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number
        self._dice = Random(f"{worker.seed}.{worker.process}.{number}")
        self._ids = 0
        self._kinds: list[Callable[[], Any]] = [
            *(self.lock, self.lock, self.several, self.rlock, self.reader, self.reader, self.writer),
            *(self.semaphore, self.semaphore, self.election, *[self.latch] * 5),
            *(self.giver, self.giver, self.adopter, self.adopter, self.own, self.burst, self.burst, self.long),
            *(self.relay, self.relay),
            *([self.cache] if worker.offers("get_or_compute") else []),
        ]

    async def run(self) -> None:
        ends = False
        while not ends:
            ends = self._worker.stopping.is_set()  # once more, then: each client must have recovered by now
            try:
                await (self.own if ends else self._dice.choice(self._kinds))()
            except holdfast.HoldfastError as error:  # the call was noted with its error
                await self._worker.face.sleep(0.1 if isinstance(error, holdfast.Unavailable) else 0.01)
            except Exception as error:
                self._worker.note_foreign(error, lane=self._number)
                await self._worker.face.sleep(0.01)

    def _note(self, what: str, **data: Any) -> None:
        self._worker.recorder.note(what, lane=self._number, **data)

    async def _call(
        self,
        op: str,
        bound: float,
        function: Callable[..., Any],
        *args: Any,
        names: tuple[str, ...] = (),
        wait: float = 0.0,
        **kwargs: Any,
    ) -> Any:
        """Call, with a note before and after. A call that failed says so in its note, and raises."""
        self._ids += 1
        number, error = self._ids, "interrupted"
        self._note("call", id=number, op=op, bound=bound, names=names, wait=wait)
        try:
            outcome = await self._worker.face.call(function, *args, **kwargs)
            error = ""
            return outcome
        except holdfast.HoldfastError as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        except BaseException as failure:
            error = repr(failure)
            raise
        finally:
            self._note("return", id=number, error=error)

    async def _acquire(
        self, lock: Any, kind: str, names: tuple[str, ...], ttl: float, *, waits: tuple[float, ...] = WAITS
    ) -> tuple[Any, int] | None:
        wait, asked = self._dice.choice(waits), monotonic()
        # With wait=0 the client's timeout is the bound.
        bound = wait or CLIENT_TIMEOUT
        lease = await self._call("acquire", bound, lock.acquire, timeout=wait, names=names, wait=wait)
        return None if lease is None else (lease, self._begin(lease, kind, names, ttl, asked))

    def _begin(self, lease: Any, kind: str, names: tuple[str, ...], ttl: float, asked: float, **more: Any) -> int:
        """Note the hold if the lease is held; its number in the history."""
        self._ids += 1
        if lease.held:
            fences, slot = {name: lease.fences[name] for name in names}, getattr(lease, "slot", -1)
            self._note("held", id=self._ids, kind=kind, fences=fences, slot=slot, asked=asked, ttl=ttl, **more)
            return self._ids
        return 0

    async def _look(self, lease: Any, hold: int, seconds: float) -> None:
        """Note again and again that the lease is held, for as long as it is."""
        until = monotonic() + seconds
        while hold:
            now = monotonic()
            if not lease.held:
                self._note("told", id=hold, reason=lease.reason)
                return
            self._note("believes", id=hold, at=now)
            if now >= until:
                return
            await self._worker.face.sleep(min(LOOK_EVERY, until - now))

    async def _use(self, lock: Any, kind: str, names: tuple[str, ...], ttl: float) -> None:
        held = await self._acquire(lock, kind, names, ttl)
        if held is not None:
            lease, hold = held
            # A few holds outlast their ttl, so they depend on renewal.
            # So do more of those that others can share.
            long = [2.5] * 4 if kind in ("read", "semaphore") else [1.5]
            seconds = self._dice.choice([*[0.0] * 10, *[0.005] * 8, *[0.03] * 4, 0.2, *long])
            try:
                await self._look(lease, hold, seconds)
                if hold and self._dice.random() < 0.05:
                    await self._call("extend", CLIENT_TIMEOUT, lease.extend, ttl, names=names)
                    await self._look(lease, hold, 0.01)
                if kind == "write" and self._dice.random() < 0.3:
                    await self._downgrade(lease, names, ttl)
            finally:
                await self._call("release", CLIENT_TIMEOUT, lease.release, names=names)

    async def _downgrade(self, lease: Any, names: tuple[str, ...], ttl: float) -> None:
        await self._call("downgrade", CLIENT_TIMEOUT, lease.downgrade, names=names)
        hold = self._begin(lease, "read", names, ttl, monotonic(), granted=False)
        await self._look(lease, hold, self._dice.choice([0.005, 0.2]))

    def _options(self) -> dict[str, Any]:
        return {"ttl": self._dice.choice(TTLS)}

    async def lock(self) -> None:
        terms, name = self._options(), self._dice.choice("ab")
        await self._use(self._worker.lock(name, **terms), "lock", (name,), terms["ttl"])

    async def burst(self) -> None:
        """One short hold after the other."""
        name, ttl = self._dice.choice(BURST_NAMES), self._dice.choice(TTLS)
        for _ in range(BURST):
            held = await self._acquire(self._worker.lock(name, ttl=ttl), "lock", (name,), ttl)
            if held is None:
                return
            lease, hold = held
            await self._look(lease, hold, 0.003)
            await self._call("release", CLIENT_TIMEOUT, lease.release, names=(name,))

    async def long(self) -> None:
        """A hold that is renewed again and again, through failovers too."""
        terms, names = self._options(), (LONG_NAME,)
        lock = self._worker.client.lock(LONG_NAME, **terms)
        held = await self._acquire(lock, "lock", names, terms["ttl"], waits=WAITS[:2])
        if held is not None:
            lease, hold = held
            await self._look(lease, hold, LONG)
            await self._call("release", CLIENT_TIMEOUT, lease.release, names=names)

    async def several(self) -> None:
        terms, names = self._options(), tuple(self._dice.sample("ab", 2))
        await self._use(self._worker.client.lock(*names, **terms), "lock", names, terms["ttl"])

    async def rlock(self) -> None:
        terms = self._options()
        lock = self._worker.client.rlock("r", **terms)
        held = await self._acquire(lock, "lock", ("r",), terms["ttl"])
        if held is not None:
            lease, hold = held
            try:
                again = await self._call("reenter", CLIENT_TIMEOUT, lock.acquire, timeout=1.0)
                await self._look(lease, hold, 0.01)
                if again is not None:
                    await self._call("release", CLIENT_TIMEOUT, again.release)
            finally:
                await self._call("release", CLIENT_TIMEOUT, lease.release)

    async def reader(self) -> None:
        terms = self._options()
        await self._use(self._worker.client.rwlock("w", **terms).read, "read", ("w",), terms["ttl"])

    async def writer(self) -> None:
        terms = self._options()
        await self._use(self._worker.client.rwlock("w", **terms).write, "write", ("w",), terms["ttl"])

    async def semaphore(self) -> None:
        terms = self._options()
        lock = self._worker.client.semaphore("s", PERMITS, **terms)
        await self._use(lock, "semaphore", ("s",), terms["ttl"])

    async def election(self) -> None:
        terms = self._options()
        await self._use(self._worker.client.election("e", **terms).lead(), "lock", ("e",), terms["ttl"])

    async def own(self) -> None:
        """A lock that no other lane wants."""
        name = f"own-{self._worker.process}-{self._number}"
        lock = self._worker.client.lock(name, ttl=2.0)
        lease = await self._call("own", 5.0, lock.acquire, timeout=5.0, names=(name,))
        await self._call("release", CLIENT_TIMEOUT, lease.release)

    async def latch(self) -> None:
        """All lanes of all processes meet at one latch after the other; some count it down, some wait."""
        name = f"latch-{int(monotonic() / 2)}"
        latch = self._worker.client.latch(name, LATCH_COUNT, retention=30.0)
        if self._dice.random() < 0.5:
            self._note("count down", latch=name)
            await self._call("count_down", CLIENT_TIMEOUT, latch.count_down)
        elif await self._call("wait", 1.0, latch.wait, 1.0):
            self._note("passed", latch=name, count=LATCH_COUNT)

    async def cache(self) -> None:
        key, asked = f"cache-{self._dice.choice('xy')}", monotonic()

        def compute() -> str:
            value = f"{self._worker.process}.{self._number}.{monotonic()}"
            self._note("computed", key=key, value=value)
            return value

        function = self._worker.client.get_or_compute
        value = await self._call("get", 3.0, function, key, compute, CACHE_TTL, compute_ttl=1.0, wait=3.0)
        self._note("got", key=key, value=value, asked=asked, ttl=CACHE_TTL)

    async def giver(self) -> None:
        """Hand over a hold of any kind: the next lane that looks for tickets takes it."""
        client = self._worker.client
        lock, kind, name = self._dice.choice(
            [
                *[(client.lock("h", ttl=HANDED_TTL), "lock", "h")] * 3,
                (client.semaphore("s", PERMITS, ttl=HANDED_TTL), "semaphore", "s"),
                (client.rwlock("w", ttl=HANDED_TTL).write, "write", "w"),
                (client.rwlock("w", ttl=HANDED_TTL).read, "read", "w"),
            ]
        )
        held = await self._acquire(lock, kind, (name,), HANDED_TTL)
        if held is None:
            return
        lease, hold = held
        await self._look(lease, hold, 0.01)
        try:
            ticket = await self._call("hand_over", CLIENT_TIMEOUT, lease.hand_over, names=(name,))
        except holdfast.HoldfastError:
            await self._look(lease, hold, self._dice.choice([0.0, 0.5, 2.0]))  # the lease is as it was
            await self._call("release", CLIENT_TIMEOUT, lease.release, names=(name,))
            raise
        offer = self._worker.folder / f"{self._worker.process}.{self._number}.{self._ids}.offer"
        offer.with_suffix(".new").write_text(json.dumps([ticket, kind, name]))
        offer.with_suffix(".new").rename(offer)

    async def relay(self) -> None:
        """Hand a hold over to this very process, again and again."""
        held = await self._acquire(self._worker.client.lock("h", ttl=HANDED_TTL), "lock", ("h",), HANDED_TTL)
        if held is None:
            return
        lease, _ = held
        try:
            for _ in range(BURST):
                lease = await self._pass_on(lease)
        finally:
            await self._call("release", CLIENT_TIMEOUT, lease.release, names=("h",))

    async def _pass_on(self, lease: Any) -> Any:
        """The lease of the next holder, which stays for a while if a request may still arrive late."""
        begun = monotonic()
        ticket = await self._call("hand_over", CLIENT_TIMEOUT, lease.hand_over, names=("h",))
        late = monotonic() - begun > LATE
        lease, hold = await self._take_over(ticket, "lock", "h")
        if late:
            await self._look(lease, hold, self._dice.choice([1.5, 5.0]))
            with contextlib.suppress(holdfast.HoldfastError):
                await self._take_over(ticket, "lock", "h")  # it is used up; else there are two holders
                await self._look(lease, hold, 0.0)
        return lease

    async def adopter(self) -> None:
        for offer in self._worker.folder.glob("*.offer"):
            mine = offer.with_suffix(f".{self._worker.process}.{self._number}")
            with contextlib.suppress(FileNotFoundError):  # another lane was quicker
                offer.rename(mine)
                await self._adopt(*json.loads(mine.read_text()))

    async def _adopt(self, ticket: str, kind: str, name: str) -> None:
        lease, hold = await self._take_over(ticket, kind, name)
        try:
            await self._look(lease, hold, self._dice.choice([0.02, 0.02, 0.3, 3.5]))
            if self._dice.random() < 0.3:
                await self._take_over(ticket, kind, name)  # raises, for it is used up; else it is judged
        finally:
            await self._look(lease, hold, 0.0)
            await self._call("release", CLIENT_TIMEOUT, lease.release, names=(name,))

    async def _take_over(self, ticket: str, kind: str, name: str) -> tuple[Any, int]:
        asked, adopt = monotonic(), self._worker.client.adopt
        lease = await self._call("adopt", CLIENT_TIMEOUT, adopt, ticket, ttl=HANDED_TTL, names=(name,))
        return lease, self._begin(lease, kind, (name,), HANDED_TTL, asked)


class Worker:
    """One process."""

    def __init__(
        self,
        folder: Path,
        *,
        face: str,
        url: str,
        engine: str,
        process: str,
        seed: int,
        mistake: str,
        fork_after: float = 0.0,
    ) -> None:
        self.face: Face = FACES[face]()
        self.folder = folder
        self.process = process
        self.seed = seed
        self.recorder = Recorder(folder, process)
        self.stopping = threading.Event()
        self.url = url
        self.fork_after = fork_after
        self._engine = engine
        self._mistake = mistake
        self.client: Any = None

    def offers(self, feature: str) -> bool:
        return feature in ENGINES[self._engine].features

    def lock(self, name: str, **terms: Any) -> Any:
        return MISTAKES[self._mistake](self, name, **terms)

    def note_foreign(self, error: BaseException | str, **data: Any) -> None:
        text = error if isinstance(error, str) else f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        self.recorder.note("foreign", text=text, **data)

    def connect(self) -> None:
        self.client = self.face.connect(self.url, timeout=CLIENT_TIMEOUT, fence_retention=60.0)

    async def lanes(self) -> None:
        await asyncio.gather(*(Lane(self, number).run() for number in range(LANES)))

    def fork(self) -> int:
        """A child goes on with the client of its parent for a while; its pid."""
        if pid := os.fork():
            return pid
        self.process += "f"
        self.recorder = Recorder(self.folder, self.process)
        self.stopping = threading.Event()
        threading.Timer(FORKED_FOR, self.stopping.set).start()
        self.face.run_lanes([Lane(self, number).run() for number in range(LANES)])
        self.recorder.close()
        os._exit(0)


def main(arguments: list[str]) -> None:
    folder, terms = arguments
    worker = Worker(Path(folder), **json.loads(terms))
    with watching(worker):
        if worker.face.kind == "asyncio":
            asyncio.run(_with_tasks(worker))
        else:
            _with_threads(worker)
    print("closed", flush=True)


def _with_threads(worker: Worker) -> None:
    worker.connect()
    print("ready", flush=True)
    child = _fork_after_grant(worker) if worker.fork_after else 0
    lanes = [threading.Thread(target=run_blocking, args=(Lane(worker, number).run(),)) for number in range(LANES)]
    for lane in lanes:
        lane.start()
    sys.stdin.readline()
    worker.stopping.set()
    for lane in lanes:
        lane.join()
    if child and (status := os.waitpid(child, 0)[1]):
        worker.note_foreign(f"its child ended with {status}")
    print("idle", flush=True)
    sys.stdin.readline()
    worker.client.close()
    left = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in left:
        thread.join(2.0)  # a daemon that was told to end may need a moment for it
    worker.recorder.note("closed", left=[thread.name for thread in left if thread.is_alive()])


def _fork_after_grant(worker: Worker) -> int:
    """The pid of a child that was forked while threads of a new client were starting; 0 if there was no grant."""
    child = 0
    with contextlib.suppress(holdfast.HoldfastError):
        lease = worker.client.lock(f"own-{worker.process}", ttl=2.0).acquire(timeout=5.0)
        time.sleep(worker.fork_after)
        child = worker.fork()
        lease.release()
    return child


async def _with_tasks(worker: Worker) -> None:
    worker.connect()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: worker.note_foreign(f"event loop: {context}"))
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(0, lambda: lines.put_nowait(os.read(0, 100)))
    print("ready", flush=True)
    lanes = asyncio.ensure_future(worker.lanes())
    await lines.get()
    worker.stopping.set()
    await lanes
    print("idle", flush=True)
    await lines.get()
    loop.remove_reader(0)
    await worker.client.aclose()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=2.0)
    worker.recorder.note("closed", left=[repr(task) for task in left if not task.done()])


@contextlib.contextmanager
def watching(worker: Worker) -> Iterator[None]:
    """Note what fails in a background thread, and what Holdfast logs with a traceback."""

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                worker.note_foreign(f"logged {record.getMessage()!r}: {record.exc_info[1]!r}")

    threading.excepthook = lambda args: worker.note_foreign(f"thread {args.thread}: {args.exc_value!r}")
    sys.unraisablehook = lambda args: worker.note_foreign(f"unraisable: {args.exc_value!r} in {args.object!r}")
    logging.getLogger("holdfast").addHandler(Watch())
    yield
    worker.recorder.close()


if __name__ == "__main__":
    main(sys.argv[1:])
