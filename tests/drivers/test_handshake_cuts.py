"""Connections that are cut while they are being set up: what a client gives up for that, and when it has it back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy import LOSE_REQUEST, Proxy
from tests.support import eventually, later


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_waiter_whose_subscription_was_cut_subscribes_later(connect: Any, proxy: Proxy, cuts: int) -> None:
    holder, waiter = connect(proxy.url), connect(proxy.url)
    lease = holder.lock("x").acquire()
    proxy.on("subscribe", LOSE_REQUEST, times=cuts)
    with later(0.0, _wait_for, waiter):
        proxy.await_request("subscribe")
        try:
            eventually(lambda: waiter.client._driver.board.armed, timeout=8.0, what="it subscribes again")
            assert proxy.seen("subscribe") == cuts + 1
        finally:
            lease.release()


def _wait_for(face: Any) -> None:
    with face.lock("x", wait=20.0):
        pass
