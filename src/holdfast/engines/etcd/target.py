"""The members of an etcd cluster that a URL names, and how to reach them."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig, Unavailable, Unsupported, how_to_install
from holdfast.protocol.effects import StepFailed
from holdfast.url import Location

_NEEDED: Final = (0, 25)  # the oldest version of httpx that works


class EtcdTarget(NamedTuple):
    """How to reach etcd. The last fields are as in the Target of Redis."""

    address: str
    members: tuple[str, ...]  # base URLs
    user: str = ""
    password: str = ""
    files: dict[str, str] = {}  # noqa: RUF012 (never written to)
    tls: bool = False
    engine: str = "etcd"
    options: Mapping[str, Any] = {}
    passes: bool = False  # a fence is a revision of etcd, so none can be reserved
    fenced: bool = True
    keys_expire: bool = False  # an etcd lease is shared by many locks

    def __repr__(self) -> str:
        return f"<EtcdTarget {self.address}>"  # tracebacks may show locals

    @property
    def fence_floor(self) -> int:
        return self.options.get("fence_floor") or 0

    def settings(self) -> dict[str, Any]:
        """The settings for a transport of httpx. Proxies named in the environment are ignored."""
        import httpx

        verify: Any = self._trust() if self.tls else False  # without TLS, do not spend 30 ms on loading certificates
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60.0)
        return {"verify": verify, "trust_env": False, "limits": limits}

    def _trust(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.files.get("ssl_ca_certs"))
            if "ssl_certfile" in self.files:
                context.load_cert_chain(self.files["ssl_certfile"], self.files.get("ssl_keyfile"))
        except (OSError, ssl.SSLError) as cause:
            problem = f"a file that its URL names cannot be used ({type(cause).__name__})"
            error = Unavailable({self.address: problem}, "Check ssl_ca_certs=, ssl_certfile= and ssl_keyfile=")
            raise StepFailed(error, sent=False, retry=False) from None
        return context

    def blocking_engines(self, router: Any, now: Any) -> tuple[Any, Any]:
        from holdfast.engines.etcd.blocking import Engine

        engine = Engine(self, router, now)
        return engine, engine

    def aio_engines(self, timeout: float, router: Any, now: Any) -> tuple[Any, Any, Any]:
        from holdfast.engines.etcd.aio import Engine
        from holdfast.engines.others import NoDedicated, Standby

        engine = Engine(self, router, now)
        return engine, Standby(engine), NoDedicated()


def wall_us() -> int:
    """The time of day in microseconds, which intents show to people who inspect them."""
    return time.time_ns() // 1000


def resolve_etcd(location: Location) -> EtcdTarget:
    """The target of a URL; Unsupported if httpx is missing."""
    try:
        import httpx
    except ImportError:
        raise Unsupported(f"{location.address} without httpx", f"run: {how_to_install('etcd')}") from None
    if tuple(map(int, httpx.__version__.split(".")[:2])) < _NEEDED:
        raise Unsupported(f"{location.address} with httpx {httpx.__version__}", f"run: {how_to_install('etcd')}")
    settings = location.settings
    tls = location.address.startswith("etcds")
    members = tuple(
        f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in location.hosts
    )
    try:
        for member in members:
            bool(httpx.URL(member).host)  # each of these may refuse a host
    except (httpx.InvalidURL, ValueError):
        raise InvalidConfig(
            f"URL {location.address!r}", "a host in it is neither a name nor an IP address; correct it"
        ) from None
    user, password = settings.get("user", ""), settings.get("password", "")
    if password and not user:
        raise InvalidConfig(
            f"URL {location.address!r}", "it has a password and no user; write etcd://user:password@host"
        )
    files = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    return EtcdTarget(location.address, members, user, password, files, tls)
