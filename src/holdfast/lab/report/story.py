"""A schedule as text: what happens at each step, in plain sentences.

The schedule is performed once more, and each step is described.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.lab.invariants.history import BROKEN, Event
from holdfast.lab.invariants.locks import CHECKS
from holdfast.lab.invariants.primitives import PRIMITIVE_CHECKS
from holdfast.lab.report.trace import Moment
from holdfast.lab.search.failover import is_at_old
from holdfast.lab.search.faults import SERVER_WIDE
from holdfast.lab.search.model import Model
from holdfast.lab.search.site import Failure, Request
from holdfast.lab.search.state import NEVER, Choice, Config, State, under_way
from holdfast.lab.servers.store import START_US
from holdfast.protocol.effects import Command

_LONG_NUMBER: Final = re.compile(r"\b1[67]\d{8}(?:\d{3}|\d{6})?\b")
_TOKEN: Final = re.compile(r"\b([A-HN])-[\w-]*\.0*(\d+)")

# The meaning of a reply: by the name of the command, then by the reply. None means any other reply.
_MEANING: Final[dict[str, dict[Any, str]]] = {
    "SETNX": {1: "takes the key, which was free", 0: "finds the key taken"},
    "EXPIRE": {1: "sets the ttl of the key", 0: "finds no key to set a ttl on"},
    "DEL": {0: "finds nothing to delete", None: "deletes the key"},
    "GET": {None: "reads what is in the key"},
    "GETSET": {None: "writes its own deadline into the key, and reads the old one"},
    "TTL": {-1: "asks for the ttl of the key, which has none", -2: "asks for the ttl of the key, which does not exist"},
    "WATCH": {None: "watches the key: its next write fails if another client writes first"},
    "UNWATCH": {None: "stops watching the key"},
    "WAIT": {0: "finds that no replica has the grant", None: "renews its grant, and a replica confirms that"},
    "SET": {b"OK": "writes the key, which was free", (): "finds the key taken"},
    "add": {b"STORED": "adds the key, which was free", b"NOT_STORED": "finds the key taken"},
    "gets": {None: "reads what is in the key, and its version"},
    "md": {b"HD": "deletes the version that it has read", None: "does not delete it: it is another version now"},
    "release": {1: "releases the lock", None: "finds that the lock is not its own any more"},
    "renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "abandon": {None: "cleans up after itself"},
    "pool_release": {1: "releases its permit", None: "finds that it has no permit any more"},
    "pool_renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "pool_find": {(1,): "finds its permit there", None: "finds that its lease is gone"},
    "pool_abandon": {None: "cleans up after itself"},
    "multi_release": {None: "releases its names"},
    "multi_renew": {1: "renews its lease", None: "finds that its lease is gone"},
    "multi_abandon": {None: "cleans up after itself"},
    "multi_roll_back": {None: "gives back what it has, because another name is refused"},
    "latch_look": {None: "asks whether the latch is open"},
    "latch_count_down": {None: "counts the latch down"},
    "election_leader": {None: "asks for the leader"},
    "free": {1: "deletes the key, which holds its own value", 0: "does not delete the key: it holds another value"},
}

_RESHARDS: Final = {
    "moved": "The slot of the key moves to another node.",
    "moving": "The slot of the key begins to move to another node. No key has moved yet.",
    "divided": "The slot of the key begins to move to another node. Some keys have moved.",
}


_FAILOVER: Final = {
    "elect": "The Sentinels agree on a failover, and the first of them leads it.",
    "promote": "A replica is promoted. The Sentinel that leads goes on listing the old primary.",
    "hear": "The second Sentinel hears of the new primary.",
    "stop": "The Sentinel that leads stops, before another one has heard of the new primary.",
    "follow": "Another replica follows the new primary.",
    "end": "The failover ends: the leader lists the new primary.",
    "resume": "The old primary resumes.",
    "demote": "The old primary is demoted.",
}


def tell(config: Config, choices: tuple[Choice, ...], invariant: str = "") -> tuple[Moment, ...]:
    """The moments of that schedule, up to the one that breaks the invariant."""
    model = Model(config._replace(most_faults=len(choices)))
    state = model.first()
    history: tuple[Event, ...] = ()
    moments = []
    for choice in choices:
        before = state
        state, events = model.after(state, choice)
        history += events
        broken = violation(model, history, events, invariant)
        moments.append(replace(_Description(model, before, state, events).moment(choice), violation=broken))
        if broken:
            break
    return tuple(moments)


def violation(model: Model, history: tuple[Event, ...], events: tuple[Event, ...], invariant: str) -> str:
    check = {**CHECKS, **PRIMITIVE_CHECKS}.get(invariant)
    if check is not None and any(event.kind in check.ends_with for event in events):
        report = check.judge(history)
        if report.verdict == BROKEN:
            return report.why.format(*(model.names[client] for client in report.clients))
    return ""


class _Description:
    def __init__(self, model: Model, before: State, after: State, events: tuple[Event, ...]) -> None:
        self.model = model
        self.before = before
        self.after = after
        self.events = events

    def moment(self, choice: Choice) -> Moment:
        model, after = self.model, self.after
        actor, does, fault, command, reply = self._describe(choice)
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

    def _describe(self, choice: Choice) -> tuple[str, str, str, str, str]:
        """The actor, what it does, the kind of fault; and the command and its reply, if there is one."""
        kind = choice[0]
        if kind == "time":
            return "time", self._time_passes(), "", "", ""
        if kind == "failover":
            return "server", _FAILOVER[choice[1]], "", "", ""
        if kind == "moved":
            return "server", "The slot of the key has moved to another node.", "", "", ""
        if kind == "fault":
            return self._fault(choice)
        actor = self.model.names[choice[2] if kind == "deliver" else choice[1]]
        if kind in ("do", "execute") and self.before.outdated >> choice[1] & 1:
            command, *_ = self._exchange(choice[1], self._request(choice[1], choice[2]))
            return (
                actor,
                "asks the wrong node, which does nothing, and sends its step to the other.",
                "",
                command,
                "MOVED",
            )
        if kind == "do":
            return actor, *self._done(choice[1], choice[2])
        if kind == "execute":
            words, fault, command, reply = self._done(choice[1], choice[2])
            return actor, f"{words[:-1]}; the reply is on its way.", fault, command, reply
        if kind == "deliver" and choice[1] == "ghost":
            request = Request(0, *dict(under_way(self.before))[choice[1:]].content)
            command, reply, words = self._exchange(choice[2], request)
            return "network", f"delivers an old request of {actor}, which {words}.", "", command, reply
        words = {
            "tick": "looks at the clock.",
            "come": "wants the lock.",
            "resume": "continues, as if nothing had happened.",
            "leave": "writes its result, and is about to release.",
            "deliver": {
                "bell": "is woken by the server.",
                "push": "is notified that another client has written the key.",
                "cut": "notices that its connection for wake-ups is broken.",
                "reply": "gets the reply to its step.",
                "late": "gets the late reply to its step.",
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
        """The command, the reply, and the meaning of the reply."""
        model = self.model
        store = self.before.old if is_at_old(self.after, client) else self.before.store
        done = model.server.execute(store, request, model.channels[client])
        if request.listens:
            return "SUBSCRIBE", "OK", "subscribes, to be woken at its turn"
        commands = "; ".join(command_text(op) for op in request.ops)
        if request.link in self.before.broken_links:
            return shortened(commands), "error", "finds that its connection is broken"
        reply = reply_text(done.replies[-1])
        if getattr(request.ops[-1], "script", "") == "acquire" and isinstance(done.replies[-1], bytes | int):
            reply = "granted"
        return shortened(commands), shortened(reply), _meaning(request, done.replies)

    def _fault(self, choice: Choice) -> tuple[str, str, str, str, str]:
        kind = choice[1]
        client = choice[2] if len(choice) > 2 and kind not in SERVER_WIDE else -1
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
            "delay": f"sends {command}, which the network delays.",
            "cancel": "is cancelled by its caller.",
            "script_flush": "The server loses its scripts.",
            "restart": "The server restarts without its data.",
            "failover": "The server fails, and a replica takes over, "
            + (f"{_what_it_lacks(choice[-1])}." if kind == "failover" else ""),
            "refused": f"sends {command}, which is executed, and answered with an error.",
            "unconfirmed": f"sends {command}, which is executed; no replica confirms it in time.",
            "eviction": "The server evicts the key to free memory.",
            "clock_jump": "The server's clock jumps ahead.",
            "clock_back": "The server's clock is set back.",
            "reshard": _RESHARDS.get(str(choice[-1]), ""),
        }[kind]
        executed = kind in ("lost_reply", "late_reply", "duplicate", "refused", "unconfirmed") or (
            len(choice) > 3 and choice[3] == "after"
        )
        return actor, words, kind, command, reply if executed else ""

    def _consequences(self, choice: Choice) -> Iterator[str]:
        """Sentences about what the step means for the clients, if the text so far does not say it."""
        names = self.model.names
        for event in self.events:
            name = names[event.client] if event.client >= 0 else ""
            if event.kind == "granted":
                fence = f" with fence …{event.fence % 1_000_000:06d}" if event.fence is not None else ""
                yield f"{name} has the lock{fence}."
            elif event.kind == "passed":
                yield f"{name} finds the latch open, and passes."
            elif event.kind == "refused":
                yield f"{name} gives up." if choice[0] != "fault" else f"{name} does not get the lock."
            elif event.kind == "lost":
                yield f"{name} is notified that its lease is lost."
            elif event.kind == "newcomer" and event.what == "out":
                yield "All other clients have left, but a newcomer does not get the lock."


def _what_it_lacks(lag: Any) -> str:
    """Which writes the new primary lacks. ``lag`` is the last part of the choice of a failover: see ``Model.moves``."""
    few = {-1: "with all writes", 0: "without the last write"}
    return few.get(lag) or f"without the last {int(lag) + 1} writes"


def command_text(op: Any) -> str:
    """A step as a user would type it."""
    if isinstance(op, Command):
        words = [str(word) for word in op.args]
        return f"EVAL … {words[-1]}" if words[0] == "EVAL" else " ".join(words)
    return " ".join((op.script, op.keys[0], *op.args[:1]))


def shortened(text: str) -> str:
    """The text with shorter times (since the beginning of the run) and tokens (by their owner)."""
    return _TOKEN.sub(r"\1#\2", _LONG_NUMBER.sub(_since_the_beginning, text))


def _since_the_beginning(found: re.Match[str]) -> str:
    per_second = 10 ** (len(found[0]) - 10)
    return f"{int(found[0]) / per_second - START_US / 1e6:.2f}s"


def reply_text(reply: Any) -> str:
    if reply is None:
        return "nil"
    if isinstance(reply, Failure):
        return "error"
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return ", ".join(reply_text(item) for item in reply) if isinstance(reply, tuple) else str(reply)


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
    if name == "pool_acquire":
        if reply[0] == 0:
            return "finds no free permit, and queues" if op.args[4] else "finds no free permit"
        return "gets a permit" if reply[0] == 1 else "is refused"
    if name == "EXEC":
        return _meaning_of_transaction(request, reply)
    if name == "EVAL":
        return "deletes the key, if it is its own" if reply else "does not delete the key: it is not its own"
    means = _MEANING.get(name, {})
    plain = () if reply is None else reply
    if plain in means:
        return means[plain]
    return means.get(None, f"asks {name}") + (f": {shortened(reply_text(reply))}" if name in ("GET", "TTL") else "")


def _meaning_of_transaction(request: Request, reply: Any) -> str:
    if reply is None:
        return "finds that the key was written, so its transaction fails"
    first = str(request.ops[1].args[0])
    if first == "SETNX":
        return "takes the key, which was free, and sets its ttl" if reply[0] else (
            "finds the key taken, but sets its ttl"
        )  # fmt: skip
    return "deletes the key" if first == "DEL" else "writes the key"
