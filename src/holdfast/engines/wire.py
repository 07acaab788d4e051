"""From steps to bytes, and from what goes wrong to errors of ours: shared by the blocking and the asyncio engine.

Scripts travel by their SHA-1. A server that does not know one (it was restarted, or flushed) says NOSCRIPT, which
means that nothing was done, so the engine sends the same step again with the source in it, once.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import hiredis
import redis.exceptions

from holdfast.errors import HoldfastError, Unavailable, Unsupported, printable, rounded
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.entries import LARGEST
from holdfast.protocol.replies import fence_error

__all__ = [
    "LATE",
    "LONGEST_REPLY",
    "MORE",
    "OVERDUE_AFTER",
    "Op",
    "Parser",
    "ReplyTooLong",
    "client_closed",
    "complain_of_mute",
    "complain_of_no_resp3",
    "connect_failure",
    "is_elsewhere",
    "is_full",
    "is_noscript",
    "leaves_nothing",
    "lost_connection",
    "may_write",
    "note_resp3_is_back",
    "pack",
    "refusal",
    "silence",
]

log = logging.getLogger("holdfast")

Op = Step | Command

_HIREDIS: Final = (3, 4, 2)  # older ones crash on a huge array inside a map
if tuple(map(int, re.findall(r"\d+", hiredis.__version__)[:3])) < _HIREDIS:
    raise ImportError(
        f"Holdfast needs hiredis {'.'.join(map(str, _HIREDIS))} or newer, but {hiredis.__version__} is installed. "
        "Run: pip install -U hiredis"
    )
_pack: Final[Callable[[tuple[Any, ...]], bytes]] = hiredis.pack_command

LONGEST_REPLY: Final = LARGEST + 2**20  # bytes: a cached value, and what comes with it
MORE: Final = object()  # what a Parser returns when it needs more bytes; False is a reply in RESP3
# Seconds for which a shared connection may owe a reply beyond its time. A server may well be slower, for once, than the
# shortest timeout of a request.
OVERDUE_AFTER: Final = 0.3
# Seconds after which a timer that goes off shows that this process was busy. What it could not do meanwhile does not
# count as the silence of the server.
LATE: Final = 0.05
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
    if script == "present":  # its keys are those of many locks, which would drive others out of the cache below
        return _pack((b"EVALSHA", SCRIPTS[script].sha, str(len(keys)), *keys, *args))
    own = _pack(keys[_SHARED:] + args)
    return _opening(script, keys[:_SHARED], len(keys), len(args)) + own[own.index(b"\n") + 1 :]


@lru_cache(maxsize=4096)
def _opening(script: str, shared: tuple[str, ...], keys: int, args: int) -> bytes:
    """The bytes of a request as far as they are the same for every step of that kind on a lock: more than half."""
    words = _pack((b"EVALSHA", SCRIPTS[script].sha, str(keys), *shared))
    return b"*%d" % (3 + keys + args) + words[words.index(b"\r") :]


class ReplyTooLong(hiredis.ProtocolError):
    """The server sent a reply that is longer than LONGEST_REPLY, or announced one that does not fit into memory."""


class Parser(hiredis.Reader):
    """Turns the bytes of one connection into replies.

    A server, or something in its place, can announce a reply of any length and never end it. So the bytes since the
    last complete reply are counted, and a reply that grows too long ends the connection.
    """

    __slots__ = ("_unfinished",)

    def __init__(self) -> None:
        super().__init__(notEnoughData=MORE)
        self._unfinished = 0

    def next(self, chunk: bytes = b"") -> Any:
        """Add these bytes; the next complete reply, or MORE. ProtocolError if they are no reply of Redis."""
        try:
            if chunk:
                self.feed(chunk)
            reply = self.gets()
        except TypeError as error:  # a map with a key that Python cannot hash
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
    """Whether the server says that it is not the one to ask (any more): a new connection may lead to another."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("READONLY", "MASTERDOWN", "LOADING"))


_READ_ONLY: Final = frozenset(("cache_look", "election_leader", "latch_look", "room_find", "room_look"))


def may_write(op: Op) -> bool:
    """Whether an answer to it shows that the server takes writes: scripts that also a replica can answer do not."""
    return type(op) is Step and op.script not in _READ_ONLY


