"""From steps to bytes, and from what goes wrong to errors of ours: shared by the blocking and the asyncio engine.

Scripts travel by their SHA-1. A server that does not know one (it was restarted, or flushed) says NOSCRIPT, which
means that nothing was done, so the engine sends the same step again with the source in it.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from traceback import clear_frames
from typing import Any, Final

import hiredis
import redis.exceptions

from holdfast.errors import HoldfastError, Unavailable, Unsupported, rounded
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step, StepFailed

__all__ = [
    "Op",
    "client_closed",
    "complain_of_mute",
    "connect_failure",
    "is_elsewhere",
    "is_noscript",
    "leaves_nothing",
    "lost_connection",
    "pack",
    "refusal",
    "silence",
]

log = logging.getLogger("holdfast")

Op = Step | Command

_pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command
_SHARED: Final = 4  # keys of a lock that its steps name first; any others are of one token


def pack(op: Op, *, with_source: bool = False) -> bytes:
    """The bytes of one request.

    Numbers are text before they come to hiredis, which is brought down by a Ctrl-C that arrives while it does that.
    """
    if isinstance(op, Command):
        return _pack(tuple(map(str, op.args)))
    script, keys, args, _ = op
    if with_source:
        return _pack((b"EVAL", SCRIPTS[script].source, str(len(keys)), *keys, *args))
    own = _pack(keys[_SHARED:] + args)
    return _opening(script, keys[:_SHARED], len(keys), len(args)) + own[own.index(b"\n") + 1 :]


@lru_cache(maxsize=4096)
def _opening(script: str, shared: tuple[str, ...], keys: int, args: int) -> bytes:
    """The bytes of a request as far as they are the same for every step of that kind on a lock: more than half."""
    words = _pack((b"EVALSHA", SCRIPTS[script].sha, str(keys), *shared))
    return b"*%d" % (3 + keys + args) + words[words.index(b"\r") :]


def is_elsewhere(reply: object) -> bool:
    """Whether the server says that it is not the one to ask (any more): a new connection may lead to another."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("READONLY", "MASTERDOWN", "LOADING"))


