"""A task may be cancelled at any await: no key outlives it, nothing leaks, and the cancellation surfaces."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.effects import Command
from tests.proxy import HOLD, Proxy, delay
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, connections_of, lock_keys, took

STEPS = range(41)


async def hold_briefly(client: holdfast.aio.Client, name: str, steps: int = 3) -> None:
    async with client.lock(name):
        for _ in range(steps):
            await asyncio.sleep(0)


async def acquire_and_release(client: holdfast.aio.Client, name: str) -> None:
    lock = client.lock(name)
    lease = await lock.acquire()
    assert lease
    try:
        await asyncio.sleep(0)
    finally:
        await lock.release()


async def no_key_is_left(admin: redis.Redis, besides: list[str] | None = None) -> None:
    await async_eventually(lambda: lock_keys(admin) == (besides or []), what="no key outlives its task")


async def cancel_after(steps: int, work: Awaitable[None], pause: float) -> str:
    """Cancel it after so many turns of the loop; "done", or "cancelled" if it was not done by then."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        if pause:
            time.sleep(pause)  # so that a reply of the server can have arrived by the next turn
        await asyncio.sleep(0)
    if task.done():
        await task
        return "done"
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return "cancelled"


@pytest.mark.long
@pytest.mark.parametrize("work", [hold_briefly, acquire_and_release])
@pytest.mark.parametrize("pause", [0, 0.0004], ids=["before replies", "among replies"])
@pytest.mark.parametrize("fresh", [True, False], ids=["first contact", "met before"])
@asyncio_test
async def test_cancelled_after_any_number_of_steps_leaves_nothing(
    server: Server, admin: redis.Redis, work: Callable[..., Awaitable[None]], pause: float, fresh: bool
) -> None:
    before = connections_of(admin)
    outcomes: Counter[str] = Counter()
    if fresh:
        for steps in STEPS:
            async with holdfast.aio.connect(server.url) as client:
                outcomes[await cancel_after(steps, work(client, "x"), pause)] += 1
                await no_key_is_left(admin)
    else:
        async with holdfast.aio.connect(server.url) as client:
            await work(client, "warm")
            for steps in STEPS:
                outcomes[await cancel_after(steps, work(client, "x"), pause)] += 1
                await no_key_is_left(admin)
            while pause and outcomes["done"] < 3:  # a busy machine needs more turns
                steps += 40
                outcomes[await cancel_after(steps, work(client, "x"), pause)] += 1
                assert steps < 40_000, outcomes
            # It must still be of use, at once, to whoever comes next.
            lease = await client.lock("x").acquire(blocking=False)
            assert lease
            await lease.release()
    assert outcomes["cancelled"] >= 3, outcomes
    await async_eventually(lambda: connections_of(admin) <= before, what="all connections are closed")


@pytest.mark.long
@asyncio_test
async def test_cancelled_while_waiting_for_another_holder_after_any_number_of_steps(
    server: Server, admin: redis.Redis
) -> None:
    async with holdfast.aio.connect(server.url) as holder, holdfast.aio.connect(server.url) as client:
        await hold_briefly(client, "warm")
        async with holder.lock("x") as lease:
            for steps in STEPS:
                assert await cancel_after(steps, hold_briefly(client, "x"), 0.0005) == "cancelled"
                assert admin.get("x") == lease.token.encode()
        await no_key_is_left(admin)


