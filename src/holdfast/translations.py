"""Option names of other lock libraries, and what to write instead.

The names are those of redis-py, python-redis-lock, pottery, Redisson and filelock. A name that means the same here
needs no entry. In an advice, ``{0}`` stands for the option as it was given, and ``{1}`` for its value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from holdfast.errors import UnknownOption, shown

_NAME_FIRST: Final = 'instead of {0} pass the name first, as in lock("order:42")'
_OF_CLIENT: Final = "leave out {0}, because the server is given to connect()"
_NO_POLLING: Final = "leave out {0}, because waiters are notified and do not poll"
_OF_FILES: Final = "leave out {0}, which is about files"
_RENEWED: Final = "(ttl={1} alone is renewed, and max_hold={1} ends a renewed lease)"
_HOLD: Final = f"for {{0}} write ttl={{1}}, renew=False {_RENEWED}"
_WAIT: Final = "for {0} write wait={1}"
_ONE_TRY: Final = "for {0} write wait=0 for one try, or leave it out to wait"

OF_LOCKS: Final[Mapping[str, str]] = {
    # redis-py
    "name": _NAME_FIRST,
    "redis": _OF_CLIENT,
    "timeout": f"for {{0}} write ttl={{1}}, renew=False to limit the hold as redis-py does {_RENEWED}, "
    "or wait={1} to limit the wait as filelock does",
    "blocking": _ONE_TRY,
    "blocking_timeout": _WAIT,
    "sleep": _NO_POLLING,
    "thread_local": "leave out {0}, because any thread may release a lock, unless it is an rlock()",
    "raise_on_release_error": "leave out {0}, because releasing a lost lease always raises LeaseLost",
    "lock_class": "for {0} call lock(), rlock(), rwlock() or semaphore()",
    "token": "leave out {0}, because each lease has its own, and lease.hand_over() passes it on",
    # python-redis-lock
    "redis_client": _OF_CLIENT,
    "expire": "for {0} write ttl={1}, and renew=False if the lease must not be renewed",
    "auto_renewal": "for {0} write renew={1}",
    "id": "for {0} write label=, which names the holder, or pass the lock on with lease.hand_over()",
    **dict.fromkeys(("strict", "loop", "run_in_executor", "executor"), "leave out {0}"),
    "signal_expire": _NO_POLLING,
    # pottery
    "key": _NAME_FIRST,
    "masters": "for {0} give one server to connect(), or etcd://, which survives the loss of a server",
    "raise_on_redis_errors": "leave out {0}, because no answer always raises Unavailable",
    "auto_release_time": _HOLD,
    "num_extensions": "for {0} write max_hold=, in seconds, because leases are renewed until then",
    "context_manager_blocking": _ONE_TRY,
    "context_manager_timeout": _WAIT,
    # Redisson
    "waitTime": _WAIT,
    "leaseTime": _HOLD,
    "lockWatchdogTimeout": "for {0} write ttl=, in seconds, because leases are renewed",
    "unit": "for {0} give seconds, or a datetime.timedelta",
    # filelock
    "lock_file": _NAME_FIRST,
    "poll_interval": _NO_POLLING,
    "lifetime": _HOLD,
    "is_singleton": "leave out {0}, or use rlock(), which its thread may acquire again",
    "cancel_check": "leave out {0}, and under asyncio cancel the task",
    "on_acquired": "leave out {0}, and give on_event= to connect()",
    **dict.fromkeys(("mode", "fallback_to_soft", "preserve_lock_file"), _OF_FILES),
    **dict.fromkeys(("context_error_policy", "close_error_policy"), _OF_FILES),
    # Holdfast's own
    **dict.fromkeys(("namespace", "replicas", "fence_retention", "fence_floor", "on_event"), "give {0} to connect()"),
}
IN_URLS: Final = dict.fromkeys(("ttl", "wait", "renew", "max_hold", "label"), "give {0} to lock()")
OF_ACQUIRE: Final[Mapping[str, str]] = {
    **OF_LOCKS,
    **IN_URLS,
    **dict.fromkeys(
        ("leaseTime", "expire", "lifetime", "auto_release_time"), "for {0} give ttl={1}, renew=False to lock()"
    ),
}
OF_CLIENTS: Final[Mapping[str, str]] = {
    **IN_URLS,
    "url": "pass the URL first",
    **dict.fromkeys(
        ("host", "port", "db", "username", "password", "unix_socket_path"),
        "put {0} into the URL, as in redis://user:password@host:6379/0",
    ),
    **dict.fromkeys(
        ("decode_responses", "socket_timeout", "ssl", "ssl_ca_certs", "retry", "health_check_interval"),
        "leave out {0}, or pass your own redis.Redis",
    ),
}
_SPELLINGS: Final = {
    "poll_intervall": "poll_interval",  # so filelock spelled it once
    "wait_time": "waitTime",
    "lease_time": "leaseTime",
    "lock_watchdog_timeout": "lockWatchdogTimeout",
}


def unknown_options(
    subject: str, given: Mapping[str, Any], known: Collection[str], advice: Mapping[str, str] = MappingProxyType({})
) -> UnknownOption:
    """The error of a call with options that ``subject`` does not have. It has the ``known`` ones."""
    options = ", ".join(f"{option:.60}={_value(value)}" for option, value in given.items())
    alike: dict[str, list[str]] = {}  # the options for which the advice is the same
    for option, value in given.items():
        alike.setdefault(advice_for(option, value, known, advice), []).append(f"{option:.60}=")
    instead = "; ".join(text.replace("{0}", ", ".join(names)) for text, names in alike.items())
    return UnknownOption(options, f"{subject} has no such option{'s' * (len(given) > 1)}; {instead}")


def advice_for(option: str, value: Any, known: Collection[str], advice: Mapping[str, str]) -> str:
    """What to write instead of an option. ``{0}`` in it stands for the option."""
    text = advice.get(_SPELLINGS.get(option, option))
    if text is None:
        close = get_close_matches(option, known, n=1, cutoff=0.7)
        return f"did you mean {close[0]}=?" if close else f"its options are {', '.join(known)}"
    if "{1}" in text and (value is None or value == -1):  # as those libraries write "no limit"
        return "leave out {0}"
    return text.replace("{1}", _value(value))


def _value(value: Any) -> str:
    """A value as text, unless it may be a secret."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return shown(value) if value is None or isinstance(value, int | float) else "..."