def is_noscript(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def leaves_nothing(commands: Sequence[Command]) -> bool:
    """Whether the server remembers nothing of the connection after these commands, so that others may use it."""
    return commands[-1].args[0] in ("EXEC", "UNWATCH", "DISCARD")


# What a server can refuse for a while: code -> (what it means, what to do about it)
_PASSING: Final = {
    "OOM": ("it is out of memory", "Raise its maxmemory, or free some"),
    "READONLY": ("it is a read-only replica", "Connect to the primary"),
    "LOADING": ("it is still loading its data", "Try again in a moment"),
    "MASTERDOWN": ("it is a replica that has lost its primary", "Connect to the primary"),
    "BUSY": ("it is busy with a long script of somebody's", "Try again in a moment, or SCRIPT KILL it"),
    "TRYAGAIN": ("it is moving this key's slot", "Try again in a moment"),
    "CLUSTERDOWN": ("its cluster is down", "See CLUSTER INFO"),
    "MISCONF": ("it cannot save its data and refuses writes", "See its log"),
    "NOREPLICAS": ("it has too few replicas to accept writes", "See its min-replicas-to-write"),
}
_LASTING: Final = {
    "NOAUTH": ("it wants a password", "Put user and password into the URL: redis://user:password@host"),
    "WRONGPASS": ("it refused the user or the password", "Check the credentials in the URL or the client"),
    "NOPERM": ("this user may not do that", "See docs/guarantees.md for the permissions that Holdfast needs"),
    "MOVED": ("it is a node of a cluster", "This version of Holdfast speaks to single servers; name one"),
    "CROSSSLOT": ("it is a node of a cluster", "This version of Holdfast speaks to single servers; name one"),
}


def refusal(reply: Exception, address: str) -> StepFailed:
    """The server answered with an error: the step did nothing."""
    text = str(reply)
    code = text.split(" ", 1)[0]
    if code == "WRONGTYPE":
        error: HoldfastError = Unsupported(
            "its key holds something that is not a lock of this kind",
            "choose another name, or a namespace (Redisson keeps its locks in hashes, for one)",
        )
        return _failed(error, reply, sent=False, retry=False)
    # As the server says it, also from inside a script, and as redis-py puts it.
    if any(word in text for word in ("NOPERM", "ACL failure", "can't run this command", "has no permissions")):
        code = "NOPERM"
    if "unauthenticated" in text:  # a request of more than ten words is not even read before there was a password
        code = "NOAUTH"
    what, advice = _PASSING.get(code) or _LASTING.get(code) or (f"it answered {code}", "See the cause")
    if code == "NOPERM" and (command := re.search(r"run the '([\w|-]+)'", text)):
        what = f"this user may not use {command[1].upper()}"
    # An answer that we do not know may come from the middle of a script, so what was written before it counts.
    known = code in _PASSING or code in _LASTING
    return _failed(Unavailable({address: what}, advice), reply, sent=not known, retry=code in _PASSING)


def silence(address: str, timeout: float, cause: BaseException | None, *, sent: bool, met: bool = True) -> StepFailed:
    error = Unavailable(
        {address: f"it did not answer within {rounded(timeout)} s"},
        "It may be hung or far away; see timeout= of connect",
    )
    return _failed(error, cause, sent=sent, retry=True, met=met)


def lost_connection(address: str, cause: BaseException | None, *, met: bool = True) -> StepFailed:
    error = Unavailable({address: "the connection was lost"}, "Is the server still running?")
    return _failed(error, cause, sent=True, retry=True, prompt=True, met=met)


def client_closed(address: str) -> StepFailed:
    error = Unavailable({address: "this client was closed"}, "Connect again, or close it later")
    return _failed(error, None, sent=False, retry=False)


def connect_failure(cause: BaseException, address: str, timeout: float) -> StepFailed:
    """No connection came about, so nothing was sent."""
    if isinstance(cause, StepFailed):
        return cause
    if isinstance(cause, HoldfastError):  # the embedded server could not be started
        return _failed(cause, cause.__cause__, sent=False, retry=True)
    for root in (cause.__cause__, cause.__context__):
        if root is not None:
            clear_frames(root.__traceback__)  # redis-py keeps it in a variable of a frame that it went through
    text = str(cause)
    if isinstance(cause, (redis.exceptions.TimeoutError, TimeoutError)):
        return silence(address, timeout, cause, sent=False)
    if isinstance(cause, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError) or any(
        code in text for code in ("WRONGPASS", "NOAUTH", "invalid password", "invalid username-password")
    ):
        what, advice = _LASTING["NOAUTH" if "NOAUTH" in text or "Authentication required" in text else "WRONGPASS"]
        return _failed(Unavailable({address: what}, advice), cause, sent=False, retry=False)
    if isinstance(cause, redis.exceptions.ResponseError):
        if "DB index" in text or "invalid DB" in text:
            error = Unavailable({address: "it has no such database"}, "Check the number after the host, such as /0")
            return _failed(error, cause, sent=False, retry=False)
        return refusal(cause, address)
    what, advice = _why_no_connection(cause, text)
    return _failed(Unavailable({address: what}, advice), cause, sent=False, retry=True)


def _why_no_connection(cause: BaseException, text: str) -> tuple[str, str]:
    roots = [cause, cause.__cause__, cause.__context__]
    if any(isinstance(root, socket.gaierror) for root in roots):
        return "its name cannot be resolved", "Check the host in the URL"
    if any(isinstance(root, ConnectionRefusedError) for root in roots) or "refused" in text:
        return (
            "nothing listens there",
            "Start a server there, check host and port, or use local:// for an embedded one",
        )
    if any(isinstance(root, FileNotFoundError) for root in roots) or "No such file" in text:
        return "there is no such socket", "Start a server there, or check the path"
    if any(type(root).__module__ == "ssl" for root in roots) or "SSL" in text or "certificate" in text.lower():
        return (
            "the TLS handshake failed",
            "Check rediss:// against redis://, and the certificates (ssl_ca_certs=)",
        )
    if "Permission denied" in text:
        return "permission to connect was denied", "Check the permissions of the socket"
    return (
        f"no connection came about ({type(cause).__name__})",
        "Check host and port, and that the server runs",
    )


def complain_of_mute(address: str, channel: str) -> None:
    """Once per client: bells cannot be heard, and what to do about it."""
    log.warning(
        "%s does not let this user subscribe, so waiters poll instead of being woken. It takes +subscribe, and the "
        "channels &%s:*",
        address,
        channel.rpartition(":")[0],
    )


def _failed(
    error: HoldfastError,
    cause: BaseException | None,
    *,
    sent: bool,
    retry: bool,
    prompt: bool = False,
    met: bool = True,
) -> StepFailed:
    failed = StepFailed(error, sent=sent, retry=retry, prompt=prompt, met=met)
    failed.__cause__ = cause
    return failed
