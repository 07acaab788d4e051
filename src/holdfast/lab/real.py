"""A real server with the face of a simulated one, which goes beside it step by step.

Whatever is asked is asked of both. Clients are given what the real one has answered, so what comes of a schedule comes
of the real server; and the real one is held to the other: a reply of another kind, another value in the lock's key,
another ttl or another bell is a difference, and ends it. So nothing is taken for the real server's that it did not do.
Steps take time here, and none in the search; a schedule in which all hangs by a millisecond may come out otherwise.

What befalls the server is done to the keys of this one lock: a server that restarts empty is one that has lost them.
Only a forgotten script is forgotten for everybody, who then sends it again. Bells have the names of the search
(``bell:A``), which are the same in all databases of a server, so one trace is performed on it at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from holdfast.engines.redis import Engine
from holdfast.engines.target import aim
from holdfast.engines.wire import connect_failure
from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.lab.server import Done, Server
from holdfast.lab.site import Request, frozen
from holdfast.lab.store import Store
from holdfast.lab.story import reply_said, said, shortened
from holdfast.protocol.effects import Command, Step, StepFailed

__all__ = ["Differs", "RealServer"]

T = TypeVar("T")

TIMEOUT: Final = 5.0
PARTING: Final = 1.0  # so long is waited for a server that has failed already, to take its keys away
SLACK_US: Final = 500_000  # as steps take some time here, a ttl is not quite what it is in the search

_LUA: Final = threading.Lock()  # of which a process has one: traces on several servers at once take turns in it


def _script(name: str) -> str:
    return resources.files("holdfast.lab").joinpath(f"replay_{name}.lua").read_text()


_LOOK: Final = _script("look")
_RESTORE: Final = _script("restore")
_LEAVE: Final = _script("leave")


class Differs(Exception):
    """The real server has led to something else than the search."""


class RealServer(Server):
    """Only its latest state can be acted on. What it has left behind is removed at the end of the ``with``."""

    def __init__(self, url: str, key: str) -> None:
        self.asked = self.answered = ""  # by the first step since somebody has cleared these, a newcomer's apart
        self._url = url
        self._target = aim(url, aio=False)
        self._engine = Engine(self._target)
        self._names: list[str] = []  # of the keys that are ours
        self._values: set[str] = set()  # what clients may have put into the lock's key
        self._links: dict[str, Any] = {}
        self._ears: dict[str, Any] = {}  # connections that listen, by channel
        self._dumps: dict[int, dict[str, tuple[bytes, int]]] = {}  # of each key, and when it ends (ms; 0 for never)
        try:
            if self._keys_like(key):
                problem = "the replay needs that name; use another database, or remove the key"
                raise InvalidConfig(f"{self._target.address} with a key {key!r} on it", problem)
            seconds, micros = self._ask("TIME")
        except BaseException:
            self._engine.close()
            raise
        with _LUA:
            super().__init__(Store(int(seconds) * 1_000_000 + int(micros) // 1000 * 1000), key.encode())
        self._names.append(key)
        self._now = self.first
        self._dumps[self.first] = {}
        self._began = time.monotonic()
        self._passed_us = 0  # of the time of the search
        # How late we were when the key was last written. As its ttl is late by as much, we stay so, but not later.
        self._lag = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            timeout = PARTING if kind else None
            self._ask("EVAL", _LEAVE, len(self._names), *self._names, *self._values, timeout=timeout)
        except HoldfastError:
            if kind is None:
                raise
        finally:
            for ear in self._ears.values():
                ear.disconnect()
            self._engine.close()  # and all links

    # What is asked of the real one. Whatever goes wrong is said in our words.

    def _try(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (StepFailed, HoldfastError) as error:
            raise _ours(error) from error.__cause__
        except Exception as error:  # an ear is redis-py's, which raises whatever it likes
            raise _ours(connect_failure(error, self._target.address, TIMEOUT)) from error

    def _ask(self, *words: str | int, timeout: float | None = None) -> Any:
        return self._try(lambda: self._engine.call(Command(words), timeout or TIMEOUT))

    def _keys_like(self, key: str) -> list[bytes]:
        found: list[bytes] = []
        cursor = "0"
        while True:
            raw, keys = self._ask("SCAN", cursor, "MATCH", f"{key}:hf[0-9]:*", "COUNT", 1000)
            found += keys
            cursor = raw.decode()
            if cursor == "0":
                return found + ([key.encode()] if self._ask("EXISTS", key) else [])

    def _call(self, request: Request) -> list[Any]:
        if request.link is None:
            return [self._try(lambda op=op: self._engine.call(op, TIMEOUT)) for op in request.ops]  # type: ignore[misc]
        line = self._links.get(request.link)
        if line is None:
            line = self._links[request.link] = self._try(lambda: self._engine.open_link(TIMEOUT))
        commands = [op for op in request.ops if isinstance(op, Command)]
        replies = self._try(lambda: self._engine.call_on(line, commands, TIMEOUT))
        for reply in replies:
            if isinstance(reply, StepFailed):
                raise _ours(reply) from reply.__cause__
        return replies

    def _look(self, mark: int) -> int:
        """See how things stand there, which is to be as they stand in the store of that mark."""
        (seconds, micros), value, *found = self._ask("EVAL", _LOOK, len(self._names), *self._names)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        self._dumps[mark] = {
            name: (dump, now_ms + left_ms if left_ms >= 0 else 0)
            for name, (dump, left_ms) in zip(self._names, found, strict=True)
            if dump is not None
        }
        self._now = mark
        meant, ends_us = self.lock(mark)
        if value != meant:
            raise Differs(f"the key holds {_shown(value)}, and not {_shown(meant)}")
        left_us = found[0][1] * 1000
        meant_us = -1000 if ends_us is None else ends_us - 1000 - self.now_us(mark)
        if value is not None and ((left_us < 0) != (ends_us is None) or abs(left_us - meant_us) > SLACK_US):
            raise Differs(f"the key has {_time_left(left_us)}, and not {_time_left(meant_us)}")
        return mark

    # What is done to it.

    def later(self, store_mark: int, us: int) -> int:
        meant = super().later(store_mark, us)
        if meant == store_mark:
            return meant
        if store_mark != self._now:  # a replica, which is only looked at when it takes over
            self._dumps[meant] = self._dumps[store_mark]
            return meant
        self._passed_us += us
        time.sleep(max(0.0, self._lag - self._behind()))
        return self._look(meant)

    def _behind(self) -> float:
        """By how much we are later than the search, in which steps take no time."""
        return time.monotonic() - self._began - self._passed_us / 1e6

    def execute(self, store_mark: int, request: Request, channel: str) -> Done:
        with _LUA:
            meant = super().execute(store_mark, request, channel)
        if request.listens:
            self._listen(channel)
            self._note(channel, "SUBSCRIBE", "OK")
            self._look(meant.store)
            return meant
        for op in request.ops:
            if isinstance(op, Step):
                self._names += [name for name in op.keys if name not in self._names]
            self._values.update(map(str, op.args[:1] if isinstance(op, Step) else op.args[2:3]))
        replies = tuple(map(frozen, self._call(request)))
        self._note(channel, "; ".join(map(said, request.ops)), reply_said(replies[-1]))
        if _kind(replies) != _kind(meant.replies):
            answered, instead = (shortened(reply_said(some[-1])) for some in (replies, meant.replies))
            raise Differs(f"it answers {answered}, and not {instead}")
        bells = tuple((name.encode(), text) for name, ear in self._ears.items() for text in self._heard(ear))
        rung = [name for name, _ in meant.bells if name.decode() in self._ears]
        if sorted(name for name, _ in bells) != sorted(rung):
            raise Differs(f"it wakes {len(bells)}, and not {len(rung)}")
        self._look(meant.store)
        if self.key in meant.written:
            self._lag = self._behind()
        return meant._replace(replies=replies, bells=bells)

    def _note(self, channel: str, asked: str, answered: str) -> None:
        if not self.asked and channel != "bell:N":
            self.asked, self.answered = shortened(asked), shortened(answered)

    def hang_up(self, store_mark: int, links: tuple[str, ...], channel: str = "") -> int:
        meant = super().hang_up(store_mark, links, channel)
        prefix = channel.removeprefix("bell:") + "/"
        for name in list(self._links):
            if name in links or (channel and name.startswith(prefix)):
                self._engine.close_link(self._links.pop(name))
        if channel in self._ears:
            self._deafen(channel)
        return self._look(meant)

    def change(self, store_mark: int, kind: str, other: int = -1) -> int:
        meant = super().change(store_mark, kind, other)
        if kind == "eviction":
            self._ask("DEL", self.key.decode())
        elif kind == "script_flush":
            self._ask("SCRIPT", "FLUSH")
        else:
            self._ask("DEL", *self._names)
            for channel in list(self._ears):
                self._deafen(channel)
            for name in list(self._links):
                self._engine.close_link(self._links.pop(name))
            for name, (dump, ends_ms) in self._dumps[other].items() if kind == "failover" else ():
                self._ask("EVAL", _RESTORE, 1, name, ends_ms, dump.hex())
        return self._look(meant)

    # Bells.

    def _listen(self, channel: str) -> None:
        if channel in self._ears:
            return
        extra = self._try(self._target.prepare) if self._target.prepare is not None else {}
        ear = self._ears[channel] = self._target.connection(TIMEOUT, extra)
        self._try(ear.connect)
        self._exchange(ear, "subscribe", channel)

    def _heard(self, ear: Any) -> list[bytes]:
        """What was rung. The server answers in order, so whatever was rung before is there before the answer."""
        return [text for kind, _, text in self._exchange(ear, "ping") if kind == b"message"]

    def _deafen(self, channel: str) -> None:
        ear = self._ears.pop(channel)
        self._exchange(ear, "unsubscribe", channel)  # for the end of a connection may be noticed later than it comes
        ear.disconnect()

    def _exchange(self, ear: Any, command: str, *words: str) -> Sequence[Any]:
        """All that has come up to the answer."""
        answer = b"pong" if command == "ping" else command.encode()
        self._try(lambda: ear.send_command(command.upper(), *words))
        found: list[Any] = []
        while True:
            reply = self._try(ear.read_response)
            if reply[0] == answer:
                return found
            found.append(reply)


def _ours(error: StepFailed | HoldfastError) -> HoldfastError:
    return error.error if isinstance(error, StepFailed) else error


def _kind(reply: Any) -> Any:
    """A reply without what depends on the time of day: fences, ttls, deadlines."""
    if isinstance(reply, tuple):
        return tuple(map(_kind, reply))
    if isinstance(reply, int):
        return min(reply, 1)
    text = reply.encode() if isinstance(reply, str) else reply  # a status, in a reply to EXEC
    return b"number" if isinstance(text, bytes) and text.isdigit() else text


def _shown(value: bytes | None) -> str:
    return "nothing" if value is None else shortened(value.decode(errors="replace"))


def _time_left(us: int) -> str:
    return "no ttl" if us < 0 else f"a ttl of {us / 1e6:.1f} s"
