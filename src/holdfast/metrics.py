"""Prometheus metrics of locks, made from events. Needs ``pip install 'holdfast[metrics]'``.

    client = holdfast.connect(url, on_event=holdfast.metrics.Prometheus())

Every metric has the labels ``lock`` and ``kind``. A program can have very many names, and a time series for each would
overload a Prometheus server, so ``lock`` is what ``metric_name`` makes of a name: by default the text before the first
``:``, which is ``order`` for ``order:42``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from holdfast.errors import InvalidConfig, Unavailable, Unsupported, how_to_install
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

# Each name begins with "holdfast_", and that of a counter ends with "_total".
_HISTOGRAMS: Final = {
    "wait_seconds": ("Time from the call of acquire until the lock is held", SECONDS),
    "hold_seconds": ("Time for which a lock was held", SECONDS),
    "renewal_lag_seconds": ("How late a lease was renewed: after a third of its ttl", LAG),
}
_GAUGES: Final = {
    "waiters": "Callers of this process that wait for a lock",
    "held": "Locks that this process holds",
}
_COUNTERS: Final = {
    "grants": "Locks acquired",
    "local_passes": "Locks passed on within this process",
    "losses": "Leases lost by their holder",
    "timeouts": "Waits that ended because another holder had the lock",
    "acquire_failures": "Acquires that ended because the server could not be used",
    "cancelled": "Acquires that were cancelled or interrupted, or refused as a deadlock",
    "renewals": "Renewals answered by the server",
    "failed_renewals": "Renewals not answered, or answered with an error",
    "broken": "Holds of other holders that this process broke",
}


def text_before_colon(name: str) -> str:
    """``order`` for ``order:42``."""
    return name.partition(":")[0]


class Prometheus:
    """A hook for ``on_event`` that counts in a registry of prometheus-client. Several clients may share one."""

    def __init__(self, registry: Any = None, *, metric_name: Callable[[str], str] = text_before_colon) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise Unsupported(
                "holdfast.metrics without prometheus-client", f"run: {how_to_install('metrics')}"
            ) from None
        if not callable(metric_name):
            raise InvalidConfig(f"metric_name={metric_name!r:.60}", "give a function of a lock's name")
        self._metric_name = metric_name
        self._series: dict[tuple[str, str], Any] = {}  # by labels: an object with a time series for each metric
        use: dict[str, Any] = {
            "registry": prometheus.REGISTRY if registry is None else registry,
            "labelnames": ("lock", "kind"),
        }
        try:
            self._metrics = {
                **{
                    name: prometheus.Histogram(f"holdfast_{name}", text, buckets=buckets, **use)
                    for name, (text, buckets) in _HISTOGRAMS.items()
                },
                **{name: prometheus.Gauge(f"holdfast_{name}", text, **use) for name, text in _GAUGES.items()},
                **{name: prometheus.Counter(f"holdfast_{name}", text, **use) for name, text in _COUNTERS.items()},
            }
        except ValueError:
            problem = "it has these metrics already. Make one Prometheus(), and give it to all clients"
            raise InvalidConfig(f"registry={registry!r:.60}", problem) from None

    def __call__(self, event: Event) -> None:
        labels = self._metric_name(event.name), event.kind
        series = self._series.get(labels)
        if series is None:
            # All of them, with the value 0: the rate of a counter that appears with the value 1 is 0, so an alert would
            # miss the first loss.
            made = {name: metric.labels(*labels) for name, metric in self._metrics.items()}
            series = self._series[labels] = SimpleNamespace(**made)
        if isinstance(event, Waiting):
            if not event.waited:
                series.waiters.inc()
        elif isinstance(event, Acquired):
            series.wait_seconds.observe(event.waited)
            series.grants.inc()
            series.held.inc()
            if event.queued:
                series.waiters.dec()
        elif isinstance(event, Released | PassedOn | Lost):
            series.hold_seconds.observe(event.held)
            series.held.dec()
            if isinstance(event, PassedOn):
                series.local_passes.inc()
            elif isinstance(event, Lost):
                series.losses.inc()
        elif isinstance(event, Abandoned):
            if event.queued:
                series.waiters.dec()
            if event.error is None:
                series.timeouts.inc()
            elif isinstance(event.error, Unavailable):
                series.acquire_failures.inc()
            else:
                series.cancelled.inc()
        elif isinstance(event, Renewed):
            series.renewals.inc()
            series.renewal_lag_seconds.observe(event.late)
        elif isinstance(event, RenewalFailed):
            series.failed_renewals.inc()
        elif isinstance(event, Broken):
            series.broken.inc()
