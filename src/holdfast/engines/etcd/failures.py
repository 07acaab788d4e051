"""What goes wrong between the engine and etcd, as a StepFailed that says what happened and what to do."""

from __future__ import annotations

import json
import ssl
from typing import Any, Final

import httpx

from holdfast.engines.etcd.transport import ReplyTooLong
from holdfast.engines.redis.protocol import LONGEST_REPLY
from holdfast.errors import HoldfastError, Unavailable, rounded
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.intents.refusals import known_refusal
from holdfast.untrusted import printable

LEASE_UNKNOWN: Final = "requested lease not found"
_LONGEST_MESSAGE: Final = 2**16  # bytes of an error reply
_ENDED: Final = ("disconnected", "closed connection")  # in the text of a protocol error: the server closed too early
_NO_REPLY: Final = "it sent something that is no reply of etcd"
_TOKEN: Final = ("invalid auth token", "revision of auth store is old")


def message_of(answer: bytes | bytearray) -> str:
    """The message of an error reply; "" if it is none of etcd."""
    if len(answer) > _LONGEST_MESSAGE:
        return ""
    try:
        content: Any = json.loads(answer)
        content = content.get("error", content)
        return str(content.get("message", content) if isinstance(content, dict) else content)
    except (ValueError, AttributeError, RecursionError):
        return ""


def is_stale_token(message: str) -> bool:
    """Whether the token from ``authenticate`` has expired, or was made before the users were changed."""
    return any(part in message for part in _TOKEN)


def refusal(status: int, message: str, address: str) -> StepFailed:
    """The StepFailed for an error reply."""
    if (known := known_refusal(message, address)) is not None:
        return known
    text = printable(message.removeprefix("etcdserver: "))[:80]
    if not text:
        error = Unavailable({address: f"it answered with HTTP status {status}"}, _NO_ETCD)
        return _failed(error, None, sent=True, retry=status >= 500, ever_answered=False)
    return _failed(Unavailable({address: f"it answered: {text}"}, "See its log"), None, sent=True, retry=status >= 500)


_NO_ETCD: Final = (
    "Check that etcd 3.4 or newer is there, with its JSON gateway, and that no proxy changes what it answers"
)


def unreadable(address: str, cause: BaseException | None = None) -> StepFailed:
    error = Unavailable({address: _NO_REPLY}, _NO_ETCD)
    return _failed(error, cause, sent=True, retry=True, ever_answered=False)


def silence(
    address: str, timeout: float, cause: BaseException | None, *, sent: bool, ever_answered: bool
) -> StepFailed:
    error = Unavailable(
        {address: f"it did not answer within {rounded(timeout)} s"},
        "It may be hung or far away; see timeout= of connect",
    )
    return _failed(error, cause, sent=sent, retry=True, ever_answered=ever_answered, silent=True)


def client_closed(address: str) -> StepFailed:
    error = Unavailable({address: "this client was closed"}, "Connect again, or close it later")
    return _failed(error, None, sent=False, retry=False)


def is_unsent(error: httpx.HTTPError | httpx.InvalidURL) -> bool:
    """Whether a request cannot have reached a server, so that another one can be asked instead."""
    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol))


def transport_failure(
    error: httpx.HTTPError, address: str, timeout: float, *, ever_answered: bool, tls: bool
) -> StepFailed:
    """The StepFailed for a request without an answer."""
    sent = not is_unsent(error)
    if _wants_certificate(error):  # the handshake was refused, perhaps after we have sent: the request was not read
        return _failed(Unavailable({address: _WANTS[0]}, _WANTS[1]), error, sent=False, retry=False)
    if isinstance(error, httpx.TimeoutException):
        return silence(address, timeout, error, sent=sent, ever_answered=ever_answered)
    if sent:
        what, advice = _why_no_answer(error, ever_answered=ever_answered, tls=tls)
        failed = _failed(
            Unavailable({address: what}, advice), error, sent=True, retry=True, ever_answered=ever_answered
        )
        failed.connection_broke = True
        return failed
    what, advice = _why_no_connection(error, tls=tls)
    refused = Unavailable({address: what}, advice)
    return _failed(refused, error, sent=False, retry=ever_answered, ever_answered=ever_answered)


_CERTIFICATE: Final = "ssl_certfile= and ssl_keyfile="
_WANTS: Final = (
    "it wants a client certificate",
    f"Give {_CERTIFICATE} in the URL, from an authority that it trusts",
)


def _root_of(error: BaseException) -> BaseException:
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return error


def _wants_certificate(error: BaseException) -> bool:
    """Whether the server refused our client certificate, or that there was none. Its alert says one or the other."""
    root = _root_of(error)
    return isinstance(root, ssl.SSLError) and any(alert in str(root).lower() for alert in _ALERTS)


_ALERTS: Final = ("certificate required", "alert bad certificate", "alert unknown ca")


def _why_no_answer(error: httpx.HTTPError, *, ever_answered: bool, tls: bool) -> tuple[str, str]:
    if isinstance(error, ReplyTooLong):
        what = f"it sent a reply of more than {LONGEST_REPLY // 2**20} MiB"
        return what, "Check that an etcd server answers at this address"
    ended = not isinstance(error, httpx.RemoteProtocolError) or any(part in str(error) for part in _ENDED)
    if ended and ever_answered:
        return "the connection was lost", "Is the server still running?"
    what = "the connection was lost without an answer" if ended else _NO_REPLY
    # With TLS, the handshake has succeeded. The server may still refuse us, and its alert may be lost.
    expected = f"wants a client certificate ({_CERTIFICATE})" if tls else "expects TLS (etcds://)"
    return what, f"Check the port, and whether it {expected}"


def _why_no_connection(error: BaseException, *, tls: bool) -> tuple[str, str]:
    text, root = str(error), _root_of(error)
    if "Name or service" in text or "getaddrinfo" in text or "name resolution" in text or "nodename" in text:
        return "its name cannot be resolved", "Check the host in the URL"
    if isinstance(root, ssl.SSLCertVerificationError):
        return (
            "its TLS certificate is not trusted",
            "Name the certificate of its authority (ssl_ca_certs=), and the host as the certificate does",
        )
    if isinstance(root, ssl.SSLError) or "SSL" in text:
        return (
            "the TLS handshake failed",
            "If its port is a plain one, use etcd://; else check ssl_ca_certs=",
        )
    if "refused" in text or "All connection attempts failed" in text:
        return "nothing listens there", "Start etcd there, or check host and port"
    return f"no connection came about ({type(error).__name__})", "Check host and port, and that the server runs"


def _failed(
    error: HoldfastError,
    cause: BaseException | None,
    *,
    sent: bool,
    retry: bool,
    ever_answered: bool = True,
    silent: bool = False,
) -> StepFailed:
    failed = StepFailed(error, sent=sent, retry=retry, ever_answered=ever_answered, silent=silent)
    if cause is not None:
        cause.__traceback__ = None
        failed.__cause__ = cause
    return failed
