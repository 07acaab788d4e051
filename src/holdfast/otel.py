"""OpenTelemetry spans of locks, made from events. Needs ``pip install 'holdfast[otel]'`` and an SDK of your choice.

    client = holdfast.connect(url, on_event=holdfast.otel.Spans())

There is a span ``holdfast wait`` for each wait, and a span ``holdfast hold`` for each hold. Both are made when they are
over, with the times at which they began and ended, as children of the span in which the lock was acquired. That context
is noted at the acquire, because another thread may release the lock, and the keeper finds a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from holdfast.errors import Unsupported, how_to_install
from holdfast.events import Abandoned, Acquired, Event, Lost, PassedOn, Released

__all__ = ["Spans"]

_WORTH_A_SPAN: Final = (Acquired, Abandoned, Released, PassedOn, Lost)


class Spans:
    """A hook for ``on_event`` that makes spans, by the tracer provider given or the global one."""

    def __init__(self, tracer_provider: Any = None) -> None:
        try:
            from opentelemetry.context import get_current
            from opentelemetry.trace import SpanKind, Status, StatusCode, get_tracer
        except ImportError:
            raise Unsupported("holdfast.otel without opentelemetry-api", f"run: {how_to_install('otel')}") from None
        self._tracer = get_tracer("holdfast", tracer_provider=tracer_provider)
        self._client, self._internal = SpanKind.CLIENT, SpanKind.INTERNAL
        self._failed: Callable[[str], Any] = partial(Status, StatusCode.ERROR)
        self._context: Callable[[], Any] = get_current
        self._contexts: dict[tuple[object, ...], Any] = {}  # by hold: where it was acquired

    def __call__(self, event: Event) -> None:
        if not isinstance(event, _WORTH_A_SPAN):
            return
        waits = isinstance(event, Acquired | Abandoned)
        lasted = event.waited if isinstance(event, Acquired | Abandoned) else event.held
        now = time.time_ns()
        context, hold = self._context(), (event.name, event.kind, event.mode, event.fence)
        if isinstance(event, Acquired):
            self._contexts[hold] = context
        elif not waits:
            context = self._contexts.pop(hold, context)
        span = self._tracer.start_span(
            "holdfast wait" if waits else "holdfast hold",
            context,
            kind=self._client if waits else self._internal,
            start_time=now - round(lasted * 1e9),
            attributes=_attributes(event),
        )
        problem = _problem(event)
        if problem:
            span.set_status(self._failed(problem))
        span.end(end_time=now)


def _attributes(event: Event) -> dict[str, str | int | bool]:
    found: dict[str, str | int | bool | None] = {
        "holdfast.lock.name": event.name,
        "holdfast.lock.key": event.key,
        "holdfast.lock.kind": event.kind,
        "holdfast.lock.mode": event.mode,
        "holdfast.lock.label": event.label,
        "holdfast.lock.fence": event.fence,
        "holdfast.outcome": type(event).__name__.lower(),
    }
    if isinstance(event, Acquired | Abandoned):
        found["holdfast.tries"] = event.tries
    if isinstance(event, Abandoned) and event.holder is not None:
        found["holdfast.holder"] = str(event.holder)
    if isinstance(event, Acquired):
        found["holdfast.passed"] = event.passed
    return {name: value for name, value in found.items() if value not in (None, "")}


def _problem(event: Event) -> str:
    """Why the span has the status of an error; empty if it has not."""
    if isinstance(event, Lost):
        return event.reason
    if isinstance(event, Abandoned):
        return str(event.error) if event.error is not None else f"timed out after {event.waited:.3g} s"
    if isinstance(event, Released) and event.error is not None:
        return str(event.error)
    return ""
