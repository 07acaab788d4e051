"""Scans the keys of a server, or of each primary of a cluster, part by part. Both faces share this module.

The cursor of a cluster consists of the address of a node and the cursor of that node. The scan visits the nodes in the
order of their addresses. If a node has left the cluster before its next part, the scan continues with the next address.
So a scan may miss keys if there is a failover meanwhile, just as it may miss keys that are written meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from holdfast.engines.redis.cluster.redirection import Address, lost_track
from holdfast.protocol.effects import StepFailed

Part = tuple[str, list[bytes]]  # the next cursor, "" after the last part; and the keys

_FIRST: Final = "0"
_CURSOR_AND_KEYS: Final = 2


class Node(Protocol):
    address: Address


N = TypeVar("N", bound=Node)


def read_part(reply: Any, address: str) -> Part:
    """The next cursor and the keys in a reply to SCAN. StepFailed if the reply is malformed."""
    if isinstance(reply, list) and len(reply) == _CURSOR_AND_KEYS and isinstance(reply[0], bytes):
        cursor, keys = reply[0].decode(errors="replace"), reply[1]
        if cursor.isdecimal() and isinstance(keys, list):
            return "" if cursor == _FIRST else cursor, [key for key in keys if isinstance(key, bytes)]
    raise _malformed(address)


def _malformed(address: str) -> StepFailed:
    return lost_track(address, "it sent an unexpected reply to 'SCAN'")


def primaries(owners: Sequence[N | None]) -> list[N]:
    """The nodes that have slots, in the order of their addresses."""
    return sorted({id(node): node for node in owners if node is not None}.values(), key=lambda node: node.address)


def place_in(cursor: str, nodes: Sequence[N]) -> tuple[N, str] | None:
    """The node to scan next, and its cursor there; None if all nodes have been scanned."""
    address, _, rest = cursor.rpartition(" ")
    begun = _address(address) if address else ("", 0)
    for node in nodes:
        if node.address >= begun:
            return node, rest if node.address == begun else ""
    return None


def cursor_after(cursor: str, node: N, nodes: Sequence[N]) -> str:
    """The next cursor of the cluster, if ``cursor`` is the next one of this node ("" after its last part)."""
    if cursor:
        return f"{node.address[0]}:{node.address[1]} {cursor}"
    later = [other for other in nodes if other.address > node.address]
    return f"{later[0].address[0]}:{later[0].address[1]} {_FIRST}" if later else ""


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)
