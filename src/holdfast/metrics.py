"""Prometheus metrics of locks, made from events. Needs ``pip install 'holdfast[metrics]'``.

    client = holdfast.connect(url, on_event=holdfast.metrics.Prometheus())

Every metric has the labels ``lock`` and ``kind``. A program can have very many names, and a time series for each would
overload a Prometheus server, so ``lock`` is what ``metric_name`` makes of a name: by default the text before the first
``:``, which is ``order`` for ``order:42``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import InvalidConfig, Unsupported
from holdfast.events import (
    Abandoned,
    Acquired,
    Broken,
    Event,
    Lost,
    PassedOn,
    Released,
    RenewalFailed,
    Renewed,
    Waiting,
)

__all__ = ["Prometheus", "text_before_colon"]

SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
LAG: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def text_before_colon(name: str) -> str:
    """``order`` for ``order:42``."""
    return name.partition(":")[0]


class Prometheus:
    """A hook for ``on_event`` that counts in a registry of prometheus-client. Several clients may share one."""

    def __init__(self, registry: Any = None, *, metric_name: Callable[[str], str] = text_before_colon) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise Unsupported("holdfast.metrics", "install it with: pip install 'holdfast[metrics]'") from None
        if not callable(metric_name):
            raise InvalidConfig(f"metric_name={metric_name!r:.60}", "give a function of a lock's name")
        self._metric_name = metric_name
        registry = prometheus.REGISTRY if registry is None else registry
        use: dict[str, Any] = {"registry": registry, "labelnames": ("lock", "kind")}

        def counter(name: str, text: str) -> Any:
            return prometheus.Counter(f"holdfast_{name}", text, **use)

        self._waits = prometheus.Histogram(
            "holdfast_wait_seconds", "Time from the call of acquire until the lock is held", buckets=SECONDS, **use
        )
        self._holds = prometheus.Histogram(
            "holdfast_hold_seconds", "Time for which a lock was held", buckets=SECONDS, **use
        )
        self._lag = prometheus.Histogram(
            "holdfast_renewal_lag_seconds", "How late a lease was renewed: after a third of its ttl", buckets=LAG, **use
        )
        self._waiting = prometheus.Gauge("holdfast_waiters", "Callers of this process that wait for a lock", **use)
        self._held = prometheus.Gauge("holdfast_held", "Locks that this process holds", **use)
        self._grants = counter("grants", "Locks acquired")
        self._passes = counter("local_passes", "Locks passed on within this process")
        self._losses = counter("losses", "Leases lost by their holder")
        self._timeouts = counter("timeouts", "Waits that ended because another holder had the lock")
        self._failures = counter("acquire_failures", "Acquires that ended because the server could not be used")
        self._renewals = counter("renewals", "Renewals answered by the server")
        self._failed_renewals = counter("failed_renewals", "Renewals not answered, or answered with an error")
        self._broken = counter("broken", "Holds of other holders that this process broke")

    def __call__(self, event: Event) -> None:
        labels = self._metric_name(event.name), event.kind
        if isinstance(event, Waiting):
            if not event.waited:
                self._waiting.labels(*labels).inc()
        elif isinstance(event, Acquired):
            self._waits.labels(*labels).observe(event.waited)
            self._grants.labels(*labels).inc()
            self._held.labels(*labels).inc()
            if event.queued:
                self._waiting.labels(*labels).dec()
        elif isinstance(event, Released | PassedOn | Lost):
            self._holds.labels(*labels).observe(event.held)
            self._held.labels(*labels).dec()
            if isinstance(event, PassedOn):
                self._passes.labels(*labels).inc()
            elif isinstance(event, Lost):
                self._losses.labels(*labels).inc()
        elif isinstance(event, Abandoned):
            (self._timeouts if event.error is None else self._failures).labels(*labels).inc()
            if event.queued:
                self._waiting.labels(*labels).dec()
        elif isinstance(event, Renewed):
            self._renewals.labels(*labels).inc()
            self._lag.labels(*labels).observe(event.late)
        elif isinstance(event, RenewalFailed):
            self._failed_renewals.labels(*labels).inc()
        elif isinstance(event, Broken):
            self._broken.labels(*labels).inc()
