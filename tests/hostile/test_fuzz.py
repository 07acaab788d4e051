"""The fuzz of replies with a fixed seed, and that it finds what it looks for."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import redis

from holdfast.protocol import replies
from tests.hostile import fuzz
from tests.hostile.faces import FACES, BlockingFace, run_blocking
from tests.hostile.fuzz import Fuzz, Late, Run
from tests.hostile.garble import KINDS, Garbler, frames_of
from tests.hostile.proxy import Proxy
from tests.servers import Server

RUNS = 100
FEW_RUNS = 15


@pytest.mark.long
@pytest.mark.parametrize("face", FACES)
def test_a_garbled_reply_does_no_lasting_harm(face: str) -> None:
    findings = Fuzz(face, 1, range(RUNS)).run()
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("face", FACES)
def test_a_garbled_reply_does_no_lasting_harm_in_a_few_runs(face: str) -> None:
    findings = Fuzz(face, 2, range(FEW_RUNS)).run()
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("face", FACES)
def test_a_parser_that_raises_what_is_not_ours_is_found(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(reply: Any) -> Any:
        return replies.Granted(int(reply))  # of anything but digits: ValueError or TypeError

    monkeypatch.setitem(replies.REPLIES, "acquire", parse)
    findings = Fuzz(face, 1, range(24)).run()
    assert any("foreign exception" in finding and "--first" in finding for finding in findings), findings


def test_a_lease_without_its_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replies.REPLIES, "acquire", lambda reply: replies.Granted(1))
    monkeypatch.setitem(replies.REPLIES, "renew", lambda reply: replies.DONE)  # whatever the server says
    findings = Fuzz("blocking", 1, range(48)).run()
    assert any("says held, and its key is not there" in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("limit", "value", "found"),
    [
        ("MOST_REQUESTS", 1, ["requests in one run"]),
        ("MOST_IDLE_CPU", -1.0, ["while open clients are idle", "while all clients are closed"]),
    ],
)
def test_every_limit_is_looked_at(limit: str, value: float, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, limit, value)
    findings = Fuzz("blocking", 1, range(3)).run()
    assert all(any(text in finding for finding in findings) for text in found), findings


@pytest.mark.parametrize("face", FACES)
def test_an_open_client_that_spins_without_requests_is_found(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recover, closing, closed = Run._recover, Run._closing, threading.Event()

    def spin() -> None:
        while not closed.is_set():
            pass

    async def recover_and_spin(run: Run) -> None:
        await recover(run)
        closed.clear()
        threading.Thread(target=spin).start()

    def stop_spinning(run: Run) -> Any:
        closed.set()
        return closing(run)

    monkeypatch.setattr(Run, "_recover", recover_and_spin)
    monkeypatch.setattr(Run, "_closing", stop_spinning)
    monkeypatch.setattr(fuzz, "LANES", 1)
    monkeypatch.setattr(fuzz, "MOST_IDLE_CPU", 0.03)  # the test may get a small part of a core
    findings = Fuzz(face, 1, range(1)).run()
    assert any("while open clients are idle" in finding for finding in findings), findings


def test_a_call_that_takes_too_long_is_found(
    server: Server, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "SLACK", 0.0)
    face, proxy = BlockingFace(), Proxy(server.port)
    with pytest.raises(Late, match="a call took"):
        run_blocking(Run(face, proxy, admin, 1, 1)._bounded(0.01, partial(face.sleep, 0.05)))
    proxy.close()


def test_a_client_that_does_not_recover_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "RECOVERY", 0.1)
    monkeypatch.setitem(replies.REPLIES, "acquire", _refuse)
    findings = Fuzz("blocking", 1, range(3)).run()
    assert any("of the server being honest" in finding for finding in findings), findings


def _refuse(reply: object) -> Any:
    raise replies.Malformed


def test_a_seed_decides_what_is_garbled() -> None:
    frames = [b"$3\r\nabc\r\n"] * 200
    assert [*map(Garbler(1, rate=0.5), frames)] == [*map(Garbler(1, rate=0.5), frames)]
    assert [*map(Garbler(1, rate=0.5), frames)] != [*map(Garbler(2, rate=0.5), frames)]


def test_every_kind_of_garbling_is_done() -> None:
    garbler = Garbler(1, rate=1.0)
    for _ in range(1000):
        garbler(b"$3\r\nabc\r\n")
    assert set(garbler.done) == {kind.__name__ for kind in KINDS} | {"swap"}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_frames_are_found_in_whatever_pieces_they_come(size: int) -> None:
    frames = [
        b"+OK\r\n",
        b"$3\r\na\r\n\r\n",
        b"*2\r\n:1\r\n*1\r\n$-1\r\n",
        b"%1\r\n$1\r\nk\r\n_\r\n",
        b">2\r\n+x\r\n,1.5\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"$0\r\n\r\n",
    ]
    stream, buffer, found = b"".join(frames), bytearray(), []
    for start in range(0, len(stream), size):
        buffer += stream[start : start + size]
        found += frames_of(buffer)
    assert found == frames
