"""Sentinel: which server is the primary at the moment.

Every new connection asks the Sentinels, one after the other, until one of them names a primary. Then it checks by ROLE
that the server it has reached is a primary. Nothing is cached: connections are long-lived, and a cached address would
be wrong exactly when it matters, after a failover.

Failovers. The Sentinels number their decisions (the *epoch*); protocol/primary.py says what one answer means, and when
a client that has followed a decision goes back to an earlier one. When the primary has changed, the client drops all
connections to other servers, idle or not. An old primary may still be up but cut off from its Sentinels, and would go
on granting locks that the new primary does not know. A request that was in flight to the old primary has an unknown
outcome, whatever the old primary answers, so it never becomes a hold.

A healthy connection does not show that a failover has happened: the Sentinels may demote an old primary, and close its
connections, as late as ten seconds after they have named a new one. So a client that is in use asks a Sentinel again
every second, before its next step. If no Sentinel answers, the client keeps its connections.

Two cases remain: the first second after a failover, and a client that reaches an old primary but no Sentinel that knows
the new one. ``replicas=`` covers both, unless enough replicas still follow the old primary: one that hangs or is cut
off with it does not know of the failover either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import redis.exceptions

from holdfast.engines import handshake
from holdfast.engines.redis.failures import why_no_connection
from holdfast.errors import Unavailable, rounded
from holdfast.protocol.primary import (
    ASK_AGAIN,
    BEHIND,
    DOWN,
    FOLLOW,
    GO_BACK,
    RECHECK_AFTER,
    STAY,
    Choice,
    Endpoint,
    Sighting,
    choose,
    is_late,
    settle,
)

_TRIES: Final = 3  # times that a Sentinel is asked whose two answers do not agree
_PROMOTED: Final = ("reconf_slaves", "update_config")  # phases of a failover, in SENTINEL MASTERS
_SHORTEST: Final = 0.25  # seconds: each Sentinel gets at least this long to answer, if that much time is left
_RECHECK_TIMEOUT: Final = 0.25  # seconds; a step waits no longer than this for the answer
_LONGEST_PAUSE: Final = 8.0  # seconds between two rechecks that got no answer
_ADVICE: Final = "See SENTINEL MASTERS there; a failover may be under way"


class Node(NamedTuple):
    """One Sentinel: how to connect to it."""

    address: str
    connection_class: type[Any]
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Sentinel {self.address}>"  # the settings contain a password

    def connection_settings(self, timeout: float) -> dict[str, Any]:
        return {**self.settings, "socket_timeout": timeout, "socket_connect_timeout": timeout}


class Followed(NamedTuple):
    """The decision of the Sentinels that a client follows."""

    endpoint: Endpoint | None = None
    epoch: int = -1


class Primary:
    """The primary that a client follows. All connections of the client share this object.

    Without a lock: a fork, or a signal handler that uses the client, may come while a thread holds one.
    """

    def __init__(self) -> None:
        self._moves = {0: Followed()}  # by number; the last one counts, and none is ever replaced
        self.on_move: list[Callable[[], None]] = []  # called when the primary has changed, by any thread

    @property
    def followed(self) -> Followed:
        return self._moves[len(self._moves) - 1]

    @property
    def endpoint(self) -> Endpoint | None:
        return self.followed.endpoint

    def move(self, to: Followed, known: Followed) -> None:
        """Follow ``to``, which was chosen when ``known`` was followed.

        Not if another thread has followed a later decision since: then the choice is stale.
        """
        while True:
            number = len(self._moves)
            now = self._moves[number - 1]
            if to == now or (to.epoch < now.epoch and now is not known):
                return
            if self._moves.setdefault(number, to) is to:  # atomic: of several threads, one makes this move
                break
        if now.endpoint not in (None, to.endpoint):
            for drop_others in self.on_move:
                drop_others()


class Said(NamedTuple):
    """What a Sentinel answers."""

    address: Endpoint | None  # of our service; None if it is unknown, or if this user may not ask
    states: dict[str, dict[str, str]]  # of each primary that it watches, by service


_Answer: TypeAlias = Said | Exception


class Sentinels:
    """Finds the primary of one service."""

    def __init__(
        self, service: str, nodes: Sequence[Node], *, fewest_others: int = 0, forced_host: str | None = None
    ) -> None:
        self.service = service
        self.primary = Primary()
        self._nodes = list(nodes)  # the Sentinel that named the primary is first, one that is being asked is last
        self._forced_host = forced_host
        self._recheck_at = 0.0
        self._pause = RECHECK_AFTER
        self._unanswered = 0  # rechecks since a Sentinel has answered
        self._confirmed_at = 0.0  # when a Sentinel has last named the primary that is followed
        self._demoted = False  # since then, that server has said that it is a replica
        self._fewest_others = fewest_others

    def is_primary(self, connection: Any) -> bool:
        """Whether this connection of redis-py leads to the primary that was found last."""
        return self.primary.endpoint in (None, (connection.host, connection.port))

    def has_to_ask(self, asked_at: float) -> bool:
        """Whether to ask a Sentinel before a reply is used whose request was sent then."""
        return is_late(monotonic() - max(asked_at, self._confirmed_at))

    def is_recheck_due(self) -> bool:
        """Whether a Sentinel should be asked before the next step. True for one caller at a time."""
        if monotonic() < self._recheck_at:
            return False
        self._postpone()
        return self.primary.endpoint is not None  # if there is none yet, the first connection asks anyway

    def _postpone(self) -> None:
        self._recheck_at = monotonic() + self._pause
        if self._unanswered >= len(self._nodes):  # each of them was asked in vain: a silent one uses up a recheck
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._unanswered += 1

    def recheck(self) -> None:
        """Ask whether another server has become the primary. If no Sentinel answers, keep the known one."""
        try:
            self.find(_RECHECK_TIMEOUT)
        except Unavailable:
            pass

    async def recheck_async(self) -> None:
        try:
            await self.find_async(_RECHECK_TIMEOUT)
        except Unavailable:
            pass

    def find(self, timeout: float) -> dict[str, Any]:
        """The host and port of the primary, as settings for a connection."""
        search = self._search(timeout)
        try:
            node, patience = next(search)
            while True:
                answer: _Answer
                try:
                    answer = _ask(node, self.service, patience)
                except (OSError, redis.exceptions.RedisError) as error:
                    answer = error
                node, patience = search.send(answer)
        except StopIteration as found:
            return _settings(found.value)

    async def find_async(self, timeout: float) -> dict[str, Any]:
        search = self._search(timeout)
        try:
            node, patience = next(search)
            while True:
                answer: _Answer
                try:
                    answer = await asyncio.wait_for(_ask_async(node, self.service, patience), patience)
                except (OSError, redis.exceptions.RedisError) as error:
                    answer = error
                node, patience = search.send(answer)
        except StopIteration as found:
            return _settings(found.value)

    def _search(self, timeout: float) -> Generator[tuple[Node, float], _Answer, Endpoint]:
        """Yields the Sentinel to ask next and its timeout, and receives its answer. Unavailable if none is usable."""
        causes: dict[str, str] = {}
        behind: list[tuple[Choice, Node]] = []
        known = self.primary.followed
        nodes = list(self._nodes)
        until, each = monotonic() + timeout, max(_SHORTEST, timeout / len(nodes))
        for node in nodes:
            if monotonic() < until:  # else it is not asked, and comes before those that were
                self._nodes = sorted(self._nodes, key=lambda other: other is node)  # stable; one assignment is atomic
            for _ in range(_TRIES):
                left = min(each, until - monotonic())
                answer: _Answer = (yield node, left) if left > 0 else TimeoutError()
                choice = self._choose(answer, known)
                if choice is None or choice.verdict is not ASK_AGAIN:
                    break
            if choice is not None and choice.verdict is FOLLOW:
                return self._follow(node, choice, known)
            if choice is not None and choice.verdict is BEHIND:
                behind.append((choice, node))
            causes[f"Sentinel {node.address}"] = self._why_not(answer, choice, max(0.0, left))
        verdict = settle(len(behind), len(nodes), monotonic() - self._confirmed_at, demoted=self._demoted)
        if verdict is GO_BACK:
            choice, node = max(behind, key=lambda found: found[0].epoch)
            return self._follow(node, choice, known)
        if verdict is STAY:
            return self._note_answer()
        raise Unavailable(causes, _ADVICE)

    def _follow(self, node: Node, choice: Choice, known: Followed) -> Endpoint:
        self._nodes = sorted(self._nodes, key=lambda other: other is not node)
        self._confirmed_at, self._demoted = monotonic(), False
        host, port = choice.endpoint
        self.primary.move(Followed((self._forced_host or host, port), choice.epoch), known)
        return self._note_answer()

    def _note_answer(self) -> Endpoint:
        """The primary that is followed now. The next recheck is due in a second."""
        self._pause, self._unanswered = RECHECK_AFTER, 0
        self._recheck_at = monotonic() + RECHECK_AFTER
        assert self.primary.endpoint is not None
        return self.primary.endpoint

    def _choose(self, answer: _Answer, known: Followed) -> Choice | None:
        """What to do about the answer; None if it says nothing about our service."""
        state = answer.states.get(self.service) if isinstance(answer, Said) else None
        if state is None:
            return None
        assert isinstance(answer, Said)
        flags = state["flags"].split(",")
        seen = Sighting(
            answer.address,
            (state["ip"], int(state["port"])),
            int(state["config-epoch"]),
            failing_over="failover_in_progress" in flags,
            promoted=state.get("failover-state") in _PROMOTED,
            up="master" in flags and not {"s_down", "o_down"}.intersection(flags),
        )
        choice = choose(seen, known.epoch)
        return choice if int(state["num-other-sentinels"]) >= self._fewest_others else choice._replace(verdict=DOWN)

    def _why_not(self, answer: _Answer, choice: Choice | None, waited: float) -> str:
        if choice is not None:
            if choice.verdict is DOWN:
                return f"the primary of {self.service!r} is down, and no other has taken over yet"
            host, port = choice.endpoint
            return f"it names {host}:{port}, which was replaced since"
        if isinstance(answer, Said):
            return f"it knows no service {self.service!r}"
        if isinstance(answer, (TimeoutError, redis.exceptions.TimeoutError)):
            return f"it did not answer within {rounded(waited)} s"
        text = str(answer)
        if "NOAUTH" in text or "Authentication required" in text:
            return "it wants a password (sentinel_password= in the URL)"
        if isinstance(answer, redis.exceptions.AuthenticationError) or "WRONGPASS" in text or "NOPERM" in text:
            return "it refused the user or the password (sentinel_username= and sentinel_password= in the URL)"
        if isinstance(answer, redis.exceptions.ResponseError):
            return "it is no Sentinel"
        return why_no_connection(answer, text)[0]

    def check(self, connection: Any) -> None:
        """Raise Unavailable unless the server at the other end is a primary."""
        connection.send_command("ROLE")
        try:
            role = connection.read_response()
        except redis.exceptions.ResponseError:
            role = None  # this user may not use ROLE; a READONLY reply will show that it is a replica
        if self.has_to_ask(self._confirmed_at):
            self.recheck()
        self._check_role(connection, role)

    async def check_async(self, connection: Any) -> None:
        await connection.send_command("ROLE")
        try:
            role = await connection.read_response()
        except redis.exceptions.ResponseError:
            role = None  # as above
        if self.has_to_ask(self._confirmed_at):
            await self.recheck_async()
        self._check_role(connection, role)

    def _check_role(self, connection: Any, role: Any) -> None:
        demoted = role is not None and (not role or role[0] not in (b"master", "master"))
        if role is not None and self.is_primary(connection):
            self._demoted = demoted
        if demoted:
            problem = f"it is a replica, though a Sentinel names it as the primary of {self.service!r}"
        elif not self.is_primary(connection):
            problem = f"another server has become the primary of {self.service!r}"
        else:
            return
        where = f"{connection.host}:{connection.port}"
        raise Unavailable({where: problem}, "A failover may be under way; try again in a moment")


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    return {"host": endpoint[0], "port": endpoint[1]}


def _ask(node: Node, service: str, timeout: float) -> Said:
    """What this Sentinel says about the service.

    The connection is used once, so it cannot be stale, and no forked child inherits it. It does not come from a pool of
    redis-py, because such a pool refuses a new TLS connection on which session tickets wait to be read.
    """
    connection = node.connection_class(**node.connection_settings(timeout))
    try:
        handshake.connect(connection)
        connection.send_packed_command(_questions(connection, service))
        try:
            address = connection.read_response()
        except redis.exceptions.NoPermissionError:
            address = None  # MASTERS says whether a failover makes it necessary
        return _said(address, connection.read_response())
    finally:
        connection.disconnect()


async def _ask_async(node: Node, service: str, timeout: float) -> Said:
    connection = node.connection_class(**node.connection_settings(timeout))
    try:
        await connection.connect()
        await connection.send_packed_command(_questions(connection, service))
        try:
            address = await connection.read_response()
        except redis.exceptions.NoPermissionError:
            address = None  # as above
        return _said(address, await connection.read_response())
    finally:
        await connection.disconnect(nowait=True)


def _questions(connection: Any, service: str) -> Any:
    """Both questions as one message, so that hardly anything can happen between the two answers."""
    commands = [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), ("SENTINEL", "MASTERS")]
    return connection.pack_commands(commands)


def _said(address: Any, reply: Any) -> Said:
    """The replies to GET-MASTER-ADDR-BY-NAME and MASTERS."""
    states: dict[str, dict[str, str]] = {}
    try:
        for fields in reply:
            words = [word.decode() for word in fields]
            state = dict(zip(words[::2], words[1::2], strict=True))
            for number in ("port", "config-epoch", "num-other-sentinels"):
                int(state[number])
            if not {"ip", "flags"} <= state.keys():
                raise ValueError
            states[state["name"]] = state
        return Said(None if address is None else (address[0].decode(), int(address[1])), states)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        raise redis.exceptions.ResponseError("not a reply of a Sentinel") from None
