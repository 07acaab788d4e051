"""A trace, performed on a real server: the same clients, the same schedule, and what really comes of it.

The clients are those of the search, and so is the judge. Only the server is another: steps go over the wire, and when
the schedule says that time passes, it does. A client that sends something else than it did in the search, because the
server answered otherwise, ends it: not confirmed.

What befalls the server is done to the keys of this one lock: a server that restarts empty is one that has lost them. So
a trace can be performed beside other users of a server, as long as nobody uses the name (``foo``) for something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from holdfast.engines.redis import Engine
from holdfast.engines.target import aim
from holdfast.errors import InvalidConfig, Unsupported
from holdfast.lab.check import CHECKS, Event
from holdfast.lab.model import Model
from holdfast.lab.rows import config_of
from holdfast.lab.server import Done, Server
from holdfast.lab.site import Request, frozen
from holdfast.lab.store import Store
from holdfast.lab.story import reply_said, shortened
from holdfast.lab.trace import BROKEN, Trace
from holdfast.protocol.effects import Command, Step, StepFailed

__all__ = ["Outcome", "perform"]

TIMEOUT: Final = 5.0
LATE: Final = 0.02  # so much longer than it says is waited, so that what is due then is over on the server, too
HEARD_WITHIN: Final = 0.05  # a bell that was rung by a step is there by then


class Outcome(NamedTuple):
    confirmed: bool
    why: str


class Differs(Exception):
    """The real server has led to something else than the search."""


def perform(trace: Trace, url: str, say: Callable[[str], object] = print) -> Outcome:
    """Perform it there; whether the same invariant is broken by the same step."""
    if trace.invariant not in CHECKS:
        raise InvalidConfig(f"invariant {trace.invariant!r:.60}", f"there are {', '.join(CHECKS)}")
    config = config_of(trace.recipe, clients=trace.clients, **trace.options)
    if config.new_store is not Store:
        raise Unsupported(f"{trace.recipe} on {url}", "it is a lock on memcached, which is simulated only")
    if "clock_jump" in trace.faults:
        raise Unsupported("a trace in which the server's clock jumps", "no command makes a real server do that")
    model = Model(config._replace(most_faults=len(trace.choices), kinds=("failover",), reduce=True))
    server = RealServer(url, config.key)
    model.server = server
    model.asks_newcomers = False  # one who came before the end would change what the others find
    try:
        return _perform(model, trace, say)
    finally:
        server.close()


def _perform(model: Model, trace: Trace, say: Callable[[str], object]) -> Outcome:
    state = model.first()
    history: tuple[Event, ...] = ()
    for place, (choice, moment) in enumerate(zip(trace.choices, trace.moments, strict=True), start=1):
        model.asks_newcomers = place == len(trace.choices) and trace.invariant == "NoOrphan"
        try:
            state, events = model.after(state, choice)
        except (Differs, StopIteration, KeyError):
            say(f"{place:3}. {moment.actor}: {moment.does}")
            return Outcome(False, f"at step {place} the real run has nothing like it to do")
        history += events
        reply = model.server.last_reply if isinstance(model.server, RealServer) and moment.command else ""
        say(
            f"{place:3}. {moment.at_us / 1e6:6.2f} s  {moment.actor:7} {moment.does}"
            + (f"  [{reply}]" if reply else "")
        )
    report = CHECKS[trace.invariant].judge(history)
    if report.verdict != BROKEN:
        return Outcome(False, f"{trace.invariant} is not broken by this on the real server")
    why = report.why.format(*(model.names[client] for client in report.clients))
    return Outcome(True, f"{trace.invariant} is broken on the real server, too: {why}")


class RealServer(Server):
    """A real server with the face of a simulated one. Only its latest state can be acted on."""

    def __init__(self, url: str, key: str) -> None:
        self.key = key.encode()
        self._target = aim(url, aio=False)
        self._engine = Engine(self._target)
        self._links: dict[str, Any] = {}
        self._ears: dict[bytes, Any] = {}  # connections that listen, by channel
        self._seen = {}
        self._snapshots: dict[int, dict[bytes, tuple[bytes, int]]] = {}
        self._times: dict[int, int] = {}
        self._latest = 0
        self.last_reply = ""
        if self._keys():
            self._engine.close()
            raise InvalidConfig(
                f"{url} with a key {key!r} on it", "the replay needs that name; use another database, or remove the key"
            )
        self.first = self._look()

    def close(self) -> None:
        self._drop_keys()
        for ear in self._ears.values():
            ear.disconnect()
        for line in self._links.values():
            self._engine.close_link(line)
        self._engine.close()

    # What there is.

    def _ask(self, *words: str | int) -> Any:
        return self._engine.call(Command(words), TIMEOUT)

    def _keys(self) -> list[bytes]:
        found: list[bytes] = []
        cursor: Any = b"0"
        pattern = f"{self.key.decode()}:hf*"
        while True:
            cursor, keys = self._ask("SCAN", cursor.decode(), "MATCH", pattern, "COUNT", 1000)
            found += keys
            if int(cursor) == 0:
                break
        return found + ([self.key] if self._ask("EXISTS", self.key.decode()) else [])

    def _drop_keys(self) -> None:
        for key in self._keys():
            self._ask("DEL", key.decode())

    def _look(self) -> int:
        """Take down how things stand."""
        seconds, micros = self._ask("TIME")
        now_us = int(seconds) * 1_000_000 + int(micros)
        value, left_ms = self._ask("GET", self.key.decode()), self._ask("PTTL", self.key.decode())
        self._latest += 1
        self._times[self._latest] = now_us
        self._seen[self._latest] = value, None if left_ms < 0 else now_us + (left_ms + 1) * 1000
        self._snapshots[self._latest] = {}
        for key in self._keys():
            dump = self._engine.call(Command(("DUMP", key.decode())), TIMEOUT)
            if dump is not None:
                self._snapshots[self._latest][key] = dump, max(0, self._ask("PTTL", key.decode()))
        return self._latest

    def now_us(self, store_mark: int) -> int:
        return self._times[store_mark]

    def store(self, store_mark: int) -> Any:
        class Heard:
            subscribed = frozenset(self._ears)

        return Heard

    # What is done to it.

    def later(self, store_mark: int, us: int) -> int:
        if store_mark != self._latest:
            return store_mark  # a replica: what it holds is only looked at when it takes over
        time.sleep(us / 1e6 + LATE)
        return self._look()

    def execute(self, store_mark: int, request: Request, channel: str) -> Done:
        if request.listens:
            return self._listen(channel)
        before = self._seen[store_mark]
        replies = self._call_on(request) if request.link else [self._call(op) for op in request.ops]
        after = self._look()
        written = frozenset({self.key}) if self._seen[after][0] != before[0] else frozenset()
        watched = frozenset(op.keys[0].encode() for op in request.ops if isinstance(op, Step) and op.watch)
        frozen_replies = tuple(map(frozen, replies))
        self.last_reply = shortened(reply_said(frozen_replies[-1]))
        return Done(after, frozen_replies, self._bells(), written, watched)

    def _call(self, op: Any) -> Any:
        try:
            return self._engine.call(op, TIMEOUT)
        except StepFailed as failed:
            return failed

    def _call_on(self, request: Request) -> list[Any]:
        assert request.link is not None
        line = self._links.get(request.link)
        if line is None:
            line = self._links[request.link] = self._engine.open_link(TIMEOUT)
        commands = [op for op in request.ops if isinstance(op, Command)]
        return list(self._engine.call_on(line, commands, TIMEOUT))

    def _listen(self, channel: str) -> Done:
        name = channel.encode()
        if name not in self._ears:
            extra = self._target.prepare() if self._target.prepare is not None else {}
            ear = self._target.connection(TIMEOUT, extra)
            ear.connect()
            ear.send_command("SUBSCRIBE", channel)
            ear.read_response()
            self._ears[name] = ear
        return Done(self._latest, (True,))

    def _bells(self) -> tuple[tuple[bytes, bytes], ...]:
        found = []
        for name, ear in self._ears.items():
            while ear.can_read(timeout=HEARD_WITHIN):
                kind, _, text = ear.read_response()
                if kind == b"message":
                    found.append((name, text))
        return tuple(found)

    def hang_up(self, store_mark: int, links: tuple[str, ...], channel: str = "") -> int:
        prefix = channel.removeprefix("bell:") + "/"
        for name in list(self._links):
            if name in links or (channel and name.startswith(prefix)):
                self._engine.close_link(self._links.pop(name))
        if channel and (ear := self._ears.pop(channel.encode(), None)) is not None:
            ear.disconnect()
        return self._look()

    def change(self, store_mark: int, kind: str, other: int = -1) -> int:
        if kind == "eviction":
            self._ask("DEL", self.key.decode())
        elif kind == "script_flush":
            self._ask("SCRIPT", "FLUSH")
        else:
            self._drop_keys()
            for ear in self._ears.values():
                ear.disconnect()
            self._ears.clear()
            for key, (dump, left_ms) in self._snapshots.get(other, {}).items() if kind == "failover" else ():
                self._engine.call(Command(("RESTORE", key.decode(), left_ms, dump)), TIMEOUT)  # type: ignore[arg-type]
        return self._look()
