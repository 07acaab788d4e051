"""The service of docs/web-service.md, under uvicorn, with a lock server that fails."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from tests.contention.support import Background
from tests.servers import Server, free_port
from tests.support import eventually

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "web-service.md"
SLOW = """

import asyncio


@app.post("/orders/{order}/ship")
async def ship(order: int, request: Request) -> dict[str, int]:
    async with request.app.state.locks.lock(f"order:{order}", ttl=2, wait=2):
        await asyncio.sleep(60)
    return {"order": order}


pay_at_once = charge


async def charge(order: int, fence: int | None) -> str:
    await asyncio.sleep(1.0 if order == 5 else 0.0)
    return await pay_at_once(order, fence)
"""


@pytest.fixture
def mortal() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def service(mortal: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    code = "\n".join(blocks_of(PAGE)).replace("redis://localhost:6379/0", mortal.url)
    with serve(code + SLOW, tmp_path) as client:
        yield client


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@contextmanager
def serve(code: str, directory: Path, path: str = "/orders/0/pay") -> Iterator[httpx.Client]:
    """The service that a program is, under uvicorn."""
    (directory / "shop.py").write_text(code)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port), "--app-dir", str(directory)]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
                eventually(lambda: _answers(client, path), 30.0, "the service is up")
                yield client
        finally:
            process.terminate()


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.post(path).status_code == 200
    except httpx.TransportError:
        return False


def test_an_order_that_is_worked_on_is_409_with_the_time_to_try_again(service: httpx.Client, mortal: Server) -> None:
    with holdfast.connect(mortal.url) as other, other.lock("order:1", ttl=30):
        answer = service.post("/orders/1/pay")
    assert answer.status_code == 409
    assert 20 <= int(answer.headers["Retry-After"]) <= 30
    assert service.post("/orders/1/pay").status_code == 200


def test_a_lock_server_that_is_down_is_503_at_once_until_it_is_back(service: httpx.Client, mortal: Server) -> None:
    mortal.kill()
    assert service.post("/orders/1/pay").status_code == 503
    eventually(lambda: _quickly(service) == 503, 10.0, "later requests fail at once")
    mortal.restart()
    eventually(lambda: service.post("/orders/1/pay").status_code == 200, 10.0, "it works again")


def test_a_payment_is_reported_although_the_server_dies_before_the_release(
    service: httpx.Client, mortal: Server
) -> None:
    paying = Background(lambda: service.post("/orders/5/pay"))
    with mortal.client() as admin:
        eventually(lambda: admin.exists("order:5") == 1, 10.0, "it works")
        mortal.kill()
    answer = paying.outcome()
    assert (answer.status_code, answer.json()) == (200, {"detail": "order 5 is paid"})


def test_a_thread_is_answered_in_the_same_way(service: httpx.Client, mortal: Server) -> None:
    assert service.post("/reports").json() == {"parts": 3}
    with holdfast.connect(mortal.url) as other, other.lock("reports"):
        assert service.post("/reports").status_code == 409
    mortal.kill()
    assert service.post("/reports").status_code == 503


def _quickly(service: httpx.Client) -> Any:
    began = time.monotonic()
    status = service.post("/orders/1/pay").status_code
    return status if time.monotonic() - began < 1.0 else None


def test_a_lock_server_that_swallows_everything_is_503_too(service: httpx.Client, mortal: Server) -> None:
    mortal.pause()
    try:
        assert service.post("/orders/1/pay").status_code == 503
        eventually(lambda: _quickly(service) == 503, 10.0, "later requests fail at once")
    finally:
        mortal.resume()
    eventually(lambda: service.post("/orders/1/pay").status_code == 200, 10.0, "it works again")


@pytest.mark.parametrize("fault", ["deleted", "killed"])
def test_a_handler_whose_lease_is_lost_is_cancelled(service: httpx.Client, mortal: Server, fault: str) -> None:
    shipping = Background(lambda: service.post("/orders/7/ship"))
    with mortal.client() as admin:
        eventually(lambda: admin.exists("order:7") == 1, 10.0, "it works")
        if fault == "deleted":
            admin.delete("order:7")
        else:
            mortal.kill()
    answer = shipping.outcome()
    assert answer.status_code == 500
    assert "interrupted" in answer.json()["detail"]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_short_form_answers_409_503_and_500(page: str, mortal: Server, tmp_path: Path) -> None:
    """The work of the README's handler is a comment; here it ends when its key is gone."""
    (code,) = (block for block in blocks_of(ROOT / page) if "FastAPI" in block)
    work = "        while day == 'bad':\n            await asyncio.sleep(0.1)\n        return"
    assert code.count("        return {") == 1
    code = "import asyncio\n" + code.replace("local://", mortal.url).replace("        return", work)
    with serve(code, tmp_path, "/reports/monday/refresh") as service, mortal.client() as admin:
        assert service.post("/reports/monday/refresh").json()["fence"] > 0
        with holdfast.connect(mortal.url) as other, other.lock("report:monday"):
            answer = service.post("/reports/monday/refresh")
        assert (answer.status_code, answer.json()) == (409, {"detail": "AcquireTimeout"})
        working = Background(lambda: service.post("/reports/bad/refresh"))
        eventually(lambda: admin.exists("report:bad") == 1, 10.0, "it works")
        admin.delete("report:bad")
        answer = working.outcome()
        assert (answer.status_code, answer.json()) == (500, {"detail": "LeaseLost"})
        mortal.kill()
        assert service.post("/reports/monday/refresh").status_code == 503
