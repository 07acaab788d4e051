"""URLs of servers: which engine a URL names, and how to show a URL without its secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Address
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidConfig
from holdfast.url.options import take_options, unknown_option

_REDIS_SCHEMES: Final = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}
# URLs with several hosts, such as redis+sentinel://. The port is the default of a host without one.
_PORTS: Final = {"sentinel": 26379, "cluster": 6379, "etcd": 2379, "memcached": 11211}
_EXAMPLES: Final = {
    "sentinel": "h1:26379,h2:26379/mymaster/0",
    "cluster": "h1:7000,h2:7001",
    "etcd": "h1:2379,h2:2379,h3:2379",
    "memcached": "localhost:11211",
}
_OTHERS: Final = {"etcd": "etcd", "etcds": "etcd", "memcached": "memcached"}
_SEVERAL: Final = {
    f"{scheme}+{engine}": engine
    for engine in ("sentinel", "cluster")
    for scheme in ("redis", "rediss", "valkey", "valkeys")
} | _OTHERS
SCHEMES: Final = (
    *("local", *_REDIS_SCHEMES, "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
    *_OTHERS,
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PLACE = re.compile(r"([^/#]*)(.*)", re.DOTALL)  # hosts, and what follows them
_HOST = re.compile(r"(\[[^][]+\]|[^][:]*)(?::([0-9]{1,5}))?")
_NOT_IN_NAMES = re.compile(r"[ /\\?#@%:,\[\]]")
_NO_PORT = re.compile(r"^[^/@]*:(?!\d{1,5}(/|$))", re.DOTALL)
_YES_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Location(NamedTuple):
    """What a URL names: an embedded server (``directory``; None is the default), or other servers.

    ``redis_url`` has the settings of connections to the servers, for redis-py. With several ``hosts`` its own host is
    not used. ``sentinel_url`` has the settings of connections to the Sentinels of that ``service``.
    """

    engine: str
    address: str
    directory: str | None = None
    redis_url: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_url: str = ""
    settings: Mapping[str, str] = {}  # of etcd
    options: Mapping[str, Any] = {}  # of ``connect``


def redact(url: str) -> str:
    """The URL for messages, without credentials and options. If the URL is unclear, more of it is hidden."""
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return "***"
    place, mark, options = re.match(r"([^?#]*)([?#]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    host = place.rpartition("@")[2]
    # If an '@' is among the options, or no port follows a colon, the password may not be percent-encoded or the host
    # may be missing. Then it is unclear where the password ends.
    if "@" in options or (host == place and _is_unclear(scheme.lower(), place)):
        return f"{scheme}://***"
    return f"{scheme}://{'***@' if host != place else ''}{host}{'?***' if mark else ''}"


_SERVER = re.compile(r"(?:(rediss?|valkeys?)://)?([^ /]+):([0-9]+)(?:/([0-9]+))?(?: of .*)?")


def url_of_fleet(engine: str, address: str, service: str = "") -> str:
    """The URL of a cluster or of Sentinels, of which the server at this address is one. It contains no credentials."""
    found = _SERVER.fullmatch(address)
    scheme, host, port, database = found.groups() if found else (None, "host", str(_PORTS[engine]), None)
    place = f"[{host}]" if ":" in host and not host.startswith("[") else host
    more = f"/{database}" if database and database != "0" else ""
    return f"{scheme or 'redis'}+{engine}://{place}:{port}" + (f"/{service}{more}" if engine == "sentinel" else "")


def _is_unclear(scheme: str, place: str) -> bool:
    if scheme not in _SEVERAL:
        return bool(_NO_PORT.match(place))
    return not all(map(_HOST.fullmatch, place.partition("/")[0].split(",")))


def locate(url: str) -> Location:
    """The engine and server that the URL names. Raises InvalidConfig if it is not valid."""
    shown = redact(url)
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in (*SCHEMES, *_SEVERAL):
        known = ", ".join(f"{known}://" for known in SCHEMES)
        what = f"URL {shown!r}" if separator else "a URL without '://'"
        raise InvalidConfig(what, f"Holdfast does not know its scheme; use one of {known}")
    place, _, query = rest.partition("?")
    hosts, path = _PLACE.fullmatch(place).groups()  # type: ignore[union-attr]
    signs = query if scheme == "local" else f"{path}{query}"  # a directory may have any name
    if "@" in signs:
        raise InvalidConfig(f"URL {shown!r}", "an '@' comes after '/', '?' or '#'; percent-encode it, as %40")
    if "#" in signs:
        raise InvalidConfig(f"URL {shown!r}", "it has a '#'; percent-encode it, as %23")
    options, others = take_options(query, shown)
    if scheme == "local":
        _refuse(others, (), url, shown)
        location = _locate_local(place, shown)
    elif scheme in _OTHERS:
        _refuse(others, _OPTIONS.get(scheme, ()), url, shown)
        location = _locate_other(scheme, hosts, path, others, shown)
    elif scheme in _SEVERAL:
        location = _locate_several(scheme, hosts, path, others, shown)
    else:
        location = _locate_redis(scheme, place, others, shown)
    return location._replace(options=options)


# The options of URLs that are not of ``connect``. Those of Redis are checked by redis-py.
_OPTIONS: Final = {"etcds": ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")}


def _refuse(options: Iterable[str], known: tuple[str, ...], url: str, shown: str) -> None:
    for option in options:
        name = option.partition("=")[0]
        if name not in known:
            raise unknown_option(url, shown, name, known)


def _locate_redis(scheme: str, place: str, options: list[str], shown: str) -> Location:
    """One Redis or Valkey server."""
    try:
        redis_url = f"{_REDIS_SCHEMES[scheme]}://{place}"
        parts = urlsplit(redis_url)
        port = parts.port
    except ValueError:  # its text quotes the URL with the password
        raise InvalidConfig(f"URL {shown!r}", _UNREADABLE) from None
    redis_url = f"{redis_url}?{'&'.join(options)}"
    if scheme == "unix":
        if not parts.path:
            raise InvalidConfig(f"URL {shown!r}", "it names no socket; write unix:///path/to/socket")
        return Location("redis", f"unix://{unquote(parts.path)}", redis_url=redis_url)
    if not parts.hostname:
        raise InvalidConfig(f"URL {shown!r}", f"it names no host; write {scheme}://host:6379/0")
    database = _check_database(parts.path.strip("/"), options, shown)
    address = f"{scheme}://{parts.hostname}:{6379 if port is None else port}/{database}"
    return Location("redis", address, redis_url=redis_url)


_UNREADABLE: Final = "its host or port cannot be read; a port is 1 to 65535, and a password must be percent-encoded"


def _locate_several(scheme: str, places: str, path: str, options: list[str], shown: str) -> Location:
    """Sentinels or nodes of a cluster: ``[user:password@]host:port,host:port[/path]``."""
    engine, base = _SEVERAL[scheme], _REDIS_SCHEMES[scheme.partition("+")[0]]
    user, at, hosts = _split(scheme, places, shown)
    where = _shown(hosts)
    named = [unquote(part) for part in path.removeprefix("/").rstrip("/").split("/")]
    if engine == "cluster":
        if named not in ([""], ["0"]) or _check_database("", options, shown) != "0":
            raise InvalidConfig(
                f"URL {shown!r}", f"a cluster has database 0 only; write {scheme}://{_EXAMPLES[engine]}"
            )
        redis_url = f"{base}://{user}{at}localhost/0?{'&'.join(options)}"
        return Location(engine, f"{scheme}://{where}", redis_url=redis_url, hosts=hosts)
    if not named[0] or len(named) > 2:
        problem = "its path is not /service/database" if named[0] else "it names no service, as the Sentinels know it"
        raise InvalidConfig(f"URL {shown!r}", f"{problem}; write {scheme}://{_EXAMPLES[engine]}")
    database = _check_database(named[1] if len(named) > 1 else "", options, shown)
    own, of_sentinels = _split_options(options)
    return Location(
        engine,
        f"{scheme}://{where}/{named[0]}/{database}",
        redis_url=f"{base}://{user}{at}localhost/{database}?{'&'.join(own)}",
        hosts=hosts,
        service=named[0],
        sentinel_url=_sentinel_url(base, of_sentinels, shown),
    )


def _split(scheme: str, places: str, shown: str) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """Credentials, an '@' if there are any, and hosts."""
    user, at, places = places.rpartition("@")
    return user, at, tuple(_check_host(place, scheme, shown) for place in places.split(","))


def _shown(hosts: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)


def _locate_other(scheme: str, places: str, path: str, options: list[str], shown: str) -> Location:
    """etcd or memcached: ``[user:password@]host:port,host:port``."""
    engine = _OTHERS[scheme]
    user, at, hosts = _split(scheme, places, shown)
    example = f"write {scheme}://{_EXAMPLES[engine]}"
    if path not in ("", "/"):
        raise InvalidConfig(f"URL {shown!r}", f"it has a path, and {engine} has no databases; {example}")
    if engine == "memcached" and (at or len(hosts) > 1):
        problem = "it has a user or password, which memcached does not ask for" if at else "it names several servers"
        raise InvalidConfig(f"URL {shown!r}", f"{problem}; {example}")
    settings = {name: unquote(value) for name, _, value in (option.partition("=") for option in options)}
    if at:
        settings["user"], _, settings["password"] = (unquote(part) for part in user.partition(":"))
    return Location(engine, f"{scheme}://{_shown(hosts)}", hosts=hosts, settings=settings)


def _check_host(place: str, scheme: str, shown: str) -> tuple[str, int]:
    found = _HOST.fullmatch(place)
    if found is None or (found[2] and not 0 < int(found[2]) < 65536):
        raise InvalidConfig(f"URL {shown!r}", _UNREADABLE)
    if not found[1]:
        engine = _SEVERAL[scheme]
        raise InvalidConfig(f"URL {shown!r}", f"a host is missing; write {scheme}://{_EXAMPLES[engine]}")
    host = unquote(found[1].strip("[]"))
    if not (_is_ipv6(host) if found[1].startswith("[") else _is_name(host)):
        raise InvalidConfig(f"URL {shown!r}", "a host in it is neither a name nor an IP address; correct it")
    return host, int(found[2] or _PORTS[_SEVERAL[scheme]])


def _is_ipv6(host: str) -> bool:
    try:
        return bool(IPv6Address(host))
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    """Whether a host can be looked up: as a name, maybe an international one, or as an IPv4 address."""
    try:
        host.encode("idna")  # as a lookup does: no label is empty, or longer than 63 characters
    except UnicodeError:
        return False
    return host.isprintable() and not _NOT_IN_NAMES.search(host)


def _check_database(path: str, options: list[str], shown: str) -> str:
    """The number of the database: that of the option ``db=``, as for redis-py, or of the path."""
    database = ([path] + [option.partition("=")[2] for option in options if option.startswith("db=")])[-1]
    if database and not re.fullmatch("[0-9]+", database):
        raise InvalidConfig(f"URL {shown!r}", "its database is not a number; write /0, for example")
    return database or "0"


def _split_options(options: list[str]) -> tuple[list[str], list[str]]:
    """The options of connections to the servers, and to the Sentinels. Those of TLS are for both."""
    own = [option for option in options if not option.startswith("sentinel_")]
    theirs = [option for option in own if option.startswith("ssl_")]
    named = [option.removeprefix("sentinel_") for option in options if option.startswith("sentinel_")]
    replaced = {option.partition("=")[0] for option in named}
    return own, [option for option in theirs if option.partition("=")[0] not in replaced] + named


def _sentinel_url(base: str, options: list[str], shown: str) -> str:
    """The settings of connections to the Sentinels. ``ssl=`` says whether they use TLS; without it, as the servers."""
    for option in options:
        if option.startswith("ssl="):
            use = _YES_NO.get(option.partition("=")[2].lower())
            if use is None:
                raise InvalidConfig(f"URL {shown!r}", "the value of sentinel_ssl is neither true nor false")
            base = "rediss" if use else "redis"
    kept = [option for option in options if not option.startswith("ssl=" if base == "rediss" else "ssl")]
    return f"{base}://localhost?{'&'.join(kept)}"


def _locate_local(path: str, shown: str) -> Location:
    directory = unquote(path)
    if directory in ("", "/"):
        return Location("local", "local://")
    if not directory.startswith("/"):
        raise InvalidConfig(f"URL {shown!r}", "its path is not absolute; write local:///path/of/a/directory")
    return Location("local", f"local://{directory}", directory=directory)