def is_noscript(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def is_full(reply: object) -> bool:
    """Whether the server has no room for this connection, and closes it."""
    return isinstance(reply, hiredis.ReplyError) and _code_of(str(reply)) == "MAXCLIENTS"


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
    "MAXCLIENTS": ("it has no room for another connection", "Raise its maxclients, or use fewer connections"),
}
_NEEDS_SCRIPTS: Final = "Holdfast needs EVAL and EVALSHA: enable them there, or name another server"
_LASTING: Final = {
    "NOAUTH": ("it wants a password", "Put user and password into the URL: redis://user:password@host"),
    "WRONGPASS": ("it refused the user or the password", "Check the credentials in the URL or the client"),
    "NOPERM": ("this user may not do that", "See docs/guarantees.md for the permissions that Holdfast needs"),
    "NOSCRIPT": ("scripts are disabled there, or not kept", _NEEDS_SCRIPTS),
    "MOVED": ("it is a node of a cluster", "This version of Holdfast speaks to single servers; name one"),
    "CROSSSLOT": ("it is a node of a cluster", "This version of Holdfast speaks to single servers; name one"),
}


_REPLICA: Final = ("READONLY", "MASTERDOWN")


def refusal(reply: Exception, address: str, op: Op | None = None, *, served: bool = True) -> StepFailed:
    """The server answered with an error: the step did nothing.

    ``served``: whether this server has ever taken a write from us. If a replica has not, it is the wrong server; if it
    has, it was the primary and a failover is under way.
    """
    text = str(reply)
    if refused := fence_error(text):
        return _failed(refused, reply, sent=False, retry=False)
    code = _code_of(text)
    if code == "WRONGTYPE":
        error: HoldfastError = Unsupported(
            "its key holds something that is not a lock of this kind",
            "choose another name, or a namespace (Redisson keeps its locks in hashes, for one)",
        )
        return _failed(error, reply, sent=False, retry=False)
    what, advice = _PASSING.get(code) or _LASTING.get(code) or (f"it answered {printable(code):.60}", "See the cause")
    if code == "NOPERM":
        what, advice = _explain_noperm(text, op, what, advice)
    # An answer that we do not know may come from the middle of a script, so what was written before it counts.
    known = code in _PASSING or code in _LASTING
    met = served or code not in _REPLICA
    return _failed(Unavailable({address: what}, advice), reply, sent=not known, retry=code in _PASSING, met=met)


def _code_of(text: str) -> str:
    """What kind of error it is: the first word, unless the server says no more than ERR."""
    # As the server says it, also from inside a script, and as redis-py puts it.
    if any(word in text for word in ("NOPERM", "ACL failure", "can't run this command", "has no permissions")):
        return "NOPERM"
    if "unauthenticated" in text:  # a request of more than ten words is not even read before there was a password
        return "NOAUTH"
    if "max number of clients" in text:
        return "MAXCLIENTS"
    if re.search(r"unknown command\W+eval", text, re.IGNORECASE):
        return "NOSCRIPT"
    return text.split(" ", 1)[0]


_SIDE: Final = re.compile(r":hf\d+:")  # between a lock's name and what a side key is for


def _explain_noperm(text: str, op: Op | None, what: str, advice: str) -> tuple[str, str]:
    if command := re.search(r"run the '([\w|-]+)'", text):
        return f"this user may not use {command[1].upper()}", advice
    if op is not None and re.search(r"access (a|one of the) key", text):
        key = _SIDE.split(str(op.keys[0] if isinstance(op, Step) else op.args[1]))[0]
        return (
            f"this user may not use the key {key!r}",
            f"Grant it the keys ~{key} and ~{key}:hf1:*, or choose a name or namespace that its ACL allows",
        )
    return what, advice


def silence(
    address: str,
    timeout: float,
    cause: BaseException | None,
    *,
    sent: bool,
    met: bool = True,
    tls: bool = False,
) -> StepFailed:
    what = f"it did not answer within {rounded(timeout)} s"
    advice = "It may be hung or far away; see timeout= of connect"
    if tls:  # while it was being connected to
        what = f"no TLS handshake came about within {rounded(timeout)} s"
        advice = "If its port is a plain one, use redis:// in the URL, or ssl=False; else it may be hung or far away"
    return _failed(Unavailable({address: what}, advice), cause, sent=sent, retry=True, met=met, silent=not tls)


def lost_connection(address: str, cause: BaseException | None, *, met: bool = True, tls: bool = False) -> StepFailed:
    if isinstance(cause, hiredis.ReplyError):  # the last that it said, unasked
        return refusal(cause, address)
    if _wants_certificate(cause):
        return _failed(
            Unavailable({address: _WANTS_CERTIFICATE[0]}, _WANTS_CERTIFICATE[1]), cause, sent=True, retry=False
        )
    what, advice = "the connection was lost", "Is the server still running?"
    if isinstance(cause, ReplyTooLong):
        what = f"it sent a reply of more than {LONGEST_REPLY // 2**20} MiB"
        advice = "Cache smaller values, and check that a Redis server answers at this address"
    elif isinstance(cause, hiredis.ProtocolError):
        what = "it sent something that is no reply of Redis"
        advice = "Check host and port, and whether it expects TLS (rediss://)"
    elif isinstance(cause, TimeoutError):
        what, advice = (
            "it did not answer in time on this connection",
            "It may be hung or far away; see timeout= of connect",
        )
    elif not met:
        what = "the connection was lost without an answer"
        advice = (
            "Check the port, and whether it wants a client certificate (ssl_certfile= and ssl_keyfile=)"
            if tls
            else "Check the port, and whether it expects TLS (rediss://)"
        )
    return _failed(Unavailable({address: what}, advice), cause, sent=True, retry=True, prompt=True, met=met)


