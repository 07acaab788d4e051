"""Durations as timedeltas, on what only Redis has. ``tests/conformance/test_wait.py`` has the others."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import holdfast


def test_durations_of_the_other_objects_may_be_timedeltas(url: str, tmp_path: Path) -> None:
    second = timedelta(seconds=1)
    with holdfast.connect(url) as client:
        latch = client.latch("gate", 1, retention=60 * second)
        assert not latch.wait(timedelta(milliseconds=10))
        fetched = client.get_or_compute("price", lambda: 7, 60 * second, stale=second, errors=second, wait=second)
        assert fetched == 7
        assert client.cached("page:{n}", ttl=second, compute_ttl=second, max_compute=second)(lambda n: n)(3) == 3
        exclusive = client.exclusive("report", wait=second)(lambda: "done")
        assert exclusive() == "done"
        with client.lock("file") as lease:
            holdfast.guard.replace_file(tmp_path / "report", b"done", lease, wait=second)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", holdfast.UnsafeRecipeWarning)
            recipe = client.recipe("set_nx", "old", ttl=5 * second, wait=second)
        with recipe as held:
            assert 4 < held.remaining() <= 5
