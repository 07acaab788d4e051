"""Ctrl-C may come at any moment: no caller waits for a leader that has left, and no claim is renewed for ever."""

from __future__ import annotations

import pytest
import redis

from tests.servers import Server
from tests.support import Script

# SIGINT after each single line of the library's cache in turn, in the main thread, with another thread waiting for the
# same value. A claim without a computation ends by its ttl.
LINE_BY_LINE = """
import threading
from pathlib import Path
client = holdfast.connect(url)
client.get_or_compute("warm", lambda: 1)
ours = {"lookup.py", "singleflight.py", "computation.py", "entry.py", "blocking.py"}
countdown = 0

def trace(frame, event, argument):
    path = Path(frame.f_code.co_filename)
    if "holdfast" not in path.parts or path.name not in ours:
        return None
    return strike

def strike(frame, event, argument):
    global countdown
    if event == "line":
        countdown -= 1
        if countdown == 0:
            signal.raise_signal(signal.SIGINT)
    return strike

at = interrupted = 0
while True:
    at += 1
    client.invalidate("k")
    found = []
    began = threading.Event()
    def compute():
        began.set()
        time.sleep(0.002)
        return "value"
    follower = threading.Thread(target=lambda: found.append(client.get_or_compute("k", compute, compute_ttl=0.2)))
    countdown = at
    sys.settrace(trace)
    try:
        follower.start()
        client.get_or_compute("k", compute, compute_ttl=0.2)
        ended = True
    except KeyboardInterrupt:
        ended = False
        interrupted += 1
    finally:
        sys.settrace(None)
    follower.join(5)
    if follower.is_alive() or found != ["value"]:
        say("lost at", at, found)
        break
    if client.get_or_compute("k", lambda: "other", wait=2) not in ("value", "other"):
        say("wrong at", at)
        break
    left = client.statistics()
    if left.cache_callers or left.holds:
        say("left at", at, left)
        break
    if ended and at > 50:
        break
say(interrupted > 100)
client.close()
"""


@pytest.mark.long
def test_an_interrupt_after_any_line_leaves_nobody_waiting(server: Server, admin: redis.Redis) -> None:
    with Script(LINE_BY_LINE, server.url) as script:
        script.hear("True", timeout=90)
        script.finish(quiet=False)
    assert {key for key in admin.keys("*") if b"claim" in key} == set()
