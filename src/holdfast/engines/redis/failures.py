"""What goes wrong between an engine and its server, as a StepFailed that says what happened and what to do."""

from __future__ import annotations

import logging
import re
import socket
import ssl
from typing import Final

import hiredis
import redis.exceptions

from holdfast.engines.redis.protocol import LONGEST_REPLY, Op, ReplyTooLong, SentinelReply
from holdfast.errors import HoldfastError, Unavailable, Unsupported, rounded
from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.replies import fence_error
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.untrusted import printable
from holdfast.url import url_of_fleet

log = logging.getLogger("holdfast")

# Seconds for which a shared connection may owe a reply after its request has timed out. Longer than the shortest
# timeout of a request, because a healthy server can be that slow once.
OVERDUE_AFTER: Final = 0.3
# A timer that fires this many seconds late shows that this process was busy, so the delay is not the server's silence.
LATE: Final = 0.05


def is_full(reply: object) -> bool:
    """Whether the server is at its maxclients, and about to close this connection."""
    return isinstance(reply, hiredis.ReplyError) and _code_of(str(reply)) == "MAXCLIENTS"


# Errors that go away by themselves: code -> (what it means, what to do about it)
_PASSING: Final = {
    "OOM": ("it is out of memory", "Raise its maxmemory, or free some"),
    "READONLY": ("it is a read-only replica", "Connect to the primary"),
    "LOADING": ("it is still loading its data", "Try again in a moment"),
    "MASTERDOWN": ("it is a replica that has lost its primary", "Connect to the primary"),
    "BUSY": ("it is busy with a long script", "Try again in a moment, or SCRIPT KILL it"),
    "TRYAGAIN": ("it is moving this key's slot", "Try again in a moment"),
    "MOVING": ("it is moving this key's slot", "Try again in a moment"),  # noticed in the middle of a script
    "CLUSTERDOWN": ("its cluster is down", "See CLUSTER INFO"),
    "MISCONF": ("it cannot save its data and refuses writes", "See its log"),
    "NOREPLICAS": ("it has too few replicas to accept writes", "See its min-replicas-to-write"),
    "MAXCLIENTS": ("it has no room for another connection", "Raise its maxclients, or use fewer connections"),
}
_NEEDS_SCRIPTS: Final = "Holdfast needs EVAL and EVALSHA: enable them there, or name another server"
_A_NODE: Final = ("it is a node of a cluster", "Use {cluster} in the URL, or connect(RedisCluster(...))")
# Errors that stay until the user or the operator changes something. In braces: the URL to use.
_LASTING: Final = {
    "NOAUTH": ("it wants a password", "Put user and password into the URL: redis://user:password@host"),
    "WRONGPASS": ("it refused the user or the password", "Check the credentials in the URL or the client"),
    "NOPERM": ("this user may not do that", "See docs/guarantees.md for the permissions that Holdfast needs"),
    "NOSCRIPT": ("scripts are disabled there, or not kept", _NEEDS_SCRIPTS),
    "MOVED": _A_NODE,
    "ASK": _A_NODE,
    "CROSSSLOT": _A_NODE,
    "SENTINEL": ("it is a Sentinel, which keeps no locks", "Use {sentinel} in the URL{services}"),
    "SELECT": ("it has no SELECT", "If it is a Sentinel, use {sentinel} in the URL; else leave out the database"),
    "NOPASS": ("it takes no password", "If it is a Sentinel, use {sentinel} in the URL; else leave out the password"),
}
_SERVICE: Final = "SERVICE"
_MOST_SERVICES: Final = 5


_REPLICA: Final = ("READONLY", "MASTERDOWN")


