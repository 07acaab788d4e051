"""The engines for asyncio on a cluster: each node has the pipelined connection of a single server.

``submit`` passes a step to the engine of its node, with the future for the reply. If the node answers with a
redirection, the same future goes to the other node. So the caller waits for one future, whichever node runs the step. A
separate task reads the slot map. Meanwhile steps use the current map; if there is none yet, they wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import hiredis

from holdfast.engines.redis.aio.dedicated_connections import DedicatedConnections
from holdfast.engines.redis.aio.engine import Engine
from holdfast.engines.redis.aio.pipelined_connection import PipelinedConnection, Reply, Request, outcomes_of
from holdfast.engines.redis.aio.standby import StandbyEngine
from holdfast.engines.redis.channels import ShardChannels, subscribed_to
from holdfast.engines.redis.cluster.redirection import (
    ASKING,
    GET_SLOTS,
    Address,
    Redirection,
    in_parts,
    is_outdated,
    key_of,
    lost_track,
    no_map,
    read_slots,
    redirected,
    redirection_of,
    with_source,
)
from holdfast.engines.redis.cluster.topology import LONGEST_ASK, MOST_REDIRECTIONS, Topology
from holdfast.engines.redis.failures import client_closed, silence
from holdfast.engines.redis.protocol import Op
from holdfast.engines.redis.scanning import Part, cursor_after, place_in, primaries
from holdfast.engines.redis.target import Target
from holdfast.names import slot_of
from holdfast.protocol.effects import Scan, StepFailed
from holdfast.protocol.wait.notifications import NotificationRouter


class _OfNode(Engine):
    """An engine of one node. It reports redirections, and failures of the node, to the engine of the cluster."""

    cluster: ClusterEngine
    node: Node

    def refuse(self, connection: PipelinedConnection, request: Request, answer: hiredis.ReplyError) -> None:
        op = request[0]
        # Another node cannot take over a request of a dedicated connection, or a subscription.
        if connection is self.shared and subscribed_to(op) is None:
            redirection = redirection_of(answer, self.node.address[0])
            if redirection is not None:
                self.cluster.redirect(redirection, request)
                return
        super().refuse(connection, request, answer)
        error = request[1].exception() if request[1].done() else None  # else it asks whether this is a Sentinel
        if isinstance(error, StepFailed) and is_outdated(error):
            self.cluster.note_failure(self.node)

    def note_loss(self, connection: PipelinedConnection) -> None:
        if not self.closed:
            self.cluster.note_failure(self.node)
        super().note_loss(connection)

    def _refuse(self, requests: list[Request], error: Exception) -> None:
        self.cluster.note_failure(self.node)
        super()._refuse(requests, error)

    def _silence(self, timeout: float, *, sent: bool) -> StepFailed:
        self.cluster.note_failure(self.node)
        return super()._silence(timeout, sent=sent)


class _NodeEngine(_OfNode):
    def __init__(self, node: Node, cluster: ClusterEngine, target: Target) -> None:
        self.node, self.cluster = node, cluster
        super().__init__(target, cluster.timeout, cluster.router, cluster.now, node.channels)


class _NodeStandby(_OfNode, StandbyEngine):
    def __init__(self, node: Node, cluster: ClusterEngine, main: Engine) -> None:
        self.node, self.cluster = node, cluster
        StandbyEngine.__init__(self, main)


class Node:
    """One node: its engines, and the channels that are subscribed to there."""

    def __init__(self, cluster: ClusterEngine, topology: Topology[Node], address: Address) -> None:
        self.address = address
        self.failed_at = 0.0
        self.absent_since: float | None = None
        self._cluster = cluster
        self.channels = ShardChannels(topology.slots_waited_for, cluster.note_moved)
        self.engine = _NodeEngine(self, cluster, topology.target.node(*address))
        self.standby = _NodeStandby(self, cluster, self.engine)
        self.dedicated = DedicatedConnections(self.engine)
        if cluster.loop is not None:
            self.move_to(cluster.loop)

    def resubscribe(self) -> None:
        if self._cluster.loop is not None:
            self.engine.subscription.resubscribe(self._cluster.loop)

    def trust(self) -> None:
        for engine in (self.engine, self.standby):
            engine.ever_answered = engine.served = True

    def retire(self) -> None:
        self._cluster.keep_task(self.close())

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine.move_to(loop)
        self.standby.move_to(loop)
        self.dedicated.move_to(loop)

    def forget(self) -> None:
        self.engine.forget()
        self.standby.forget()
        self.dedicated.forget()

    async def close(self) -> None:
        await self.engine.close()
        await self.standby.close()
        await self.dedicated.close_all()


class ClusterEngine:
    """Runs steps on the nodes of a cluster for the tasks of one event loop, and subscribes to its notifications."""

    def __init__(self, target: Target, timeout: float, router: NotificationRouter, now: Callable[[], float]) -> None:
        self.address = target.address
        self.timeout = timeout
        self.router = router
        self.now = now
        self.closed = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._refreshing: asyncio.Task[StepFailed | None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._redirected: dict[Reply, int] = {}  # how often each request was redirected
        self.topology: Topology[Node] = Topology(target, router, now, partial(Node, self))

    def submit(
        self, op: Op, timeout: float, reply: Reply | None = None, *, first: bool = False, standby: bool = False
    ) -> Reply:
        """A future for the reply to one step. It fails with StepFailed; cancelling it does not affect other steps.

        ``standby``: use the keeper's own connection if the node does not answer on the shared one.
        """
        topology = self.topology
        if topology.known and in_parts(op, topology.channel_in) is None:
            node = topology.owners[slot_of(key_of(op))]
            if node is not None:
                return (node.standby if standby else node.engine).submit(op, timeout, reply, first=first)
        assert self.loop is not None
        if reply is None:
            reply = self.loop.create_future()
        if self.closed:
            reply.set_exception(client_closed(self.address))
            return reply
        task = self.keep_task(self._run(op, reply, timeout, standby))
        reply.add_done_callback(lambda _: task.cancel())  # ends the task if the caller has left
        return reply

    async def _run(self, op: Op, reply: Reply, timeout: float, standby: bool) -> None:
        """Run a step that has to wait for the slot map, or is sent in parts."""
        try:
            result = await (self._run_now if self.topology.known else self._run_first)(op, timeout, standby)
        except StepFailed as failed:
            if not reply.done():
                reply.set_exception(failed)
        else:
            if not reply.done():
                reply.set_result(result)

    async def _run_first(self, op: Op, timeout: float, standby: bool) -> Any:
        """The reply to the first step of a client, which uses an assumed map or reads the map. Reading has an extra
        timeout, because a short timeout is meant for one round trip."""
        topology = self.topology
        if not topology.stale:
            try:
                result = await self._run_now(op, timeout, standby)
                topology.confirm()
                return result
            except StepFailed as failed:
                self.refresh_soon()
                if failed.sent:
                    raise
        await self.have_map(monotonic() + timeout)
        return await self._run_now(op, timeout, standby)

    async def _run_now(self, op: Op, timeout: float, standby: bool) -> Any:
        until = monotonic() + timeout
        parts = in_parts(op, self.topology.channel_in)
        if parts is None:
            return await self._run_one(op, until, standby)
        begun = False
        while (part := parts.step) is not None:
            sent_at = self.now()
            try:
                reply = await self._run_one(part, until, standby)
            except StepFailed as failed:
                failed.sent = failed.sent or begun  # if an earlier part has run, the outcome is unknown
                failed.part = part
                raise
            self.topology.note_part(part, reply, sent_at)
            parts.answer(reply)
            begun = True
        return parts.reply

    async def _run_one(self, op: Op, until: float, standby: bool) -> Any:
        node = self.topology.owners[slot_of(key_of(op))]
        if node is None:
            self.refresh_soon()
            raise lost_track(self.address, "no node serves the slot of this key")
        return await (node.standby if standby else node.engine).submit(op, max(0.0, until - monotonic()))

    def redirect(self, redirection: Redirection, request: Request) -> None:
        """Send a request to the node that a redirection names."""
        op, reply, deadline, *_ = request
        times = self._redirected.get(reply, 0)
        if op is None or times >= MOST_REDIRECTIONS:  # None: it was sent with its source, after NOSCRIPT
            reply.set_exception(redirected(self.address))
            return
        if not times:
            reply.add_done_callback(lambda reply: self._redirected.pop(reply, None))
        self._redirected[reply] = times + 1
        node = self.topology.follow(redirection)
        self.refresh_soon()
        left = max(0.0, deadline - monotonic())
        if redirection.asking:
            node.engine.submit(ASKING, left).add_done_callback(_ignore)
            node.engine.submit(with_source(op), left, reply)  # directly after ASKING, on the same connection
        else:
            node.engine.submit(op, left, reply, first=True)

    async def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        return await outcomes_of([self.submit(op, timeout) for op in ops])

    async def scan(self, wanted: Scan) -> Part:
        """A part of the keys of one primary."""
        await self.have_map(monotonic() + wanted.timeout)
        nodes = primaries(self.topology.owners)
        place = place_in(wanted.cursor, nodes)
        if place is None:
            return "", []
        node, own = place
        after, keys = await node.engine.scan(wanted._replace(cursor=own))
        return cursor_after(after, node, nodes), keys

    def expire(self, reply: Reply, timeout: float) -> None:
        """Fail a request now: its caller has waited for ``timeout`` and leaves."""
        if not reply.done():
            unsent = any(
                request[1] is reply for node in self.topology.nodes.values() for request in node.engine.backlog
            )
            reply.set_exception(silence(self.address, timeout, None, sent=not unsent))

    # The slot map.

    def note_failure(self, node: Node) -> None:
        self.topology.note_failure(node)
        self.refresh_soon()

    def note_moved(self) -> None:
        self.topology.note_moved()
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """Read the slot map in the background, unless a task does so already."""
        self.topology.stale = True
        if self._refreshing is None and self.loop is not None and not self.closed and not self.loop.is_closed():
            self._refreshing = self.loop.create_task(self._refresh())

    async def _refresh(self) -> StepFailed | None:
        """Read the slot map from any node. Returns None, or why no node could be asked."""
        topology = self.topology
        try:
            if topology.known:
                await asyncio.sleep(max(0.0, topology.refresh_at - monotonic()))
            topology.is_due()
            causes: list[StepFailed] = []
            for node in topology.candidates():
                try:
                    reply = await node.engine.submit(GET_SLOTS, min(LONGEST_ASK, self.timeout), first=True)
                    topology.install(read_slots(reply, node.address[0]))
                    return None
                except StepFailed as failed:
                    node.failed_at = monotonic()
                    causes.append(failed)
                except ValueError:
                    causes.append(lost_track(node.engine.address, "it sent no slot map"))
            return no_map(self.address, causes)
        finally:
            self._refreshing = None

    async def have_map(self, until: float) -> None:
        """Wait until there is a slot map. StepFailed if no node can be asked for it."""
        if self.topology.known:
            return
        self.refresh_soon()
        task = self._refreshing
        assert task is not None
        await asyncio.wait([task], timeout=max(0.0, until - monotonic()))
        if self.topology.known:
            return
        if not task.done():
            raise silence(self.address, self.timeout, None, sent=False, ever_answered=False)
        failed = client_closed(self.address) if task.cancelled() else task.result()
        raise failed or lost_track(self.address, "it has no slots")

    async def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        """Subscribe to the channels of these keys; False if a node does not allow that."""
        topology, until = self.topology, monotonic() + timeout
        if self.closed:
            raise client_closed(self.address)
        for _ in range(MOST_REDIRECTIONS):
            await self.have_map(until)
            nodes = topology.want(keys)
            if not nodes and topology.channel_of(keys):
                return True
            for node in nodes:
                try:
                    if not await node.engine.listen(max(0.0, until - monotonic())):
                        return False
                except StepFailed as failed:
                    if (redirection := redirection_of(failed, node.address[0])) is None:
                        raise
                    topology.follow(redirection)
                    self.refresh_soon()
            if monotonic() >= until:
                break
        raise redirected(self.address)

    # Loops, forks, and the end.

    def keep_task(self, work: Any) -> asyncio.Task[Any]:
        assert self.loop is not None
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in this loop from now on."""
        self._begin_anew(loop)
        for node in self.topology.nodes.values():
            node.move_to(loop)

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets, and begin again without a loop."""
        self._begin_anew(None)
        for node in self.topology.nodes.values():
            node.forget()

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop, self._refreshing = loop, None
        self._tasks.clear()
        self._redirected.clear()
        self.topology.forget()

    async def close(self) -> None:
        self.closed = True
        tasks = [task for task in (self._refreshing, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for node in list(self.topology.nodes.values()):
            await node.close()


def _ignore(reply: Reply) -> None:
    if not reply.cancelled():
        reply.exception()  # marks it as retrieved, so that asyncio does not log it
