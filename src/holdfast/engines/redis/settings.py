"""Settings of redis-py's connections: read from a URL, checked, and without what belongs to the user's client.

``flavour`` is the module of redis-py's connection classes: for threads, or for asyncio.
"""

from __future__ import annotations

import inspect
import re
import socket
import ssl
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from holdfast.errors import InvalidConfig
from holdfast.url import redact
from holdfast.url.options import unknown_option

# In seconds, except TCP_KEEPCNT (a count) and TCP_USER_TIMEOUT (ms): how long sent data may stay unacknowledged.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
_NOT_TEXT: Final = (
    *("command_packer", "connection_class", "credential_provider", "parser_class", "redis_connect_func"),
    *("socket_keepalive_options", "socket_type", "ssl_ocsp_context"),
)
_LARGEST_READ: Final = 1 << 30


def read_url(redis_url: str, url: str, flavour: ModuleType) -> tuple[type[Any], dict[str, Any]]:
    """The connection class and settings of redis-py for ``redis_url``, which was made from the user's ``url``."""
    what = f"URL {redact(url)!r}"
    try:
        settings = dict(flavour.parse_url(redis_url))
    except ValueError as error:
        # The text may quote the URL with its password, so only the name of the option is taken from it.
        named = re.search(r"value for '(\w+)'", str(error))
        problem = f"the value of {named[1]} cannot be read" if named else "it cannot be read"
        raise InvalidConfig(what, problem) from None
    for option in _NOT_TEXT:
        if isinstance(settings.get(option), str):
            raise InvalidConfig(what, f"{option} cannot be given as text; give connect() a redis client that has it")
    connection_class = settings.pop("connection_class", flavour.Connection)
    of_redis_py = ("and those of a connection of redis-py",)
    check_settings(
        what, connection_class, settings, flavour, lambda name: unknown_option(url, redact(url), name, of_redis_py)
    )
    return connection_class, settings


def check_settings(
    what: str,
    connection_class: type[Any],
    settings: dict[str, Any],
    flavour: ModuleType,
    unknown: Callable[[str], InvalidConfig] | None = None,
) -> None:
    """Raise InvalidConfig if redis-py does not take these settings. ``unknown`` makes it for an unknown option."""
    wrong = _find_wrong(settings)
    try:
        connection_class(**cleaned(connection_class, settings, flavour))  # opens nothing, but checks the options
    except TypeError as error:
        named = re.search(r"argument '(\w+)'", str(error))
        name = named[1] if named else ""
        if unknown is not None:
            raise unknown(name) from None
        option = repr(name) if name else "one of its options"
        raise InvalidConfig(what, f"{option} is no option of a connection") from None
    except Exception as error:  # its text may quote a setting, which may be a password
        raise InvalidConfig(what, wrong or f"redis-py refuses its options ({type(error).__name__})") from None
    if wrong:
        raise InvalidConfig(what, wrong)  # redis-py would fail only when it connects


def _find_wrong(settings: dict[str, Any]) -> str:
    """What is wrong with the value of an option; empty if nothing is known to be."""
    for option, (is_valid, advice) in _VALID.items():
        if settings.get(option) is not None and not is_valid(settings[option]):
            return f"the value of {option} cannot be used; give {advice}"
    return ""


def _is_port(value: object) -> bool:
    return re.fullmatch("[0-9]{1,5}", str(value)) is not None and 0 < int(str(value)) < 65536


def _is_read_size(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= _LARGEST_READ


def _is_cert_reqs(value: object) -> bool:
    return not isinstance(value, str) or value in ("none", "optional", "required")


_VALID: Final = {
    "port": (_is_port, "a number from 1 to 65535"),
    "socket_read_size": (_is_read_size, f"a number from 1 to {_LARGEST_READ}"),
    "ssl_cert_reqs": (_is_cert_reqs, "none, optional or required"),
}


def cleaned(connection_class: type[Any], settings: dict[str, Any], flavour: ModuleType) -> dict[str, Any]:
    """The user's settings, without those of the pool and of redis-py's own calls."""
    kept = {
        option: value
        for option, value in settings.items()
        if not option.startswith(("maint_notifications", "oss_cluster_maint", "orig_", "himport", "event_dispatcher"))
    }
    kept.update(
        decode_responses=False,
        encoding="utf-8",
        protocol=2,
        health_check_interval=0,
        retry=flavour.Retry(flavour.NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
    )
    # CLIENT SETINFO at connect costs two round trips and needs a permission. How to turn it off depends on the version.
    known = inspect.signature(flavour.AbstractConnection.__init__).parameters
    kept.update({"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None})
    if issubclass(connection_class, flavour.SSLConnection):
        kept["ssl_check_hostname"] = _checks_host_name(settings)
    return kept


def _checks_host_name(settings: dict[str, Any]) -> bool:
    """Whether TLS refuses a certificate for another host: unless the user has turned that off, or accepts every
    certificate. redis-py before version 6 does so only if it is asked to."""
    if settings.get("ssl_cert_reqs", "required") in (None, "none", ssl.CERT_NONE):
        return False
    wanted = settings.get("ssl_check_hostname")
    return wanted is None or bool(wanted)


def keep_alive(settings: dict[str, Any], flavour: ModuleType) -> None:
    """Turn TCP keep-alive on, unless the user has turned it off; with the user's options, if there are any.

    A subscriber or an idle connection may be silent for hours. A router may then drop it without notice.
    """
    if settings.get("socket_keepalive") is False:
        return
    settings["socket_keepalive"] = True
    unset = inspect.signature(flavour.Connection.__init__).parameters["socket_keepalive_options"].default
    if settings.get("socket_keepalive_options", unset) is unset:
        settings["socket_keepalive_options"] = {
            getattr(socket, option): value for option, value in _KEEP_ALIVE.items() if hasattr(socket, option)
        }
