"""A real server with the interface of a search's server, which runs in parallel with the model.

Every request goes to both. Clients get the replies of the real server, so the outcome of a schedule is that of the real
server. The model checks it: if a reply is of another kind, the lock's key has another value or ttl, or there are other
notifications, the replay ends with a difference. So an outcome of the model is never reported as that of the real
server. Steps take time here, but none in the search; a schedule that depends on a millisecond may end differently.

Faults of the server are applied to the keys of this lock: a restart removes them. Only a script flush affects other
clients, which then send their scripts again. Channels have the names of the search (``bell:A``), which all databases of
a server share, so perform one trace on a server at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.failures import connect_failure
from holdfast.engines.redis.target import resolve
from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.lab.report.story import command_text, reply_text, shortened
from holdfast.lab.search.server import Done, Server
from holdfast.lab.search.site import Request, frozen
from holdfast.lab.servers.store import Store
from holdfast.protocol.effects import Command, Step, StepFailed

T = TypeVar("T")

TIMEOUT: Final = 5.0
PARTING: Final = 1.0  # how long the removal of the keys may take on a server that has failed already
SLACK_US: Final = 500_000  # how much a ttl may differ from that in the search, because steps take time here

_LUA: Final = threading.Lock()  # a process has one Lua: traces on several servers at once take turns


def _script(name: str) -> str:
    return resources.files("holdfast.lab.replay").joinpath(f"{name}.lua").read_text()


_LOOK: Final = _script("look")
_RESTORE: Final = _script("restore")
_LEAVE: Final = _script("leave")


class Differs(Exception):
    """The real server behaves differently from the model."""


class RealServer(Server):
    """A server on which only the latest state can be changed. The end of the ``with`` block removes its keys."""

    def __init__(self, url: str, key: str) -> None:
        self.asked = self.answered = ""  # the first step since the caller cleared these, without steps of a newcomer
        self._target = resolve(url, aio=False)
        self._engine = Engine(self._target)
        self._names: list[str] = []  # the names of our keys
        self._values: set[str] = set()  # what clients may have put into the lock's key
        self._links: dict[str, Any] = {}
        self._subscribers: dict[str, Any] = {}  # connections, by channel
        self._dumps: dict[int, dict[str, tuple[bytes, int]]] = {}  # by mark and key: dump, expiry in ms (0: never)
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
        self._passed_us = 0  # how much time has passed in the search
        # The delay of the replay when the key was last written. The ttl ends late by this much, so the delay is kept.
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
            for subscriber in self._subscribers.values():
                subscriber.disconnect()
            self._engine.close()  # this also closes all dedicated connections

    # Requests to the real server, with errors as Holdfast raises them.

    def _try(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (StepFailed, HoldfastError) as error:
            raise _ours(error) from error.__cause__
        except Exception as error:  # a subscriber is a connection of redis-py, which may raise any error
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
        link = self._links.get(request.link)
        if link is None:
            link = self._links[request.link] = self._try(lambda: self._engine.open_connection(TIMEOUT))
        commands = [op for op in request.ops if isinstance(op, Command)]
        replies = self._try(lambda: self._engine.call_on(link, commands, TIMEOUT))
        for reply in replies:
            if isinstance(reply, StepFailed):
                raise _ours(reply) from reply.__cause__
        return replies

    def _look(self, mark: int) -> int:
        """Compare the state of the real server with the store of that mark."""
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

    # The interface of a server.

    def later(self, store_mark: int, us: int) -> int:
        meant = super().later(store_mark, us)
        if meant == store_mark:
            return meant
        if store_mark != self._now:  # a replica, which is compared only when it takes over
            self._dumps[meant] = self._dumps[store_mark]
            return meant
        self._passed_us += us
        time.sleep(max(0.0, self._lag - self._behind()))
        return self._look(meant)

    def _behind(self) -> float:
        """The delay of the replay, because steps take time here and none in the search."""
        return time.monotonic() - self._began - self._passed_us / 1e6

    def execute(self, store_mark: int, request: Request, channel: str) -> Done:
        with _LUA:
            meant = super().execute(store_mark, request, channel)
        if request.listens:
            self._subscribe(channel)
            self._note(channel, "SUBSCRIBE", "OK")
            self._look(meant.store)
            return meant
        for op in request.ops:
            if isinstance(op, Step):
                self._names += [name for name in op.keys if name not in self._names]
            self._values.update(map(str, op.args[:1] if isinstance(op, Step) else op.args[2:3]))
        replies = tuple(map(frozen, self._call(request)))
        self._note(channel, "; ".join(map(command_text, request.ops)), reply_text(replies[-1]))
        if _kind(replies) != _kind(meant.replies):
            answered, instead = (shortened(reply_text(some[-1])) for some in (replies, meant.replies))
            raise Differs(f"it answers {answered}, and not {instead}")
        received = tuple(
            (name.encode(), text) for name, each in self._subscribers.items() for text in self._received(each)
        )
        woken = [name for name, _ in meant.notifications if name.decode() in self._subscribers]
        if sorted(name for name, _ in received) != sorted(woken):
            raise Differs(f"it wakes {len(received)}, and not {len(woken)}")
        self._look(meant.store)
        if self.key in meant.written:
            self._lag = self._behind()
        return meant._replace(replies=replies, notifications=received)

    def _note(self, channel: str, asked: str, answered: str) -> None:
        if not self.asked and channel != "bell:N":
            self.asked, self.answered = shortened(asked), shortened(answered)

    def hang_up(self, store_mark: int, links: tuple[str, ...], channel: str = "") -> int:
        meant = super().hang_up(store_mark, links, channel)
        prefix = channel.removeprefix("bell:") + "/"
        for name in list(self._links):
            if name in links or (channel and name.startswith(prefix)):
                self._engine.close_connection(self._links.pop(name))
        if channel in self._subscribers:
            self._unsubscribe(channel)
        return self._look(meant)

    def change(self, store_mark: int, kind: str, other: int = -1) -> int:
        meant = super().change(store_mark, kind, other)
        if kind == "eviction":
            self._ask("DEL", self.key.decode())
        elif kind == "script_flush":
            self._ask("SCRIPT", "FLUSH")
        else:
            self._ask("DEL", *self._names)
            for channel in list(self._subscribers):
                self._unsubscribe(channel)
            for name in list(self._links):
                self._engine.close_connection(self._links.pop(name))
            for name, (dump, ends_ms) in self._dumps[other].items() if kind == "failover" else ():
                self._ask("EVAL", _RESTORE, 1, name, ends_ms, dump.hex())
        return self._look(meant)

    # Notifications.

    def _subscribe(self, channel: str) -> None:
        if channel in self._subscribers:
            return
        extra, left = self._try(lambda: self._target.prepared(TIMEOUT))
        subscriber = self._subscribers[channel] = self._target.connection(left, extra)
        self._try(subscriber.connect)
        self._exchange(subscriber, "subscribe", channel)

    def _received(self, subscriber: Any) -> list[bytes]:
        """All notifications so far. The server answers in order: they come before the answer to PING."""
        return [text for kind, _, text in self._exchange(subscriber, "ping") if kind == b"message"]

    def _unsubscribe(self, channel: str) -> None:
        subscriber = self._subscribers.pop(channel)
        self._exchange(subscriber, "unsubscribe", channel)  # the server may notice a closed connection late
        subscriber.disconnect()

    def _exchange(self, subscriber: Any, command: str, *words: str) -> Sequence[Any]:
        """All messages that came before the answer to that command."""
        answer = b"pong" if command == "ping" else command.encode()
        self._try(lambda: subscriber.send_command(command.upper(), *words))
        found: list[Any] = []
        while True:
            reply = self._try(subscriber.read_response)
            if reply[0] == answer:
                return found
            found.append(reply)


def _ours(error: StepFailed | HoldfastError) -> HoldfastError:
    return error.error if isinstance(error, StepFailed) else error


def _kind(reply: Any) -> Any:
    """A reply without the numbers that depend on the time: fences, ttls, deadlines."""
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
