"""The limit on the size of a reply, under asyncio."""

from __future__ import annotations

import pytest

import holdfast
import holdfast.aio
from holdfast.protocol.effects import StepFailed
from tests.engines.redis.test_aio_engine import LONG, echo, engine_of, failure_of, renew
from tests.engines.redis.test_long_replies import ENDLESS, HUGE_ARRAYS
from tests.proxy import Proxy, instead
from tests.support import Script, asyncio_test, took


@asyncio_test
async def test_a_reply_without_end_is_given_up_at_the_limit(proxy: Proxy) -> None:
    async with holdfast.aio.connect(proxy.url, timeout=30.0) as client:
        async with client.lock("x"):
            pass
        proxy.on("acquire", instead(ENDLESS), times=2)
        with took(less_than=15.0), pytest.raises(holdfast.Unavailable, match="a reply of more than 65 MiB"):
            await client.lock("x").acquire(blocking=False)
        async with client.lock("y", wait=0):  # over a new connection
            pass


@asyncio_test
async def test_an_endless_answer_to_hello_is_given_up(proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        proxy.on("hello", instead(ENDLESS))
        with took(less_than=15.0):
            failed = await failure_of(engine.submit(renew("k", "mine"), LONG))
        assert "a reply of more than 65 MiB" in str(failed.error)
        assert await engine.submit(renew("k", "mine"), LONG) == 0


@asyncio_test
async def test_a_handshake_without_end_is_given_up(proxy: Proxy) -> None:
    async with engine_of(proxy.url, timeout=30.0) as (engine, _):
        proxy.on("client", instead(ENDLESS[: 32 * 2**20]))  # CLIENT SETNAME, which redis-py sends
        with took(less_than=15.0), pytest.raises(StepFailed, match="InvalidResponse"):
            await engine.submit(echo("x"), LONG)
        assert await engine.submit(echo("x"), LONG) == b"x"


@pytest.mark.parametrize("data", HUGE_ARRAYS, ids=lambda data: repr(data[:24]))
def test_an_array_that_does_not_fit_into_memory(proxy: Proxy, data: bytes) -> None:
    program = f"""
        import asyncio, resource
        resource.setrlimit(resource.RLIMIT_AS, ({2 * 2**30}, {2 * 2**30}))
        async def main():
            async with holdfast.aio.connect(url, timeout=2.0) as client:
                async with client.lock("x"):
                    say("ready")
                    sys.stdin.readline()
                for name in "yz":
                    try:
                        async with client.lock(name, wait=0):
                            say("acquired")
                    except holdfast.Unavailable as error:
                        say(error)
        asyncio.run(main())
    """
    with Script(program, proxy.url) as script:
        script.hear("ready")
        proxy.on("acquire", instead(data), times=2)
        script.write("go\n")
        assert "it sent" in script.hear()
        script.hear("acquired")
        script.finish()