def refusal(reply: Exception, address: str, op: Op | None = None, *, served: bool = True) -> StepFailed:
    """The StepFailed for an error reply, which in most cases means that the step did nothing.

    ``served``: whether this server has accepted a write from us before. If so, a READONLY reply means that a failover
    is under way; if not, it means that this is the wrong server.
    """
    text = str(reply)
    if refused := fence_error(text):
        return _failed(refused, reply, sent=False, retry=False)
    code = "SENTINEL" if isinstance(reply, SentinelReply) else _code_of(text)
    if code == "WRONGTYPE":
        error: HoldfastError = Unsupported(
            "its key holds something that is not a lock of this kind",
            "choose another name, or a namespace (Redisson keeps its locks in hashes, for one)",
        )
        return _failed(error, reply, sent=False, retry=False)
    what, advice = _PASSING.get(code) or _LASTING.get(code) or (f"it answered {_shown(text)}", "See its log")
    advice = _with_urls(advice, address, reply.services if isinstance(reply, SentinelReply) else ())
    if code == "NOPERM":
        what, advice = _explain_noperm(text, op, what, advice)
    # An unknown error may come from the middle of a script, after its first writes. So may MOVING: a node that is
    # moving a slot away refuses a key that does not exist, even if the script itself has just deleted that key.
    known = (code in _PASSING or code in _LASTING) and code != "MOVING"
    ever_answered = served or code not in _REPLICA
    failed = _failed(
        Unavailable({address: what}, advice), reply, sent=not known, retry=code in _PASSING, ever_answered=ever_answered
    )
    failed.answered = True
    return failed


def _with_urls(advice: str, address: str, services: tuple[str, ...]) -> str:
    """The advice, with the URL to use instead. ``services``: those that a Sentinel at this address has named."""
    shown = [f"{printable(service):.60}" for service in services[:_MOST_SERVICES]]
    service = shown[0] if len(services) == 1 else _SERVICE
    named = f"; its services are {', '.join(shown)}" if len(services) > 1 else ""
    urls = {engine: url_of_fleet(engine, address, service) for engine in ("cluster", "sentinel")}
    return advice.format(**urls, services=named)


def _shown(text: str) -> str:
    """An error reply for messages, without the arguments of the command, which may contain a password or a token."""
    return f"{printable(text.partition(', with args')[0]):.100}"


def _code_of(text: str) -> str:
    """The error code: the first word of the text, or one derived from texts that begin with ERR."""
    # These texts come from the server, from an error inside a script, and from redis-py.
    if any(part in text for part in ("NOPERM", "ACL failure", "can't run this command", "has no permissions")):
        return "NOPERM"
    if "unauthenticated" in text:  # the server refuses a long request before AUTH without reading it
        return "NOAUTH"
    if "non local key" in text:
        return "MOVING"
    if "max number of clients" in text:
        return "MAXCLIENTS"
    if "not allowed in cluster mode" in text:  # a database other than 0
        return "MOVED"
    if "without any password configured" in text:
        return "NOPASS"
    if found := re.search(r"unknown command\W+(eval|select)", text, re.IGNORECASE):
        return "SELECT" if found[1].lower() == "select" else "NOSCRIPT"
    return text.split(" ", 1)[0]


_SIDE: Final = re.compile(r":hf\d+:")  # separates the lock's name from the purpose of a side key


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
    ever_answered: bool = True,
    tls: bool = False,
) -> StepFailed:
    """The StepFailed for a request that got no reply in time."""
    what = f"it did not answer within {rounded(timeout)} s"
    advice = "It may be hung or far away; see timeout= of connect"
    if tls:  # during the handshake
        what = f"no TLS handshake came about within {rounded(timeout)} s"
        advice = "If its port is a plain one, use redis:// in the URL, or ssl=False; else it may be hung or far away"
    return _failed(
        Unavailable({address: what}, advice), cause, sent=sent, retry=True, ever_answered=ever_answered, silent=not tls
    )


def lost_connection(
    address: str, cause: BaseException | None, *, ever_answered: bool = True, tls: bool = False
) -> StepFailed:
    """The StepFailed for a request under way on a connection that has ended."""
    if isinstance(cause, hiredis.ReplyError):  # unsolicited, just before the server closed the connection
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
    elif not ever_answered:
        what = "the connection was lost without an answer"
        advice = (
            "Check the port, and whether it wants a client certificate (ssl_certfile= and ssl_keyfile=)"
            if tls
            else "Check the port, and whether it expects TLS (rediss://)"
        )
    return _failed(
        Unavailable({address: what}, advice),
        cause,
        sent=True,
        retry=True,
        connection_broke=True,
        ever_answered=ever_answered,
    )


