"""Where the events of a client go: to the log ``holdfast``, and to the hooks of ``on_event``.

Reporting never delays a step: an event is reported after the step that it describes. If neither a hook nor the debug
log wants events, a protocol makes none, except for those that are always logged (``benchmarks.uncontended``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from holdfast.errors import rounded
from holdfast.events import (
    Abandoned,
    Acquired,
    Broken,
    Event,
    Hook,
    Lost,
    PassedOn,
    Released,
    RenewalFailed,
    Renewed,
    Waiting,
)
from holdfast.holder import Holder
from holdfast.protocol.keepalive import CLOSED

log = logging.getLogger("holdfast")

PAUSE: Final = 1.0  # seconds between two warnings of one kind: an outage affects all leases of a client at once


class Observers:
    """Reports events. Any thread may call it."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self.hooks = tuple(hooks)
        # Whether to make events of the ordinary course of things: asked twice in each cycle (benchmarks.before).
        self.listen: Callable[[], bool] = partial(bool, True) if hooks else partial(log.isEnabledFor, logging.DEBUG)
        self._here = threading.local()  # made here, because gevent may replace it after our import
        self._warned: dict[type[Event], tuple[float, int]] = {}  # when, and how many of that kind were left out since

    def report(self, event: Event) -> None:
        self.log(event)
        self.call_hooks(event)

    def log(self, event: Event) -> None:
        level = level_of(event)
        if log.isEnabledFor(level) and (level != logging.WARNING or self._may_warn(event)):
            log.log(level, "%s%s", describe(event), self._left_out(event), extra=_extra(event))

    def call_hooks(self, event: Event) -> None:
        if not self.hooks or getattr(self._here, "in_hook", False):
            return  # a hook that uses a lock causes events; to call hooks for these would never end
        self._here.in_hook = True
        try:
            for hook in self.hooks:
                try:
                    hook(event)
                except Exception:
                    log.exception("on_event failed for %s of %s %r", type(event).__name__, event.kind, event.key)
        finally:
            self._here.in_hook = False

    def _may_warn(self, event: Event) -> bool:
        kind, now = type(event), time.monotonic()
        at, left_out = self._warned.get(kind, (-PAUSE, 0))
        if now < at + PAUSE:
            self._warned[kind] = at, left_out + 1
            return False
        return True

    def _left_out(self, event: Event) -> str:
        """How many warnings of this kind were not logged since the last one."""
        kind = type(event)
        if level_of(event) != logging.WARNING:
            return ""
        _, left_out = self._warned.get(kind, (0.0, 0))
        self._warned[kind] = time.monotonic(), 0
        return f" (and {left_out} more like this)" if left_out else ""


def level_of(event: Event) -> int:
    """The log level: a loss is an error; what may lead to a loss, or to a stuck job, is a warning."""
    if isinstance(event, Lost):
        return logging.DEBUG if event.reason == CLOSED else logging.ERROR  # this program has closed its client
    if isinstance(event, RenewalFailed):
        return logging.DEBUG if event.outage else logging.WARNING
    if isinstance(event, Waiting) and event.waited > 0:
        return logging.WARNING
    if isinstance(event, Broken):
        return logging.INFO
    if isinstance(event, Renewed) and event.slow:
        return logging.WARNING
    return logging.DEBUG


def describe(event: Event) -> str:
    """The event as one sentence."""
    what = f"{event.kind} {event.key!r}" + (f" ({event.mode})" if event.mode else "")
    if isinstance(event, Waiting):
        held = f"is held by {event.holder}{_since(event.holder)}" if event.holder else "has other waiters before it"
        since = f" for {rounded(event.waited)} s so far" if event.waited else ""
        return f"{what} {held}: waiting{since}" + (f". {event.deadlock}" if event.deadlock else "")
    if isinstance(event, Acquired):
        requests = "1 request" if event.tries == 1 else f"{event.tries} requests"
        how = "from another holder of this client" if event.passed else f"with {requests}"
        return f"{what} acquired after {rounded(event.waited)} s, {how}, fence {event.fence}"
    if isinstance(event, PassedOn):
        return f"{what} passed on within this client after {rounded(event.held)} s"
    if isinstance(event, Renewed):
        late = ": renewals are slow" if event.slow else ""
        return f"{what} renewed with {rounded(event.remaining)} s left{late}"
    if isinstance(event, RenewalFailed):
        return f"{what} could not be renewed and has {rounded(event.remaining)} s left: {event.error}"
    if isinstance(event, Lost):
        return f"{what} lost after {rounded(event.held)} s, fence {event.fence}: {event.reason}"
    if isinstance(event, Released):
        return f"{what} released after {rounded(event.held)} s" + (f": {event.error}" if event.error else "")
    if isinstance(event, Broken):
        return f"{what}: broke the hold of {event.holder}, fence {event.fence}: {event.reason}"
    assert isinstance(event, Abandoned)
    why = f"it is held by {event.holder}" if event.holder else str(event.error or "it is held by another holder")
    return f"{what} given up after {rounded(event.waited)} s: {why}"


def _since(holder: Holder) -> str:
    if holder.since is None:
        return ""
    return f" since {datetime.fromtimestamp(holder.since).astimezone().isoformat(' ', 'seconds')}"


def _extra(event: Event) -> dict[str, object]:
    """Fields for structured logs, each beginning with ``lock_``, because a log record has a ``name`` of its own."""
    return {f"lock_{name}": value for name, value in event.as_dict().items()}
