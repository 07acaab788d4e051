"""URLs: which engine one names, and how to show one without its secrets."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidConfig

__all__ = ["Location", "locate", "redact"]

_REDIS_SCHEMES: Final = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}
SCHEMES: Final = ("local", *_REDIS_SCHEMES)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_NO_PORT = re.compile(r"^[^/@]*:(?!\d{1,5}(/|$))", re.DOTALL)


class Location(NamedTuple):
    """What a URL names: an embedded server in a directory (None: the user's own), or a server by redis-py's URL."""

    engine: str
    address: str
    directory: str | None = None
    redis_url: str = ""


def redact(url: str) -> str:
    """The URL without credentials and options, fit for messages. It errs on the side of hiding too much."""
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return "***"
    place, mark, options = re.match(r"([^?#]*)([?#]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    host = place.rpartition("@")[2]
    # An '@' among the options, or what follows a colon and is no port: a password that was not percent-encoded, or
    # whose host was forgotten. Then nothing can be told apart.
    if "@" in options or (host == place and _NO_PORT.match(place)):
        return f"{scheme}://***"
    return f"{scheme}://{'***@' if host != place else ''}{host}{'?***' if mark else ''}"


def locate(url: str) -> Location:
    """Which engine the URL names; InvalidConfig if it names none."""
    shown = redact(url)
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES)
        what = f"URL {shown!r}" if separator else "a URL without '://'"
        raise InvalidConfig(what, f"its scheme is none that Holdfast knows; use one of {known}")
    if scheme == "local":
        return _locate_local(rest, shown)
    try:
        redis_url = f"{_REDIS_SCHEMES[scheme]}://{rest}"
        parts = urlsplit(redis_url)
        port = parts.port
    except ValueError:  # its text quotes the URL, password and all
        raise InvalidConfig(f"URL {shown!r}", "its host or port cannot be read; percent-encode the password") from None
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise InvalidConfig(f"URL {shown!r}", "an '@' comes after '/', '?' or '#'; percent-encode it, as %40")
    if scheme == "unix":
        if not parts.path:
            raise InvalidConfig(f"URL {shown!r}", "it names no socket; write unix:///path/to/socket")
        return Location("redis", f"unix://{unquote(parts.path)}", redis_url=redis_url)
    if not parts.hostname:
        raise InvalidConfig(f"URL {shown!r}", f"it names no host; write {scheme}://host:6379/0")
    database = parts.path.strip("/")
    if database and not database.isdigit():
        raise InvalidConfig(f"URL {shown!r}", "the database after the host is a number, such as /0")
    address = f"{scheme}://{parts.hostname}:{6379 if port is None else port}/{database or 0}"
    return Location("redis", address, redis_url=redis_url)


def _locate_local(rest: str, shown: str) -> Location:
    directory = unquote(rest)
    if directory in ("", "/"):
        return Location("local", "local://")
    if not directory.startswith("/") or "?" in directory:
        raise InvalidConfig(f"URL {shown!r}", "a named local server is local:///absolute/path/of/a/directory")
    return Location("local", f"local://{directory}", directory=directory)