def client_closed(address: str) -> StepFailed:
    """The StepFailed for a request after close()."""
    error = Unavailable({address: "this client was closed"}, "Connect again, or close it later")
    return _failed(error, None, sent=False, retry=False)


def connect_failure(
    cause: Exception, address: str, timeout: float, *, tls: bool = False, known: bool = True
) -> StepFailed:
    """The StepFailed for a connection that was not made, so nothing was sent. ``known``: that server exists."""
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
        wanted = "NOAUTH" in text or "Authentication required" in text
        what, advice = _LASTING["NOAUTH" if wanted else "NOPASS" if _code_of(text) == "NOPASS" else "WRONGPASS"]
        error = Unavailable({address: what}, _with_urls(advice, address, ()))
        return _failed(error, cause, sent=False, retry=False)
    if isinstance(cause, redis.exceptions.ResponseError) or _code_of(text) == "MAXCLIENTS":
        if "DB index" in text or "invalid DB" in text:
            error = Unavailable({address: "it has no such database"}, "Check the number after the host, such as /0")
            return _failed(error, cause, sent=False, retry=False)
        return refusal(cause, address)
    what, advice = why_no_connection(cause, text)
    if what == _NOBODY_LISTENS and not known:
        advice = "Start a server there, check host and port, or use local:// for an embedded one"
    return _failed(Unavailable({address: what}, advice), cause, sent=False, retry=True)


_NOBODY_LISTENS: Final = "nothing listens there"
_WANTS_CERTIFICATE: Final = (
    "it wants a client certificate",
    "Give ssl_certfile= and ssl_keyfile=, in the URL or the client",
)


def _wants_certificate(error: BaseException | None) -> bool:
    return isinstance(error, ssl.SSLError) and "certificate required" in str(error)


def why_no_connection(cause: Exception, text: str) -> tuple[str, str]:
    """What kept a connection from being made, and what to do about it."""
    roots = [cause, cause.__cause__, cause.__context__]
    if any(isinstance(root, socket.gaierror) for root in roots):
        return "its name cannot be resolved", "Check the host in the URL"
    if any(isinstance(root, ConnectionRefusedError) for root in roots) or "refused" in text:
        return _NOBODY_LISTENS, "Is the server still running?"
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


def log_no_pubsub(address: str, router: NotificationRouter, refused: object) -> None:
    """Warn that waiters poll because a subscription was refused. Call it once per client."""
    if "NOPERM" in str(refused):
        needed = "+subscribe &" if router.shards is None else "+ssubscribe +spublish +pubsub|shardnumsub &*"
        why = f"it does not let this user subscribe. Grant {needed}{router.channel.rpartition(':')[0]}:*"
    elif router.shards is not None:
        why = "it has no sharded channels, which Redis 7 and Valkey have"
    else:
        why = f"it refused to subscribe: {refused}"
    log.warning("waiters of %s poll instead of being woken: %s", address, why)


def log_no_resp3(why: str, *, level: int = logging.WARNING) -> None:
    """Log that client tracking is off, and what that costs."""
    log.log(level, "%s, so RESP3 and client tracking are off: a deleted lock is noticed at its next renewal", why)


def log_resp3_is_back(address: str) -> None:
    log.info("RESP3 and client tracking of %s are back", address)


def _failed(
    error: HoldfastError,
    cause: BaseException | None,
    *,
    sent: bool,
    retry: bool,
    connection_broke: bool = False,
    ever_answered: bool = True,
    silent: bool = False,
) -> StepFailed:
    failed = StepFailed(
        error, sent=sent, retry=retry, connection_broke=connection_broke, ever_answered=ever_answered, silent=silent
    )
    failed.__cause__ = _root_of(cause)
    return failed


_TRANSPORT: Final = (OSError, redis.exceptions.RedisError, hiredis.HiredisError)


def _root_of(cause: BaseException | None) -> BaseException | None:
    """The first error of the chain, without the frames of redis-py and Holdfast.

    Errors of other kinds, such as those of the user's credential provider, are left unchanged.
    """
    while isinstance(cause, _TRANSPORT):
        cause.__traceback__ = None  # avoids a cycle: a frame of redis-py keeps this error in a variable
        deeper = cause.__cause__ or cause.__context__
        if not isinstance(deeper, Exception):
            break
        cause = deeper
    return cause
