"""A schedule told as a story: what happens at each step, in words that a beginner follows.

Nothing here decides anything: the schedule is performed once more, and what is seen is put into words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from holdfast.lab.check import CHECKS, Event
from holdfast.lab.model import Model
from holdfast.lab.promises import PROMISES
from holdfast.lab.site import Failure, Request
from holdfast.lab.state import NEVER, Choice, Config, State, under_way
from holdfast.lab.store import START_US
from holdfast.lab.trace import BROKEN, Moment
from holdfast.protocol.effects import Command

__all__ = ["reply_said", "said", "shortened", "tell"]

_LONG_NUMBER: Final = re.compile(r"\b1[67]\d{8}(?:\d{3}|\d{6})?\b")
_TOKEN: Final = re.compile(r"\b([A-HN])-[\w-]*\.0*(\d+)")

# What a command means by what it answers: (name, reply) -> words; None stands for any other reply.
_MEANING: Final[dict[str, dict[Any, str]]] = {
    "SETNX": {1: "takes the key, which was free", 0: "finds the key taken"},
    "EXPIRE": {1: "sets how long the key lives", 0: "finds no key whose life it could set"},
    "DEL": {0: "finds nothing to delete", None: "deletes the key"},
    "GET": {None: "reads what is in the key"},
    "GETSET": {None: "puts its own deadline into the key, and sees what was there"},
    "TTL": {-1: "asks how long the key lives: for ever", -2: "asks how long the key lives: there is none"},
    "WATCH": {None: "asks to be told if anybody touches the key before its next write"},
    "UNWATCH": {None: "stops watching the key"},
    "SET": {b"OK": "writes the key, which was free", (): "finds the key taken"},
    "add": {b"STORED": "adds the key, which was free", b"NOT_STORED": "finds the key taken"},
    "gets": {None: "reads what is in the key, and its version"},
    "md": {b"HD": "deletes the version that it has read", None: "does not delete it: it is another version now"},
    "release": {1: "gives the lock back", None: "finds that the lock is not its own any more"},
    "renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "abandon": {None: "cleans up after itself"},
    "room_release": {1: "gives its place back", None: "finds that it has no place any more"},
    "room_renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "room_find": {(1,): "finds its place there", None: "finds that its lease is gone"},
    "room_abandon": {None: "cleans up after itself"},
    "multi_release": {None: "gives its names back"},
    "multi_renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "multi_abandon": {None: "cleans up after itself"},
    "latch_look": {None: "looks whether the latch is open"},
    "latch_count_down": {None: "counts the latch down"},
    "election_leader": {None: "asks who leads"},
    "free": {1: "deletes the key, which holds its own value", 0: "leaves the key alone: it holds another's value"},
}


def tell(config: Config, choices: tuple[Choice, ...], invariant: str = "") -> tuple[Moment, ...]:
    """The moments of that schedule; the one at which the invariant is broken says so, and is the last."""
    model = Model(config._replace(most_faults=len(choices)))
    state = model.first()
    history: tuple[Event, ...] = ()
    moments = []
    for choice in choices:
        before = state
        state, events = model.after(state, choice)
        history += events
        teller = _Teller(model, before, state, events)
        moment = teller.moment(choice)
        broken = violation(model, history, events, invariant)
        moments.append(moment if not broken else _with(moment, broken))
        if broken:
            break
    return tuple(moments)


def violation(model: Model, history: tuple[Event, ...], events: tuple[Event, ...], invariant: str) -> str:
    check = {**CHECKS, **PROMISES}.get(invariant)
    if check is not None and any(event.kind in check.ends_with for event in events):
        report = check.judge(history)
        if report.verdict == BROKEN:
            return report.why.format(*(model.names[client] for client in report.clients))
    return ""


def _with(moment: Moment, broken: str) -> Moment:
    fields = {name: getattr(moment, name) for name in moment.__slots__}
    return Moment(**{**fields, "violation": broken})


class _Teller:
    def __init__(self, model: Model, before: State, after: State, events: tuple[Event, ...]) -> None:
        self.model = model
        self.before = before
        self.after = after
        self.events = events

    def moment(self, choice: Choice) -> Moment:
        model, after = self.model, self.after
        actor, does, fault, command, reply = self._told(choice)
        value, expires_us = model.server.lock(after.store)
        ttl_us = None if expires_us is None else max(0, expires_us - 1000 - model.server.now_us(after.store))
        return Moment(
            at_us=after.now_us,
            actor=actor,
            does=" ".join([does, *self._consequences(choice)]),
            fault=fault,
            command=command,
            reply=reply,
            value=None if value is None else self._value(value),
            ttl_us=ttl_us,
            holders=tuple(
                name
                for name, mark, stopped in zip(model.names, after.locals, after.stopped, strict=True)
                if stopped != NEVER and self._believes(mark)
            ),
            dead=tuple(name for name, until in zip(model.names, after.stopped, strict=True) if until == NEVER),
            paused=tuple(name for name, until in zip(model.names, after.stopped, strict=True) if 0 < until < NEVER),
        )

    def _believes(self, mark: int) -> bool:
        local = self.model.locals[mark]
        return local.holds and (local.until_us is None or self.after.now_us < local.until_us)

    def _value(self, value: bytes) -> str:
        text = shortened(value.decode(errors="replace"))
        if self.model.config.by_server:
            return text
        until_us = self.model.config.deadline_us(value, None) or 0
        return f"until {(until_us - START_US) / 1e6:.2f}s"

    def _told(self, choice: Choice) -> tuple[str, str, str, str, str]:
        """Who, does what, by which fault; and the command and its reply, if there is one."""
        kind = choice[0]
        if kind == "time":
            return "time", self._time_passes(), "", "", ""
        if kind == "fault":
            return self._fault(choice)
        actor = self.model.names[choice[2] if kind == "deliver" else choice[1]]
        if kind == "do":
            return actor, *self._done(choice[1], choice[2])
        if kind == "execute":
            words, fault, command, reply = self._done(choice[1], choice[2])
            return actor, f"{words[:-1]}; the reply is on its way.", fault, command, reply
        if kind == "deliver" and choice[1] == "ghost":
            request = Request(0, *dict(under_way(self.before))[choice[1:]].content)
            command, reply, words = self._exchange(choice[2], request)
            return "network", f"brings an old request of {actor} at last, which {words}.", "", command, reply
        words = {
            "tick": "looks at the clock.",
            "come": "comes, and wants the lock.",
            "resume": "goes on, as if nothing had happened.",
            "leave": "writes its result, and is about to release.",
            "deliver": {
                "bell": "is woken by the server.",
                "push": "is told that somebody else has written the key.",
                "cut": "notices that its connection for wake-ups is broken.",
                "reply": "gets the reply to its step.",
                "late": "gets the reply to its step at last.",
            }.get(str(choice[1]), ""),
        }[kind]
        return actor, str(words), "", "", ""

    def _time_passes(self) -> str:
        value, _ = self.model.server.lock(self.before.store)
        gone = value is not None and self.model.server.lock(self.after.store)[0] is None
        return "Time passes, and the key expires." if gone else "Time passes."

    def _request(self, client: int, number: int) -> Request:
        local = self.model.locals[self.before.locals[client]]
        return next(request for request in local.requests if request.number == number)

    def _done(self, client: int, number: int) -> tuple[str, str, str, str]:
        command, reply, words = self._exchange(client, self._request(client, number))
        return f"{words}.", "", command, reply

    def _exchange(self, client: int, request: Request) -> tuple[str, str, str]:
        """What is asked, what is answered, and what that means."""
        model = self.model
        done = model.server.execute(self.before.store, request, model.channels[client])
        if request.listens:
            return "SUBSCRIBE", "OK", "asks to be woken when it is its turn"
        commands = "; ".join(said(op) for op in request.ops)
        reply = reply_said(done.replies[-1])
        if getattr(request.ops[-1], "script", "") == "acquire" and isinstance(done.replies[-1], bytes | int):
            reply = "granted"
        return shortened(commands), shortened(reply), _meaning(request, done.replies)

    def _fault(self, choice: Choice) -> tuple[str, str, str, str, str]:
        kind = choice[1]
        client = choice[2] if len(choice) > 2 and kind not in ("failover",) else -1
        actor = "server" if client < 0 else self.model.names[client]
        command = reply = ""
        wakes = len(choice) > 3 and choice[3] in ("bell", "push")
        number = choice[-1] if kind != "skew" and len(choice) > 3 and not wakes else None
        if number is not None:
            command, reply, _ = self._exchange(client, self._request(client, number))
        when = {"before": f" before it could send {command}", "after": f" after {command} was executed"}
        where = when.get(str(choice[3]) if len(choice) > 3 else "", "")
        words = {
            "crash": f"crashes{where}.",
            "stall": f"is stopped for a while{where} (a long garbage collection, a busy machine).",
            "pause": f"is stopped for longer than a ttl{where} (a suspended machine, a debugger).",
            "skew": "has a clock that is " + ("ahead." if choice[-1] == 1 else "behind."),
            "lost_request": f"sends {command}, which never arrives.",
            "lost_reply": f"sends {command}, which is executed; the reply is lost." if command else "misses a wake-up.",
            "late_reply": f"sends {command}, which is executed; the reply is late.",
            "duplicate": f"sends {command}; the network keeps a copy of it.",
            "delay": f"sends {command}, which is held up somewhere in the network.",
            "cancel": "is cancelled by whoever started it.",
            "script_flush": "The server forgets its scripts.",
            "restart": "The server starts again, and has forgotten everything.",
            "failover": "The server fails, and its replica takes over, which has not got the last write.",
            "eviction": "The server throws the key away to make room.",
            "clock_jump": "The server's clock jumps ahead.",
            "clock_back": "The server's clock is set back.",
        }[kind]
        executed = kind in ("lost_reply", "late_reply", "duplicate") or (len(choice) > 3 and choice[3] == "after")
        return actor, words, kind, command, reply if executed else ""

    def _consequences(self, choice: Choice) -> Iterator[str]:
        """What the step means for those who took part, as far as the words so far do not say it."""
        names = self.model.names
        for event in self.events:
            name = names[event.client] if event.client >= 0 else ""
            if event.kind == "granted":
                fence = f" with fence …{event.fence % 1_000_000:06d}" if event.fence is not None else ""
                yield f"{name} has the lock{fence}."
            elif event.kind == "passed":
                yield f"{name} finds the latch open, and passes."
            elif event.kind == "refused":
                yield f"{name} gives up." if choice[0] != "fault" else f"{name} will not have it."
            elif event.kind == "lost":
                yield f"{name} learns that its lease is lost."
            elif event.kind == "newcomer" and event.what == "out":
                yield "Everybody else is done, but a newcomer waits in vain."


def said(op: Any) -> str:
    """A step as one would type it."""
    if isinstance(op, Command):
        words = [str(word) for word in op.args]
        return f"EVAL … {words[-1]}" if words[0] == "EVAL" else " ".join(words)
    return " ".join((op.script, op.keys[0], *op.args[:1]))


def shortened(text: str) -> str:
    """Times since 1970 and tokens are long, and say little: told from the beginning of the run, and by their owner."""
    return _TOKEN.sub(r"\1#\2", _LONG_NUMBER.sub(_since_the_beginning, text))


def _since_the_beginning(found: re.Match[str]) -> str:
    per_second = 10 ** (len(found[0]) - 10)
    return f"{int(found[0]) / per_second - START_US / 1e6:.2f}s"


def reply_said(reply: Any) -> str:
    if reply is None:
        return "nil"
    if isinstance(reply, Failure):
        return "error"
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return ", ".join(reply_said(item) for item in reply) if isinstance(reply, tuple) else str(reply)


def _meaning(request: Request, replies: tuple[Any, ...]) -> str:
    op, reply = request.ops[-1], replies[-1]
    name = str(op.args[0]) if isinstance(op, Command) else op.script
    if isinstance(reply, Failure):
        return "gets an error"
    if name == "acquire":
        if not isinstance(reply, tuple):
            return "takes the lock"
        if reply[0] != 0:
            return "is refused: this attempt was given up before"
        return "finds it taken, and queues" if request.ops[0].args[4] else "finds it taken"
    if name == "room_acquire":
        if reply[0] == 0:
            return "finds no room, and queues" if op.args[4] else "finds no room"
        return "comes in" if reply[0] == 1 else "is refused"
    if name == "EXEC":
        return _meaning_of_transaction(request, reply)
    if name == "EVAL":
        return "deletes the key, if it is its own" if reply else "leaves the key alone: it is not its own"
    means = _MEANING.get(name, {})
    plain = () if reply is None else reply
    if plain in means:
        return means[plain]
    return means.get(None, f"asks {name}") + (f": {shortened(reply_said(reply))}" if name in ("GET", "TTL") else "")


def _meaning_of_transaction(request: Request, reply: Any) -> str:
    if reply is None:
        return "finds that the key was touched, so nothing is done"
    first = str(request.ops[1].args[0])
    if first == "SETNX":
        return "takes the key, which was free, and sets how long it lives" if reply[0] else (
            "finds the key taken, and sets how long it lives all the same"
        )  # fmt: skip
    return "deletes the key" if first == "DEL" else "writes the key"
