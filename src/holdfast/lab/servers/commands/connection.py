"""Commands that need a connection; ``Session`` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import OK, Reply, ReplyError

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store

_NO_CONNECTION = "ERR the lab: {} belongs to a connection, so send it through Store.session()"


@command(noscript=True)
def multi(store: Store) -> Reply:
    raise ReplyError(_NO_CONNECTION.format("MULTI"))


@command(noscript=True)
def exec_(store: Store) -> Reply:
    raise ReplyError(_NO_CONNECTION.format("EXEC"))


@command(noscript=True)
def discard(store: Store) -> Reply:
    raise ReplyError(_NO_CONNECTION.format("DISCARD"))


@command(noscript=True)
def watch(store: Store, key: bytes, *keys: bytes) -> Reply:
    raise ReplyError(_NO_CONNECTION.format("WATCH"))


@command(noscript=True)
def unwatch(store: Store) -> Reply:
    """Does nothing: without a connection no key is watched. EXEC runs it this way, after it has dropped all watches."""
    return OK
