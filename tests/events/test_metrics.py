"""Prometheus metrics, from a real client and as a server would scrape them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest

import holdfast
from holdfast.errors import Unavailable
from holdfast.events import Abandoned, Broken, Lost, PassedOn, RenewalFailed, Renewed
from holdfast.metrics import Prometheus
from tests.contention.support import Background
from tests.support import ROOT, eventually

COMMON: dict[str, Any] = {"name": "order:42", "kind": "lock"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, lock: str = "order", kind: str = "lock") -> float | None:
    return registry.get_sample_value(name, {"lock": lock, "kind": kind})


def test_grants_waits_and_holds_are_counted(connect: Any, url: str, registry: CollectorRegistry) -> None:
    face = connect(url, on_event=Prometheus(registry))
    first = face.lock("order:42").acquire()
    assert value(registry, "holdfast_held") == 1
    waiter = Background(face.lock("order:42", wait=20).acquire)
    eventually(lambda: value(registry, "holdfast_waiters") == 1)
    first.release()
    waiter.outcome().release()
    face.lock("order:43", wait=0).acquire().release()
    assert value(registry, "holdfast_grants_total") == 3
    assert value(registry, "holdfast_wait_seconds_count") == 3
    assert value(registry, "holdfast_hold_seconds_count") == 3
    assert value(registry, "holdfast_waiters") == 0
    assert value(registry, "holdfast_held") == 0


def test_names_do_not_become_labels(url: str, registry: CollectorRegistry) -> None:
    with holdfast.connect(url, on_event=Prometheus(registry)) as client:
        for number in range(20):
            with client.lock(f"order:{number}"):
                pass
    scraped = generate_latest(registry).decode()
    assert 'lock="order"' in scraped
    assert "order:" not in scraped


def test_metric_name_decides_what_a_lock_is_called(url: str, registry: CollectorRegistry) -> None:
    hook = Prometheus(registry, metric_name=lambda name: "all")
    with holdfast.connect(url, on_event=hook) as client, client.semaphore("jobs", permits=2):
        pass
    assert value(registry, "holdfast_grants_total", "all", "semaphore") == 1


def test_all_series_of_a_lock_exist_from_its_first_event_on(url: str, registry: CollectorRegistry) -> None:
    """Prometheus computes no increase for a counter that appears with the value 1, and nothing from a series that is
    missing, so each alert needs its series before anything goes wrong."""
    with holdfast.connect(url, on_event=Prometheus(registry)) as client, client.lock("order:42"):
        with holdfast.connect(url, on_event=Prometheus(other := CollectorRegistry())) as waiter:
            assert waiter.lock("order:42", wait=1.0).acquire() is None
        for scraped in (registry, other):
            asked = _words((ROOT / "docs/alerts.yml").read_text()) & {
                sample.name for metric in scraped.collect() for sample in metric.samples
            }
            assert {"holdfast_losses_total", "holdfast_grants_total", "holdfast_wait_seconds_count"} <= asked
            assert {f"holdfast_{name}_total" for name in ("timeouts", "broken", "acquire_failures")} <= asked
    assert value(registry, "holdfast_losses_total") == value(other, "holdfast_grants_total") == 0


def test_a_cancelled_wait_does_not_count_as_a_server_that_cannot_be_used(registry: CollectorRegistry) -> None:
    hook = Prometheus(registry)
    for error in (asyncio.CancelledError(), KeyboardInterrupt(), holdfast.WouldDeadlock("order:42")):
        hook(Abandoned(**COMMON, waited=1.0, tries=1, error=error))
    assert value(registry, "holdfast_cancelled_total") == 3
    assert value(registry, "holdfast_acquire_failures_total") == 0


def test_a_second_hook_on_one_registry_is_refused_with_advice(registry: CollectorRegistry) -> None:
    Prometheus(registry)
    with pytest.raises(holdfast.InvalidConfig, match="give it to all clients"):
        Prometheus(registry)


def test_what_goes_wrong_is_counted(registry: CollectorRegistry) -> None:
    hook = Prometheus(registry)
    down = Unavailable({"redis://h": "it did not answer"}, "Wait")
    for event in (
        Lost(**COMMON, held=1.0, reason="gone"),
        Abandoned(**COMMON, waited=5.0, tries=2),
        Abandoned(**COMMON, waited=5.0, tries=2, error=down),
        Renewed(**COMMON, remaining=9.0, validity=29.0, late=10.0, slow=True),
        RenewalFailed(**COMMON, remaining=9.0, tries=1, error=down),
        PassedOn(**COMMON, held=0.1),
        Broken(**COMMON, reason="stuck"),
    ):
        hook(event)
    counted = ("losses", "timeouts", "acquire_failures", "renewals", "failed_renewals", "local_passes", "broken")
    assert {name: value(registry, f"holdfast_{name}_total") for name in counted} == dict.fromkeys(counted, 1)
    assert value(registry, "holdfast_renewal_lag_seconds_sum") == 10.0


def test_a_lost_lease_is_not_held_any_more(
    connect: Any, url: str, registry: CollectorRegistry, admin: redis.Redis
) -> None:
    face = connect(url, on_event=Prometheus(registry))
    lease = face.lock("order:42", ttl=2).acquire()
    eventually(lambda: value(registry, "holdfast_renewals_total"))
    admin.delete("order:42")
    eventually(lambda: value(registry, "holdfast_losses_total"))
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert value(registry, "holdfast_held") == 0


def test_two_clients_may_share_one_hook(url: str, registry: CollectorRegistry) -> None:
    hook = Prometheus(registry)
    for _ in range(2):
        with holdfast.connect(url, on_event=hook) as client, client.lock("order:42"):
            pass
    assert value(registry, "holdfast_grants_total") == 2


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(holdfast.Unsupported, match=r"prometheus-client: run: pip install 'holdfast\[metrics\]', or"):
        Prometheus()


def test_a_metric_name_that_cannot_be_called_is_refused(registry: CollectorRegistry) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="metric_name="):
        Prometheus(registry, metric_name="order")  # type: ignore[arg-type]


@pytest.mark.parametrize("page", ["docs/grafana-dashboard.json", "docs/alerts.yml", "docs/monitoring.md"])
def test_dashboard_alerts_and_page_ask_for_metrics_that_exist(page: str, registry: CollectorRegistry) -> None:
    Prometheus(registry)
    known = {metric.name for metric in registry.collect()}
    asked = {word for word in _words((ROOT / page).read_text()) if word.startswith("holdfast_")}
    assert asked
    for word in asked:
        for end in ("_total", "_bucket", "_count", "_sum"):
            word = word.removesuffix(end)  # noqa: PLW2901
        assert word in known, f"{page} asks for {word}"


def test_the_dashboard_is_json_with_a_panel_for_each_question() -> None:
    dashboard = json.loads(Path(ROOT / "docs/grafana-dashboard.json").read_text())
    assert len(dashboard["panels"]) >= 6
    assert all(panel["targets"] for panel in dashboard["panels"])


def _words(text: str) -> set[str]:
    for mark in "(){}[]\"'`,=/ \n|:":
        text = text.replace(mark, " ")
    return set(text.split())
