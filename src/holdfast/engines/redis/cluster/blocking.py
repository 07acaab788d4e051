"""The engines for threads on a cluster: each node has the pool and the shared connection of a single server.

``ClusterEngine`` runs steps over the pools, ``ClusterConnections`` over the shared connections. Both follow
redirections in the calling thread. If the slot map is stale, that thread also reads it. Steps that are sent together
are divided by node, and sent to all nodes before the first reply is awaited, so a node that hangs does not delay the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.blocking.pooled_connection import PooledConnection
from holdfast.engines.redis.blocking.shared_connection import SharedConnection
from holdfast.engines.redis.channels import ShardChannels
from holdfast.engines.redis.cluster.redirection import (
    ASKING,
    GET_SLOTS,
    Address,
    Redirection,
    first_key_of,
    in_parts,
    is_outdated,
    key_of,
    lost_track,
    moved_away,
    no_map,
    read_slots,
    redirected,
    redirection_of,
    with_source,
)
from holdfast.engines.redis.cluster.topology import LONGEST_ASK, MOST_REDIRECTIONS, Topology
from holdfast.engines.redis.failures import client_closed
from holdfast.engines.redis.protocol import Op
from holdfast.engines.redis.scanning import Part, cursor_after, place_in, primaries
from holdfast.engines.redis.target import Target
from holdfast.names import slot_of
from holdfast.protocol.effects import Scan, StepFailed
from holdfast.protocol.wait.notifications import NotificationRouter

_SHORTEST: Final = 0.001  # seconds


class Node:
    """One node: its pool, its shared connection, and the channels that are subscribed to there."""

    def __init__(self, topology: Topology[Node], address: Address, now: Callable[[], float]) -> None:
        self.address = address
        self.failed_at = 0.0
        self.absent_since: float | None = None
        self.channels = ShardChannels(topology.slots_waited_for, topology.note_moved)
        target = topology.target.node(*address)
        self.engine = Engine(target)
        self.shared = SharedConnection(target, topology.router, now, self.engine, self.channels)
        self.engine.fallback = self.shared

    def resubscribe(self) -> None:
        self.shared.resubscribe()

    def trust(self) -> None:
        self.engine.trust()

    def retire(self) -> None:
        self.engine.close()
        self.shared.close()

    def forget(self) -> None:
        self.engine.forget()
        self.shared.forget()


class Dedicated:
    """A connection for one caller, opened on the node of the first key that it names."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.connection: PooledConnection | None = None