def client_closed(address: str) -> StepFailed:
    error = Unavailable({address: "this client was closed"}, "Connect again, or close it later")
    return _failed(error, None, sent=False, retry=False)


def connect_failure(cause: Exception, address: str, timeout: float, *, tls: bool = False) -> StepFailed:
    """No connection came about, so nothing was sent."""
    if isinstance(cause, StepFailed):
        return cause
    if isinstance(cause, HoldfastError):  # the embedded server could not be started, or a certificate is missing
        return _failed(cause, cause.__cause__, sent=False, retry=True)
    text = str(cause)
    if isinstance(cause, (redis.exceptions.TimeoutError, TimeoutError)):
        return silence(address, timeout, cause, sent=False, tls=tls)
    if isinstance(cause, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError) or any(
        code in text for code in ("WRONGPASS", "NOAUTH", "invalid password", "invalid username-password")
    ):
        what, advice = _LASTING["NOAUTH" if "NOAUTH" in text or "Authentication required" in text else "WRONGPASS"]
        return _failed(Unavailable({address: what}, advice), cause, sent=False, retry=False)
    if isinstance(cause, redis.exceptions.ResponseError) or _code_of(text) == "MAXCLIENTS":
        if "DB index" in text or "invalid DB" in text:
            error = Unavailable({address: "it has no such database"}, "Check the number after the host, such as /0")
            return _failed(error, cause, sent=False, retry=False)
        return refusal(cause, address)
    what, advice = _why_no_connection(cause, text)
    return _failed(Unavailable({address: what}, advice), cause, sent=False, retry=True)


_WANTS_CERTIFICATE: Final = (
    "it wants a client certificate",
    "Give ssl_certfile= and ssl_keyfile=, in the URL or the client",
)


def _wants_certificate(error: BaseException | None) -> bool:
    return isinstance(error, ssl.SSLError) and "certificate required" in str(error)


def _why_no_connection(cause: Exception, text: str) -> tuple[str, str]:
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
    if any(map(_wants_certificate, roots)):
        return _WANTS_CERTIFICATE
    if any(isinstance(root, ssl.SSLCertVerificationError) for root in roots):
        return (
            "its TLS certificate is not trusted",
            "Name the certificate of its authority (ssl_ca_certs=), and the host as the certificate does",
        )
    if any(isinstance(root, ssl.SSLError) for root in roots) or "SSL" in text or "certificate" in text.lower():
        return (
            "the TLS handshake failed",
            "If its port is a plain one, use redis:// in the URL; else check the certificates (ssl_ca_certs=)",
        )
    if "Permission denied" in text:
        return "permission to connect was denied", "Check the permissions of the socket"
    if any(isinstance(root, ConnectionResetError) for root in roots):
        return "it closed the connection", "Check the port, and whether it expects TLS (rediss://)"
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


def complain_of_no_resp3(why: str, *, level: int = logging.WARNING) -> None:
    """What a client does without for now, and what that costs."""
    log.log(level, "%s, so RESP3 and client tracking are off: a deleted lock is noticed at its next renewal", why)


def note_resp3_is_back(address: str) -> None:
    log.info("RESP3 and client tracking of %s are back", address)


def _failed(
    error: HoldfastError,
    cause: BaseException | None,
    *,
    sent: bool,
    retry: bool,
    prompt: bool = False,
    met: bool = True,
    silent: bool = False,
) -> StepFailed:
    failed = StepFailed(error, sent=sent, retry=retry, prompt=prompt, met=met, silent=silent)
    failed.__cause__ = _root_of(cause)
    return failed


_TRANSPORT: Final = (OSError, redis.exceptions.RedisError, hiredis.HiredisError)


def _root_of(cause: BaseException | None) -> BaseException | None:
    """What went wrong first, without the frames of redis-py and of ours that it went through.

    Others are left as they are, such as what a credential provider of the user's has raised.
    """
    while isinstance(cause, _TRANSPORT):
        cause.__traceback__ = None  # also because redis-py keeps it in a variable of such a frame
        deeper = cause.__cause__ or cause.__context__
        if not isinstance(deeper, Exception):
            break
        cause = deeper
    return cause
