"""A URL of any engine takes the options of ``connect``: the namespace is in front of every name on the server."""

from __future__ import annotations

from typing import Any


def test_a_namespace_in_the_url_is_in_front_of_every_name(connect: Any, url: str) -> None:
    shop = connect(f"{url}{'&' if '?' in url else '?'}namespace=shop%3A&timeout=4")
    plain = connect(url)
    with shop.lock("x"):
        assert plain.lock("shop:x").acquire(blocking=False) is None
        with plain.lock("x", wait=0):
            assert shop.lock("x").locked()
    with plain.lock("shop:x", wait=0):
        assert shop.lock("x").acquire(blocking=False) is None
