"""Intents that another client of etcd wrote by hand, on a real cluster: others go on, and show plain text.

tests/security/test_crafted_values.py tries many more, on the lab's model of etcd.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import holdfast
from tests.etcd.test_inspection import put, run
from tests.fleet_etcd import EtcdFleet
from tests.security.crafted import SECRET, check_plain

TOKEN = "h%0A%1B[31m-" + "9" * 5000 + "-%C2%9B" + SECRET.decode()
KEYS = [
    b"k:hf1:intent:lock:x",
    b"k:hf1:intent:lock:\xff\x1b[31m",
    b"k:hf1:intent:semaphore:x",
    b"k:hf1:intent:rwlock:all:x",
    b"k:hf1:intent:latch:x",
    b"k:hf1:intent:\xff\x1b[31m:x",
]
VALUES = [
    json.dumps({"token": TOKEN}),
    json.dumps({"token": "\ud800", "names": ["\ud800", {}], "slot": "x", "fence": 10**4000, "at": -1}),
    "2 2",
]


@pytest.mark.parametrize("value", VALUES, ids=["token", "fields", "latch"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_clients_go_on_and_show_plain_text(fleet: EtcdFleet, connect: Any, key: bytes, value: str) -> None:
    put(fleet, key, value)
    for names in (["k"], ["k", "l"]):
        with pytest.raises(holdfast.HoldfastError) as caught:
            connect(fleet.url).lock(*names, wait=0).__enter__()
        check_plain(caught.value)
    with holdfast.connect(fleet.url) as client:
        with pytest.raises(holdfast.HoldfastError) as refused:
            client.latch("k", count=2).count_down()
        check_plain([refused.value, client.inspect("k"), list(client.locks("*"))])


def test_the_command_line_shows_plain_text(fleet: EtcdFleet) -> None:
    put(fleet, KEYS[0], VALUES[0])
    for words in (["who", "k"], ["who", "k", "--json"], ["ls"], ["ls", "--json"]):
        done = run(fleet, *words)
        assert done.returncode == 0, done.stderr
        assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr)
