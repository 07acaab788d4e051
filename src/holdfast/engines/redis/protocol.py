"""RESP: how steps become bytes and bytes become replies, for both engines.

Scripts are called by their SHA-1. A server that does not know the script (after a restart or SCRIPT FLUSH) answers
NOSCRIPT and has done nothing, so the engine sends the same step again with the source of the script, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import hiredis

from holdfast.lua import SCRIPTS, Script
from holdfast.protocol.cache.entry import LARGEST
from holdfast.protocol.effects import Command, Step

Op = Step | Command

_HIREDIS: Final = (3, 4, 2)  # older versions crash on a huge array inside a map
if tuple(map(int, re.findall(r"\d+", hiredis.__version__)[:3])) < _HIREDIS:
    raise ImportError(
        f"Holdfast needs hiredis {'.'.join(map(str, _HIREDIS))} or newer, but {hiredis.__version__} is installed. "
        "Run: pip install -U hiredis"
    )
_pack: Final[Callable[[tuple[Any, ...]], bytes]] = hiredis.pack_command

LONGEST_REPLY: Final = LARGEST + 2**20  # bytes: the largest cached value, and the fields beside it
MORE: Final = object()  # returned by a Parser that needs more bytes; None and False are replies
_SHARED: Final = 4  # leading keys that are the same for all steps on one lock


def pack(op: Op, scripts: Mapping[str, Script] = SCRIPTS, *, with_source: bool = False) -> bytes:
    """The bytes of one request. ``scripts``: those of the server, see holdfast.lua.

    Numbers are passed to hiredis as text: Ctrl-C while hiredis converts a number crashes the interpreter.
    """
    if isinstance(op, Command):
        return _pack(tuple(map(str, op.args)))
    name, keys, args, _ = op
    script = scripts[name]
    if with_source:
        return _pack((b"EVAL", script.source, str(len(keys)), *keys, *args))
    if name == "present":  # keys of many locks: caching them would evict useful entries
        return _pack((b"EVALSHA", script.sha, str(len(keys)), *keys, *args))
    own = _pack(keys[_SHARED:] + args)
    return _opening(script.sha, keys[:_SHARED], len(keys), len(args)) + own[own.index(b"\n") + 1 :]


@lru_cache(maxsize=4096)
def _opening(sha: bytes, shared: tuple[str, ...], keys: int, args: int) -> bytes:
    """The leading bytes of a request, which all steps of that script on one lock share (benchmarks.shortcuts)."""
    packed = _pack((b"EVALSHA", sha, str(keys), *shared))
    return b"*%d" % (3 + keys + args) + packed[packed.index(b"\r") :]


class ReplyTooLong(hiredis.ProtocolError):
    """A reply is longer than LONGEST_REPLY, or announces a size that does not fit into memory."""


class Parser(hiredis.Reader):
    """Turns the bytes of one connection into replies.

    A faulty server or proxy can send a reply that never ends. So the parser counts the bytes since the last complete
    reply and raises ReplyTooLong if there are too many.
    """

    __slots__ = ("_unfinished",)

    def __init__(self) -> None:
        super().__init__(notEnoughData=MORE)
        self._unfinished = 0

    def next(self, chunk: bytes = b"") -> Any:
        """The next complete reply after adding these bytes, or MORE. ProtocolError if the bytes are not RESP."""
        try:
            if chunk:
                self.feed(chunk)
            reply = self.gets()
        except TypeError as error:  # a map whose key is not hashable in Python
            raise hiredis.ProtocolError(str(error)) from error
        except MemoryError as error:
            raise ReplyTooLong("an array that does not fit into memory") from error
        if reply is not MORE:
            self._unfinished = 0
        else:
            self._unfinished += len(chunk)
            if self._unfinished > LONGEST_REPLY:
                raise ReplyTooLong(f"more than {LONGEST_REPLY} bytes")
        return reply


def is_elsewhere(reply: object) -> bool:
    """Whether this server cannot serve us now (replica, loading), so that a new connection may reach another one."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("READONLY", "MASTERDOWN", "LOADING"))


_READ_ONLY: Final = frozenset(("cache_look", "election_leader", "inspect_lock", "latch_look", "pool_find", "pool_look"))


def may_write(op: Op) -> bool:
    """Whether a reply to this step shows that the server takes writes. A replica also answers read-only scripts."""
    return type(op) is Step and op.script not in _READ_ONLY


def is_redirection(reply: object) -> bool:
    """Whether a node of a cluster says that another node serves this step. It has done nothing."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("MOVED ", "ASK "))


def is_noscript(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def is_unknown(reply: object) -> bool:
    """Whether the server does not know the command."""
    return isinstance(reply, hiredis.ReplyError) and "unknown command" in str(reply)


MASTERS: Final = Command(("SENTINEL", "MASTERS"))  # asked of a server that does not know a command
_NAME: Final = b"name"


class SentinelReply(hiredis.ReplyError):
    """The error reply of a Sentinel, and the services that it watches, if it says so."""

    def __init__(self, text: str, services: tuple[str, ...]) -> None:
        super().__init__(text)
        self.services = services


def of_sentinel(reply: hiredis.ReplyError, masters: object) -> hiredis.ReplyError:
    """The reply, as that of a Sentinel if the reply to MASTERS shows that it comes from one."""
    if isinstance(masters, hiredis.ReplyError):
        return SentinelReply(str(reply), ()) if str(masters).startswith("NOPERM") else reply
    if not isinstance(masters, list):
        return reply
    names = [one.get(_NAME) if isinstance(one, dict) else _after_name(one) for one in masters]
    return SentinelReply(str(reply), tuple(name.decode(errors="replace") for name in names if isinstance(name, bytes)))


def _after_name(fields: object) -> object:
    """The value of ``name`` in a list of fields and values."""
    return dict(zip(fields[::2], fields[1::2], strict=False)).get(_NAME) if isinstance(fields, list) else None


def leaves_nothing(commands: Sequence[Op]) -> bool:
    """Whether these commands end without WATCH or MULTI state, so that another caller may use the connection."""
    return commands[-1].args[0] in ("EXEC", "UNWATCH", "DISCARD", "WAIT")
