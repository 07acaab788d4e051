"""Dedicated connections to a cluster under asyncio: each is opened on the node of the first key that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from holdfast.engines.redis.aio.pipelined_connection import PipelinedConnection
from holdfast.engines.redis.cluster.aio import ClusterEngine, Node
from holdfast.engines.redis.cluster.redirection import first_key_of, lost_track, moved_away, redirected, redirection_of
from holdfast.engines.redis.cluster.topology import MOST_REDIRECTIONS
from holdfast.engines.redis.protocol import Op
from holdfast.names import slot_of
from holdfast.protocol.effects import StepFailed


class Dedicated:
    """A connection for one caller."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.connection: PipelinedConnection | None = None


class ClusterDedicated:
    """The dedicated connections of one client. They belong to the nodes of its cluster."""

    def __init__(self, cluster: ClusterEngine) -> None:
        self._cluster = cluster

    async def open(self, timeout: float) -> Dedicated:
        return Dedicated()

    async def call_on(self, dedicated: Dedicated, commands: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each command, or its StepFailed. Raises StepFailed if the connection is lost.

        If the key has moved to another node, a connection on which nothing has run is opened again on that node. Any
        other connection counts as lost, because its WATCH state stays on the old node.
        """
        cluster, until = self._cluster, monotonic() + timeout
        for _ in range(MOST_REDIRECTIONS):
            fresh = dedicated.connection is None
            if dedicated.connection is None:
                await self._open_for(dedicated, first_key_of(commands), until)
            node, connection = dedicated.node, dedicated.connection
            assert node is not None
            assert connection is not None
            replies = await node.dedicated.call_on(connection, commands, max(0.0, until - monotonic()))
            redirections = [
                redirection_of(reply, node.address[0]) for reply in replies if isinstance(reply, StepFailed)
            ]
            redirection = next((found for found in redirections if found is not None), None)
            if redirection is None:
                return replies
            self.close(dedicated)
            cluster.topology.follow(redirection)
            cluster.refresh_soon()
            if not fresh:
                raise moved_away(node.engine.address)
        raise redirected(cluster.address)

    async def _open_for(self, dedicated: Dedicated, key: str, until: float) -> None:
        cluster = self._cluster
        await cluster.have_map(until)
        node = cluster.topology.owners[slot_of(key)]
        if node is None:
            cluster.refresh_soon()
            raise lost_track(cluster.address, "no node serves the slot of this key")
        try:
            dedicated.node, dedicated.connection = node, await node.dedicated.open(max(0.0, until - monotonic()))
        except StepFailed:
            cluster.note_failure(node)
            raise

    def close(self, dedicated: Dedicated) -> None:
        connection, dedicated.connection = dedicated.connection, None
        if dedicated.node is not None and connection is not None:
            dedicated.node.dedicated.close(connection)

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: the engine of the cluster moves all nodes."""

    def forget(self) -> None:
        """Do nothing: the engine of the cluster does this for all nodes."""

    async def close_all(self) -> None:
        """Do nothing: the engine of the cluster closes all nodes."""
