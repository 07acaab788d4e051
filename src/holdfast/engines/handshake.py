"""A connection attempt that fails leaves no socket open."""

from __future__ import annotations

import socket
from traceback import walk_tb
from typing import Any, Final

# Where a socket can be left: in redis-py's connect(), and in TLS of the standard library and of gevent.
_OPENERS: Final = ("redis.connection", "ssl", "gevent.ssl")


def connect(connection: Any) -> None:
    """Let redis-py connect and perform the handshake."""
    try:
        connection.connect()
    except BaseException as error:
        connection.disconnect()  # redis-py only does so for its own errors
        close_sockets_of(error)
        raise


def close_sockets_of(error: BaseException) -> None:
    """Close the sockets that only the frames of a failed attempt know.

    If the server resets a connection before the TLS handshake begins, Python up to 3.12.1 leaves its SSLSocket open
    (gh-113280). Ctrl-C during the handshake does so too; so does Ctrl-C before redis-py has noted its socket.
    """
    failed: BaseException | None = error
    while failed is not None:
        for frame, _ in walk_tb(failed.__traceback__):
            if frame.f_globals.get("__name__") in _OPENERS:
                for value in list(frame.f_locals.values()):
                    if isinstance(value, socket.socket):
                        value.close()
        failed = failed.__context__
