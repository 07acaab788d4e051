"""Decorated functions keep their types; mypy is asked. And they still are what functions are: named, bound, pickled."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.aio

ROOT = Path(__file__).parents[2]
TYPED = ROOT / "tests" / "cache" / "typed.py"

nowhere = holdfast.connect("redis://127.0.0.1:1/0")
awaiting = holdfast.aio.connect("redis://127.0.0.1:1/0")


def test_a_type_checker_sees_through_the_decorators() -> None:
    """Each of its ignored errors must be one, too: --strict warns of an ignore that is not needed."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(TYPED)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TYPED.read_text().count("assert_type(") >= 20


class Shop:
    """What it sells costs as much as its name is long."""

    @nowhere.cached("price:{item}")
    def price(self, item: str = "tea") -> int:
        """Of one item."""
        return len(item)

    @awaiting.cached("stock:{item}")
    async def stock(self, item: str = "tea") -> int:
        return len(item)

    @classmethod
    @nowhere.cached("open:{day}")
    def is_open(cls, day: str) -> bool:
        return bool(day)

    @staticmethod
    @nowhere.cached("rate:{day}")
    def rate(day: str) -> int:
        return len(day)


@nowhere.cached("user:{user_id}")
def load(user_id: int) -> int:
    """Load a user."""
    return user_id


shop = Shop()


def test_a_method_knows_its_object_also_when_its_key_is_asked_for() -> None:
    """Else the item would be taken for self, and the default for the item: another price would be forgotten."""
    assert shop.price.key("coffee") == "price:coffee"
    assert Shop.price.key(shop, "coffee") == "price:coffee"
    assert shop.stock.key("coffee") == "stock:coffee"
    assert Shop.rate.key("monday") == "rate:monday"


def test_it_looks_like_the_function() -> None:
    assert load.__name__ == "load"
    assert load.__doc__ == "Load a user."
    assert list(inspect.signature(load).parameters) == ["user_id"]
    assert list(inspect.signature(Shop.price).parameters) == ["self", "item"]
    assert list(inspect.signature(shop.price).parameters) == ["item"]
    assert "load" in repr(load)
    assert inspect.iscoroutinefunction(Shop.stock.__call__)


@pytest.mark.parametrize("decorated", [load, Shop.price], ids=["function", "method"])
def test_it_is_pickled_by_its_name(decorated: Any) -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_a_method_is_pickled_with_its_object() -> None:
    assert pickle.loads(pickle.dumps(shop.price)).key("tea") == "price:tea"


def test_methods_of_all_kinds_are_cached(client: holdfast.Client) -> None:
    asked: list[Any] = []

    class Fruit:
        @client.cached("one:{item}")
        def one(self, item: str) -> str:
            asked.append(self)
            return item

        @classmethod
        @client.cached("two:{item}")
        def two(cls, item: str) -> str:
            asked.append(cls)
            return item

        @staticmethod
        @client.cached("three:{item}")
        def three(item: str) -> str:
            asked.append(item)
            return item

    fruit = Fruit()
    for _ in range(2):
        assert [fruit.one("plum"), fruit.two("plum"), Fruit.two("plum"), fruit.three("plum")] == ["plum"] * 4  # type: ignore[call-arg, arg-type]
    assert asked == [fruit, Fruit, "plum"]
    assert fruit.one.invalidate("plum")
    assert fruit.three.invalidate("plum")
    assert not fruit.one.invalidate("plum")