@asyncio_test
async def test_cancelled_while_another_task_has_the_same_lock_object(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        lock = client.lock("x")
        lease = await lock.acquire()
        assert lease
        for steps in range(8):
            assert await cancel_after(steps, lock.acquire(), 0) == "cancelled"  # type: ignore[arg-type]
        await lease.release()
        again = await lock.acquire(timeout=5)
        assert again, "a cancelled waiter must not leave the object locked"
        await again.release()
        await no_key_is_left(admin)


@pytest.mark.long
@asyncio_test
async def test_a_thousand_cancellations_at_random_leave_no_orphan(server: Server, admin: redis.Redis) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    before = connections_of(admin)
    ended: Counter[str] = Counter()

    async def run_client(client: holdfast.aio.Client, name: str) -> None:
        while True:
            async with client.lock(name, ttl=30):
                await asyncio.sleep(dice.choice([0, 0, 0.0003]))

    async def kill(task: asyncio.Task[None]) -> None:
        await asyncio.sleep(dice.uniform(0, 0.02))
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        for _ in range(dice.choice([1, 1, 1, 2, 3])):  # the impatient press more than once
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        ended["cancelled"] += 1

    async def by_timeout(client: holdfast.aio.Client, name: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(dice.uniform(0, 0.02)):
                await run_client(client, name)
        ended["timeout"] += 1

    async def by_group(client: holdfast.aio.Client, name: str) -> None:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(run_client(client, name))
                await asyncio.sleep(dice.uniform(0, 0.02))
                raise LookupError("a sibling fails")
        ended["group"] += 1

    async with holdfast.aio.connect(server.url) as client:
        for _ in range(25):
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    name = f"x{dice.randrange(8)}"
                    if number % 4 == 0:
                        group.create_task(by_timeout(client, name))
                    elif number % 4 == 1:
                        group.create_task(by_group(client, name))
                    else:
                        group.create_task(kill(asyncio.create_task(run_client(client, name))))
            await no_key_is_left(admin)
        assert sum(ended.values()) == 1000
        assert len(asyncio.all_tasks()) <= 3, "this one, the keeper, and nobody else"
        for number in range(8):
            lease = await client.lock(f"x{number}").acquire(blocking=False)
            assert lease, f"seed {seed}"
            await lease.release()
    await async_eventually(lambda: connections_of(admin) <= before, what="all connections are closed")


@asyncio_test
async def test_cancelled_in_the_body_releases(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        inside = asyncio.Event()

        async def work() -> None:
            async with client.lock("x"):
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel("by the test")
        with pytest.raises(asyncio.CancelledError, match="by the test"):
            await task
        assert lock_keys(admin) == []


@pytest.mark.parametrize("step", ["acquire", "release"])
@asyncio_test
async def test_cancelled_while_the_reply_is_under_way(proxy: Proxy, admin: redis.Redis, step: str) -> None:
    async with holdfast.aio.connect(proxy.url) as client:
        await hold_briefly(client, "warm")
        proxy.on(step, delay(0.6))
        count = proxy.seen(step)
        task = asyncio.create_task(hold_briefly(client, "x"))
        await async_eventually(lambda: proxy.seen(step) > count)
        with took(less_than=5.0):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await no_key_is_left(admin)
        await hold_briefly(client, "x")  # the connection must still be in step
        await no_key_is_left(admin)


@asyncio_test
async def test_cancelled_acquire_that_arrives_later_leaves_no_key(proxy: Proxy, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(proxy.url) as client:
        await hold_briefly(client, "warm")
        proxy.on("acquire", HOLD)
        task = asyncio.create_task(hold_briefly(client, "x"))
        await asyncio.to_thread(proxy.await_held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await async_eventually(lambda: list(admin.scan_iter("x:hf1:gone:*")), what="the attempt is buried")
        await asyncio.to_thread(proxy.deliver)
        assert lock_keys(admin) == []


@asyncio_test
async def test_cancelled_on_a_hung_server_is_cleaned_up_by_the_keeper(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        await hold_briefly(client, "warm")
        server.pause()
        task = asyncio.create_task(hold_briefly(client, "x"))
        await asyncio.sleep(0.05)
        with took(less_than=5.0):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        server.resume()
        await async_eventually(lambda: list(admin.scan_iter("x:hf1:gone:*")), what="the attempt is buried")
        await no_key_is_left(admin)


@asyncio_test
async def test_timeout_in_the_body_surfaces_and_releases(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        await hold_briefly(client, "warm")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                async with client.lock("x"):
                    await asyncio.sleep(60)
        assert lock_keys(admin) == []
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@asyncio_test
async def test_failing_sibling_in_a_task_group_frees_the_lock(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                inside = asyncio.Event()

                async def work() -> None:
                    async with client.lock("x"):
                        inside.set()
                        await asyncio.sleep(60)

                group.create_task(work())
                await inside.wait()
                raise LookupError("a sibling fails")
        assert [type(error) for error in caught.value.exceptions] == [LookupError]
        assert lock_keys(admin) == []


def test_ctrl_c_under_asyncio_run_frees_the_lock(server: Server, admin: redis.Redis) -> None:
    code = """
    import asyncio
    async def main():
        async with holdfast.aio.connect(url) as client:
            async with client.lock("x"):
                say("held")
                await asyncio.sleep(60)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        say("interrupted")
    """
    with Script(code, server.url) as script:
        script.hear("held")
        script.send(signal.SIGINT)
        script.hear("interrupted")
        assert lock_keys(admin) == []
        script.finish()


@asyncio_test
async def test_replies_of_a_cancelled_batch_may_fail_later(server: Server) -> None:
    """Cancelled while it waits for several replies, whose connection is then lost: asyncio has nothing to log."""
    said: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    async with holdfast.aio.connect(server.url) as client:
        async with client.lock("warm"):
            pass
        engine = client._driver.engine
        server.pause()
        try:
            task = asyncio.create_task(engine.call_each([Command(("PING",))] * 3, 1.0))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.shared is not None
            engine.shared.abort(ConnectionResetError())
            await asyncio.sleep(0.05)
            del task
            gc.collect()
        finally:
            server.resume()
    assert said == []


@asyncio_test
async def test_a_keeper_that_was_cancelled_is_replaced(server: Server) -> None:
    """Clean-up code that cancels all tasks is common."""
    async with holdfast.aio.connect(server.url) as client:
        async with client.lock("first"):
            pass
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        async with client.lock("x", ttl=2.5) as lease:
            await asyncio.sleep(3.0)
            assert lease.held


@asyncio_test
async def test_somebody_elses_cancellation_on_the_way_out_goes_on(server: Server, admin: redis.Redis) -> None:
    """The lease is lost, and in the very turn in which the body's end meets that, the task is cancelled by another."""
    async with holdfast.aio.connect(server.url) as client:

        async def work() -> str:
            try:
                async with client.lock("x", ttl=30) as lease:
                    block = lease._hold.notify
                    assert block is not None
                    block()  # as the keeper does it on loss
                    loop.call_soon(task.cancel)
            except holdfast.LeaseLost:
                pass
            await asyncio.sleep(0)
            return "went on"

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())
        with pytest.raises(asyncio.CancelledError):
            await task
    assert admin.exists("x") == 0
