"""Options that do not exist: the names of other libraries are translated, misspelt ones are recognized."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
from redis.lock import Lock

import holdfast
import holdfast.aio
from holdfast.translations import OF_LOCKS

CLIENT: Any = holdfast.connect("redis://127.0.0.1:1/0")  # it connects when it is first used, which is never
RENEWED = "(ttl=10 alone is renewed, and max_hold=10 ends a renewed lease)"
NOT_POLLING = "because waiters are notified and do not poll"

# The parameters of each library's lock and of its acquire(), as of the versions named. Those that mean the same here
# are left out.
NAMES = {
    "python-redis-lock 4.0": "redis_client name expire id auto_renewal strict signal_expire blocking",
    "pottery 3.0": "key masters raise_on_redis_errors auto_release_time num_extensions context_manager_blocking "
    "context_manager_timeout",
    "Redisson 3, and in Python's spelling": "name waitTime leaseTime unit lockWatchdogTimeout wait_time lease_time "
    "lock_watchdog_timeout",
    "filelock 4.2": "lock_file timeout mode thread_local blocking is_singleton poll_interval poll_intervall lifetime "
    "cancel_check context_error_policy close_error_policy fallback_to_soft preserve_lock_file on_acquired",
}

MESSAGES = [
    (
        {"timeout": 10, "blocking_timeout": 5},
        "timeout=10, blocking_timeout=5: a lock has no such options; for timeout= write ttl=10, renew=False to limit "
        f"the hold as redis-py does {RENEWED}, or wait=10 to limit the wait as filelock does; for blocking_timeout= "
        "write wait=5",
    ),
    (
        {"expire": 10, "auto_renewal": True},
        "expire=10, auto_renewal=True: a lock has no such options; for expire= write ttl=10, and renew=False if the "
        "lease must not be renewed; for auto_renewal= write renew=True",
    ),
    ({"leaseTime": 10}, f"leaseTime=10: a lock has no such option; for leaseTime= write ttl=10, renew=False {RENEWED}"),
    ({"namespace": "a:"}, "namespace=...: a lock has no such option; give namespace= to connect()"),
    ({"sleep": 0.1}, f"sleep=0.1: a lock has no such option; leave out sleep=, {NOT_POLLING}"),
    ({"timeout": None}, "timeout=None: a lock has no such option; leave out timeout="),
    (
        {"waitTime": timedelta(seconds=3)},
        "waitTime=3.0: a lock has no such option; for waitTime= write wait=3.0",
    ),
    ({"wiat": 3}, "wiat=3: a lock has no such option; did you mean wait=?"),
    (
        {"size": {1}},
        "size=...: a lock has no such option; its options are ttl, wait, renew, max_hold, on_lost, label, cohort, "
        "outage_wait",
    ),
]


def refused(call: Any, **options: Any) -> str:
    """The message of a call with these options: one error, which no other precedes."""
    with pytest.raises(holdfast.UnknownOption) as caught:
        call(**options)
    assert caught.value.__context__ is None
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, holdfast.InvalidConfig)
    return str(caught.value)


@pytest.mark.parametrize(("options", "message"), MESSAGES, ids=lambda value: next(iter(value), None))
def test_the_message_says_what_to_write(options: dict[str, Any], message: str) -> None:
    assert refused(lambda **given: CLIENT.lock("x", **given), **options) == message
    assert refused(lambda **given: CLIENT.rlock("x", **given), **options) == message
    assert refused(lambda **given: CLIENT.exclusive("x", **given), **options) == message
    assert refused(lambda **given: holdfast.aio.connect("redis://h:1/0").lock("x", **given), **options) == message


def test_a_lock_without_a_name() -> None:
    message = 'name=...: a lock has no such option; instead of name= pass the name first, as in lock("order:42")'
    assert refused(CLIENT.lock, name="x") == message
    with pytest.raises(holdfast.InvalidName, match="no name was given"):
        CLIENT.lock()


@pytest.mark.parametrize("library", NAMES)
def test_every_name_of_a_library_is_translated(library: str) -> None:
    for name in NAMES[library].split():
        message = refused(lambda **given: CLIENT.lock("x", **given), **{name: 10})
        assert "its options are" not in message, name
        assert "did you mean" not in message, name


def test_every_name_of_the_installed_redis_py_is_translated() -> None:
    parameters = {*inspect.signature(Lock).parameters, *inspect.signature(Lock.acquire).parameters} - {"self"}
    assert {"timeout", "blocking_timeout", "token"} <= parameters <= set(OF_LOCKS)


def test_what_the_advice_names_exists() -> None:
    lock = inspect.signature(holdfast.Client.lock).parameters
    for option in ("ttl", "wait", "renew", "max_hold", "label"):
        assert option in lock
    assert "on_event" in inspect.signature(holdfast.connect).parameters


def test_no_value_that_may_be_a_secret_is_shown() -> None:
    assert "s3cr3t" not in refused(lambda **given: CLIENT.lock("x", **given), token="s3cr3t", id=b"s3cr3t")


def test_acquire_translates_too() -> None:
    lock = CLIENT.lock("x")
    message = "blocking_timeout=5: acquire() has no such option; for blocking_timeout= write wait=5"
    assert refused(lock.acquire, blocking_timeout=5) == message
    assert refused(lock.acquire, ttl=5) == "ttl=5: acquire() has no such option; give ttl= to lock()"


def test_connect_says_where_the_address_belongs() -> None:
    for connect in (holdfast.connect, holdfast.aio.connect):
        assert refused(connect, host="redis1", port=6379, password="s3cr3t") == (
            "host=..., port=6379, password=...: connect() has no such options; put host=, port=, password= into the "
            "URL, as in redis://user:password@host:6379/0"
        )


def test_the_names_of_locks_are_not_those_of_cached_values() -> None:
    message = refused(lambda **given: CLIENT.cached("x", **given), timeout=3)
    assert message == (
        "timeout=3: a cached value has no such option; its options are ttl, stale, errors, early, compute_ttl, "
        "max_compute, wait, serializer"
    )
    assert "did you mean stale=?" in refused(lambda **given: CLIENT.get_or_compute("x", int, **given), stalee={1})


def test_what_a_call_fixes_is_no_option_of_it() -> None:
    with pytest.raises(holdfast.UnknownOption, match="cohort=1: an election has no such option; its options are"):
        CLIENT.election("x", cohort=1)
    with pytest.raises(holdfast.UnknownOption, match=r"wait=3: adopt\(\) has no such option; its options are"):
        CLIENT.adopt("a ticket", wait=3)


def test_a_ttl_for_acquire_belongs_to_the_lock() -> None:
    message = "leaseTime=10: acquire() has no such option; for leaseTime= give ttl=10, renew=False to lock()"
    assert refused(CLIENT.lock("x").acquire, leaseTime=10) == message
