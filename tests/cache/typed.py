"""What a type checker sees of the cache and its decorators. Read by mypy in test_typing.py, and never run."""

from __future__ import annotations

import asyncio
from typing import assert_type

import holdfast
import holdfast.aio
from holdfast.decorated import Skipped

client = holdfast.connect()


def load() -> dict[str, int]:
    return {}


assert_type(client.get_or_compute("k", load), dict[str, int])
assert_type(client.get_or_compute("k", lambda: 1), int)


@client.cached("user:{user_id}:{lang}", ttl=60)
def name(user_id: int, lang: str = "en", *, verbose: bool = False) -> str:
    return f"{user_id}{lang}{verbose}"


assert_type(name(1), str)
assert_type(name(user_id=1, lang="de", verbose=True), str)
assert_type(name.key(1), str)
assert_type(name.invalidate(1), bool)
name("1")  # type: ignore[arg-type]
name()  # type: ignore[call-arg]
name(1, loud=True)  # type: ignore[call-arg]


class Shop:
    @client.cached("price:{item}")
    def price(self, item: str) -> float:
        return len(item)

    @client.exclusive("restock:{item}", ttl=10)
    def restock(self, item: str) -> int:
        return len(item)


shop = Shop()
assert_type(shop.price("tea"), float)
assert_type(shop.price.key("tea"), str)
assert_type(shop.price.invalidate("tea"), bool)
assert_type(Shop.price(shop, "tea"), float)
assert_type(shop.restock("tea"), int)
shop.price(1)  # type: ignore[arg-type]
shop.restock(1)  # type: ignore[arg-type]


@client.exclusive("report:{user_id}", wait=1)
def report(user_id: int) -> str:
    return str(user_id)


@client.exclusive("report:{user_id}", busy="skip")
def report_or_skip(user_id: int) -> str:
    return str(user_id)


@client.exclusive("report:{user_id}", busy="skip", default=False)
def report_or_false(user_id: int) -> str:
    return str(user_id)


assert_type(report(1), str)
assert_type(report_or_skip(1), str | Skipped)
if (sent := report_or_skip(1)) is not holdfast.SKIPPED:
    assert_type(sent, str)
assert_type(report_or_false(1), str | bool)
report("1")  # type: ignore[arg-type]
client.exclusive("a", busy="later")  # type: ignore[call-overload]
client.exclusive("a", default=1)  # type: ignore[call-overload]
if (lease := holdfast.current_lease()) is not None:
    assert_type(lease.fence, int)

awaiting = holdfast.aio.connect()


async def load_soon() -> list[str]:
    return []


@awaiting.cached("user:{user_id}")
async def name_soon(user_id: int) -> str:
    return str(user_id)


@awaiting.cached("plain:{user_id}")
def plain(user_id: int) -> str:
    return str(user_id)


class Depot:
    @awaiting.cached("stock:{item}")
    async def stock(self, item: str) -> int:
        return len(item)

    @awaiting.exclusive("move:{item}")
    async def move(self, item: str) -> int:
        return len(item)


@awaiting.exclusive("report:{user_id}", on_lost="cancel")
async def report_soon(user_id: int) -> str:
    return str(user_id)


@awaiting.exclusive("report:{user_id}", busy="skip")
async def report_soon_or_skip(user_id: int) -> str:
    return str(user_id)


@awaiting.exclusive("report:{user_id}", busy="skip", default=0)
def report_plain_or_zero(user_id: int) -> str:
    return str(user_id)


async def main() -> None:
    assert_type(await awaiting.get_or_compute("k", load_soon), list[str])
    assert_type(await awaiting.get_or_compute("k", load), dict[str, int])
    assert_type(await name_soon(1), str)
    assert_type(await name_soon.invalidate(1), bool)
    assert_type(name_soon.key(1), str)
    assert_type(await plain(1), str)
    assert_type(await Depot().stock("tea"), int)
    assert_type(await Depot().stock.invalidate("tea"), bool)
    assert_type(await Depot().move("tea"), int)
    assert_type(await report_soon(1), str)
    assert_type(await report_soon_or_skip(1), str | Skipped)
    assert_type(await report_plain_or_zero(1), str | int)
    await asyncio.create_task(report_soon(1))
    await name_soon("1")  # type: ignore[arg-type]
    await report_soon("1")  # type: ignore[arg-type]