class ClusterEngine:
    """Runs steps on the nodes of a cluster. Any thread may use it."""

    def __init__(self, topology: Topology[Node]) -> None:
        self.address = topology.target.address
        self.topology = topology
        self._closed = False

    def _on(self, node: Node) -> Engine | SharedConnection:
        return node.engine

    def call(self, op: Op, timeout: float) -> Any:
        """The reply to one step; StepFailed if there is none, or an error reply."""
        topology, until = self.topology, monotonic() + timeout
        if not topology.known:
            return self._call_first(op, timeout)
        if topology.stale:
            self._refresh(until)
        return self._call_now(op, until)

    def _call_first(self, op: Op, timeout: float) -> Any:
        """The reply to the first step of a client, which uses an assumed map or reads the map. Reading has an extra
        timeout, because a short timeout is meant for one round trip."""
        topology = self.topology
        if not topology.stale:
            try:
                reply = self._call_now(op, monotonic() + timeout)
                topology.confirm()
                return reply
            except StepFailed as failed:
                topology.stale = True
                if failed.sent:
                    raise
        self._refresh(monotonic() + timeout)
        return self._call_now(op, monotonic() + timeout)

    def _call_now(self, op: Op, until: float) -> Any:
        parts = in_parts(op, self.topology.channel_in)
        return self._call_one(op, until) if parts is None else self._call_parts(parts, until)

    def _call_one(self, op: Op, until: float) -> Any:
        """The reply to a step on one slot."""
        node = self.topology.owners[slot_of(key_of(op))]
        if node is None:
            raise self._no_owner()
        try:
            return self._on(node).call(op, max(_SHORTEST, until - monotonic()))
        except StepFailed as error:
            failed = error
        try:
            return self._follow(op, node, failed, until)
        finally:
            del failed  # its traceback refers to this frame

    def _follow(self, op: Op, node: Node, failed: StepFailed, until: float) -> Any:
        """The reply to a step that this node has redirected, from the other node. Raises ``failed`` if it was not."""
        for _ in range(MOST_REDIRECTIONS):
            redirection = self._redirection(node, failed)
            left = until - monotonic()
            if redirection is None:
                raise failed
            if left <= 0:
                break
            node = self.topology.follow(redirection)
            try:
                if not redirection.asking:
                    return self._on(node).call(op, left)
                _, reply = self._on(node).call_each((ASKING, with_source(op)), left)
            except StepFailed as error:
                reply = error
            if not isinstance(reply, StepFailed):
                return reply
            failed = reply
        raise redirected(self.address)

    def _redirection(self, node: Node, failed: StepFailed) -> Redirection | None:
        redirection = redirection_of(failed, node.address[0])
        if redirection is None and is_outdated(failed):
            self.topology.note_failure(node)
        return redirection

    def _call_parts(self, parts: Any, until: float) -> Any:
        """The reply to a step in parts. If one part fails after others have run, the outcome of the step is unknown."""
        begun = False
        while (part := parts.step) is not None:
            sent_at = self.topology.now()
            try:
                reply = self._call_one(part, until)
            except StepFailed as failed:
                failed.sent, failed.part = failed.sent or begun, part
                raise
            self.topology.note_part(part, reply, sent_at)
            parts.answer(reply)
            begun = True
        return parts.reply

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        topology, until = self.topology, monotonic() + timeout
        outcomes: list[Any] = [None] * len(ops)
        if ops and not topology.is_current():
            try:
                self._refresh(until)
            except StepFailed as failed:
                return [failed] * len(ops)
        parts = {place: part for place, op in enumerate(ops) if (part := in_parts(op, topology.channel_in)) is not None}
        left = [place for place in range(len(ops)) if place not in parts]
        for _ in range(MOST_REDIRECTIONS):
            left = self._call_once(ops, left, outcomes, until)
        for place in left:
            outcomes[place] = redirected(self.address)
        for place, part in parts.items():
            try:
                outcomes[place] = self._call_parts(part, until)
            except StepFailed as failed:
                outcomes[place] = failed
        return outcomes

    def _call_once(self, ops: Sequence[Op], places: list[int], outcomes: list[Any], until: float) -> list[int]:
        """Send these steps, each to its node, and set their outcomes. Returns the places of those to send again."""
        by_node: dict[Node, list[int]] = {}
        for place in places:
            node = self.topology.owners[slot_of(key_of(ops[place]))]
            if node is None:
                outcomes[place] = self._no_owner()
            else:
                by_node.setdefault(node, []).append(place)
        timeout = max(_SHORTEST, until - monotonic())
        sent = {node: node.shared.submit([ops[place] for place in some], timeout) for node, some in by_node.items()}
        again: list[int] = []
        for node, some in by_node.items():
            for place, reply in zip(some, node.shared.collect(sent[node], timeout), strict=True):
                outcomes[place] = reply
                if not isinstance(reply, StepFailed) or (redirection := self._redirection(node, reply)) is None:
                    continue
                if redirection.asking:
                    try:
                        outcomes[place] = self._follow(ops[place], node, reply, until)
                    except StepFailed as failed:
                        outcomes[place] = failed
                else:
                    self.topology.follow(redirection)
                    again.append(place)
        return again

    def primaries(self, timeout: float) -> list[Node]:
        """The nodes that have slots."""
        if self.topology.stale:
            self._refresh(monotonic() + timeout)
        return primaries(self.topology.owners)

    def scan(self, wanted: Scan) -> Part:
        """A part of the keys of one primary."""
        nodes = self.primaries(wanted.timeout)
        place = place_in(wanted.cursor, nodes)
        if place is None:
            return "", []
        node, own = place
        try:
            after, keys = node.engine.scan(wanted._replace(cursor=own))
        except StepFailed as failed:
            self._redirection(node, failed)
            raise
        return cursor_after(after, node, nodes), keys

    def _no_owner(self) -> StepFailed:
        if self._closed:
            return client_closed(self.address)
        self.topology.stale = True
        return lost_track(self.address, "no node serves the slot of this key")

    def _refresh(self, until: float) -> None:
        """Read the slot map from any node. StepFailed if there has never been one."""
        topology = self.topology
        if self._closed:
            raise client_closed(self.address)
        if not topology.is_due():
            return
        causes: list[StepFailed] = []
        for node in topology.candidates():
            left = until - monotonic()
            if left <= 0:
                break
            try:
                reply = node.engine.call(GET_SLOTS, min(LONGEST_ASK, left))
                topology.install(read_slots(reply, node.address[0]))
                return
            except StepFailed as failed:
                node.failed_at = monotonic()
                causes.append(failed)
            except ValueError:
                causes.append(lost_track(node.engine.address, "it sent no slot map"))
        if not topology.known:
            raise no_map(self.address, causes)

    # Dedicated connections: each belongs to one caller, for commands that need the same connection (WATCH).

    def open_connection(self, timeout: float) -> Dedicated:
        return Dedicated()

    def call_on(self, dedicated: Dedicated, commands: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each command, or its StepFailed. Raises StepFailed if the connection is lost.

        If the key has moved to another node, a connection on which nothing has run is opened again on that node. Any
        other connection counts as lost, because its WATCH state stays on the old node.
        """
        until = monotonic() + timeout
        for _ in range(MOST_REDIRECTIONS):
            fresh = dedicated.connection is None
            if dedicated.connection is None:
                self._open_for(dedicated, first_key_of(commands), until)
            node, connection = dedicated.node, dedicated.connection
            assert node is not None
            assert connection is not None
            try:
                replies = node.engine.call_on(connection, commands, max(_SHORTEST, until - monotonic()))
            except StepFailed as failed:
                self._redirection(node, failed)
                raise
            redirections = [self._redirection(node, reply) for reply in replies if isinstance(reply, StepFailed)]
            redirection = next((found for found in redirections if found is not None), None)
            if redirection is None:
                return replies
            self.close_connection(dedicated)
            self.topology.follow(redirection)
            if not fresh:
                raise moved_away(node.engine.address)
        raise redirected(self.address)

    def _open_for(self, dedicated: Dedicated, key: str, until: float) -> None:
        if not self.topology.is_current():
            self._refresh(until)
        node = self.topology.owners[slot_of(key)]
        if node is None:
            raise self._no_owner()
        try:
            dedicated.node, dedicated.connection = (
                node,
                node.engine.open_connection(max(_SHORTEST, until - monotonic())),
            )
        except StepFailed:
            self.topology.note_failure(node)
            raise

    def close_connection(self, dedicated: Dedicated) -> None:
        connection, dedicated.connection = dedicated.connection, None
        if dedicated.node is not None and connection is not None:
            dedicated.node.engine.close_connection(connection)

    def close(self) -> None:
        self._closed = True
        for node in list(self.topology.nodes.values()):
            node.engine.close()

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets, and start with empty pools."""
        for node in self.topology.nodes.values():
            node.forget()
        self.topology.forget()


class ClusterConnections(ClusterEngine):
    """Runs steps over the shared connections of the nodes, and subscribes to their notifications."""

    def _on(self, node: Node) -> Engine | SharedConnection:
        return node.shared

    def start(self) -> None:
        """Start the threads of the nodes that are in use. Those of others start with their first request."""
        for node in list(self.topology.nodes.values()):
            if node.engine.count_connections()[0]:
                node.shared.start()

    def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        """Subscribe to the channels of these keys; False if a node does not allow that."""
        topology, until = self.topology, monotonic() + timeout
        for _ in range(MOST_REDIRECTIONS):
            if not topology.is_current():
                self._refresh(until)
            nodes = topology.want(keys)
            if not nodes and topology.channel_of(keys):
                return True
            for node in nodes:
                try:
                    if not node.shared.listen(max(_SHORTEST, until - monotonic())):
                        return False
                except StepFailed as failed:
                    if (redirection := self._redirection(node, failed)) is None:
                        raise
                    topology.follow(redirection)
            if monotonic() >= until:
                break
        raise redirected(self.address)

    def close(self) -> None:
        self._closed = True
        for node in list(self.topology.nodes.values()):
            node.shared.close()

    def forget(self) -> None:
        """Do nothing: the ClusterEngine of the client forgets the shared connections too."""


def cluster_engines(
    target: Target, router: NotificationRouter, now: Callable[[], float]
) -> tuple[ClusterEngine, ClusterConnections]:
    topology = Topology[Node](target, router, now, lambda topology, address: Node(topology, address, now))
    return ClusterEngine(topology), ClusterConnections(topology)
