"""OpenTelemetry spans, from a real client."""

from __future__ import annotations

import asyncio
import sys

import pytest
import redis
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import holdfast
import holdfast.aio
from holdfast.otel import Spans
from tests.support import eventually


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def spans(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_wait_and_hold_are_children_of_the_callers_span(
    url: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    with holdfast.connect(url, on_event=Spans(provider)) as client:
        with provider.get_tracer("app").start_as_current_span("request") as request:
            with client.lock("order:42", label="nightly") as lease:
                fence = lease.fence
    [wait], [hold] = spans(exporter, "holdfast wait"), spans(exporter, "holdfast hold")
    for span in (wait, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.attributes is not None
        assert span.attributes["holdfast.lock.name"] == span.attributes["holdfast.lock.key"] == "order:42"
        assert span.attributes["holdfast.lock.label"] == "nightly"
        assert span.attributes["holdfast.lock.fence"] == fence
        assert span.status.status_code is StatusCode.UNSET
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_the_spans_of_a_task_have_its_parent(
    url: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracer = provider.get_tracer("app")

    async def request(client: holdfast.aio.Client, name: str) -> int:
        with tracer.start_as_current_span(name) as span:
            async with client.lock(name):
                await asyncio.sleep(0.01)
        return span.get_span_context().span_id

    async def main() -> tuple[int, int]:
        async with holdfast.aio.connect(url, on_event=Spans(provider)) as client:
            return await asyncio.gather(request(client, "a"), request(client, "b"))

    made = dict(zip("ab", asyncio.run(main()), strict=True))
    for span in spans(exporter, "holdfast hold"):
        assert span.parent is not None
        assert span.attributes is not None
        assert span.parent.span_id == made[str(span.attributes["holdfast.lock.name"])]


def test_a_timeout_is_an_error_that_names_the_holder(
    url: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    with holdfast.connect(url) as other, holdfast.connect(url, on_event=Spans(provider)) as client:
        with other.lock("x", label="long job"):
            assert client.lock("x", wait=1.0).acquire() is None
    [wait] = spans(exporter, "holdfast wait")
    assert wait.status.status_code is StatusCode.ERROR
    assert wait.attributes is not None
    assert "long job" in str(wait.attributes["holdfast.holder"])


def test_a_loss_is_an_error_of_the_hold(
    url: str, provider: TracerProvider, exporter: InMemorySpanExporter, admin: redis.Redis
) -> None:
    with holdfast.connect(url, on_event=Spans(provider)) as client:
        lease = client.lock("x", ttl=2).acquire()
        eventually(lambda: client.statistics().renewals)
        admin.delete("x")
        eventually(lambda: spans(exporter, "holdfast hold"))
        with pytest.raises(holdfast.LeaseLost):
            lease.release()
    [hold] = spans(exporter, "holdfast hold")
    assert hold.status.description == "its key expired or was deleted"


def test_a_hold_belongs_to_the_span_in_which_it_was_acquired(
    url: str, provider: TracerProvider, exporter: InMemorySpanExporter, admin: redis.Redis
) -> None:
    """Also if it is lost, which the keeper finds: its task began in the span of the first request."""
    tracer = provider.get_tracer("app")

    async def main() -> tuple[int, int]:
        async with holdfast.aio.connect(url, on_event=Spans(provider)) as client:
            with tracer.start_as_current_span("first"):
                async with client.lock("a"):
                    pass
            with tracer.start_as_current_span("second") as second:
                lost = await client.lock("lost", ttl=2, on_lost="ignore").acquire()
            with tracer.start_as_current_span("third") as third:
                kept = await client.lock("kept").acquire()
            with tracer.start_as_current_span("fourth"):
                await kept.release()
            while not client.statistics().renewals:
                await asyncio.sleep(0.01)
            admin.delete("lost")
            assert await lost.lost.wait(10)
            return second.get_span_context().span_id, third.get_span_context().span_id

    second, third = asyncio.run(main())
    parents = {
        span.attributes["holdfast.lock.name"]: span.parent and span.parent.span_id
        for span in spans(exporter, "holdfast hold")
        if span.attributes is not None
    }
    assert (parents["lost"], parents["kept"]) == (second, third)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(holdfast.Unsupported, match=r"opentelemetry-api: run: pip install 'holdfast\[otel\]', or"):
        Spans()
