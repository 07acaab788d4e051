"""The server as a whole: its clock, all its keys, and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.arguments import SYNTAX, integer, matcher
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import OK, Reply, ReplyError, Status
from holdfast.lab.servers.values import KINDS, kind_of

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store


@command()
def ping(store: Store, message: bytes | None = None) -> Reply:
    return Status("PONG") if message is None else message


@command()
def echo(store: Store, message: bytes) -> Reply:
    return message


@command()
def time(store: Store) -> Reply:
    """The clock does not move while a script runs, so a script sees one time from its start to its end."""
    seconds, microseconds = divmod(store.now_us, 1_000_000)
    return [b"%d" % seconds, b"%d" % microseconds]


@command()
def dbsize(store: Store) -> Reply:
    return len(store.values)


@command()
def keys(store: Store, pattern: bytes) -> Reply:
    matches = matcher(pattern).fullmatch
    return [key for key in sorted(store.values) if matches(key)]


@command()
def scan(store: Store, cursor: bytes, *options: bytes) -> Reply:
    """All keys in one reply, which a real server may do too."""
    if not cursor.isdigit():
        raise ReplyError("ERR invalid cursor")
    matches, kind = matcher(b"*").fullmatch, ""
    if len(options) % 2:
        raise ReplyError(SYNTAX)
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option.upper() == b"MATCH":
            matches = matcher(value).fullmatch
        elif option.upper() == b"TYPE":
            kind = value.decode(errors="replace").lower()
            if kind not in KINDS:
                raise ReplyError(f"ERR unknown type name '{kind}'")
        elif option.upper() != b"COUNT" or integer(value) < 1:
            raise ReplyError(SYNTAX)
    found = (key for key, value in store.values.items() if not kind or kind_of(value) == kind)
    return [b"0", [key for key in sorted(found) if matches(key)]]


@command(write=True)
def flushall(store: Store) -> Reply:
    for key in list(store.values):
        store.remove(key)
    return OK


@command()
def publish(store: Store, channel: bytes, message: bytes) -> Reply:
    """Put the message into the outbox. The owner of the store delivers it, and sets which channels have subscribers."""
    store.outbox.append((channel, message))
    return int(channel in store.subscribed)


@command()
def pubsub(store: Store, subcommand: bytes, *channels: bytes) -> Reply:
    if subcommand.upper() != b"NUMSUB":
        raise ReplyError(f"ERR unknown subcommand '{subcommand.decode(errors='replace')}'. Try PUBSUB HELP.")
    return [part for channel in channels for part in (channel, int(channel in store.subscribed))]
