"""A file that is replaced atomically, with crashes at every step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.guard import Stamp, enter_file, replace_file
from tests.support import Script

OLD, NEW = Stamp("x", 7, "a"), Stamp("x", 8, "b")

CRASH_POINTS = range(8)  # one before each call that changes the disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.txt"


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def test_what_is_neither_text_nor_bytes_is_refused(path: Path) -> None:
    for data in ({"total": 3}, None, 5):
        with pytest.raises(holdfast.InvalidConfig, match=f"data of type {type(data).__name__}: give bytes or a str"):
            replace_file(path, data, NEW)  # type: ignore[arg-type]
    assert names(path) == []
    replace_file(path, bytearray(b"as bytes"), NEW)  # type: ignore[arg-type]
    assert path.read_bytes() == b"as bytes"


def test_nothing_is_left_but_the_file_its_fence_and_its_lock(path: Path) -> None:
    replace_file(path, b"\xff", NEW)
    with pytest.raises(holdfast.StaleFence) as caught:
        replace_file(path, "stale", OLD)
    assert caught.value.resource == str(path)
    assert path.read_bytes() == b"\xff"
    assert names(path) == ["report.txt", "report.txt.fence", "report.txt.lock"]


def test_a_str_is_written_as_utf8(path: Path) -> None:
    replace_file(str(path), "grün\n", OLD)
    assert path.read_bytes() == "grün\n".encode()


def test_the_mode_stays_what_it_was(path: Path) -> None:
    path.write_text("before")
    path.chmod(0o640)
    replace_file(path, "one", OLD)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_stays_who_it_was(path: Path) -> None:
    path.write_text("before")
    os.chown(path, 65534, 65534)
    path.chmod(0o4755)
    replace_file(path, "one", OLD)
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
    assert stat.S_IMODE(path.stat().st_mode) == 0o4755


def test_what_few_may_read_is_open_to_nobody_else_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it before the data are written: a process that opens it then can read it later."""
    path.write_text("before")
    path.chmod(0o600)
    seen: list[int] = []

    def create(file: Any, flags: int, mode: int = 0o777) -> int:
        descriptor = os_open(file, flags, mode)
        if str(file).endswith(".tmp") and ".fence." not in str(file):
            seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    os_open = os.open
    monkeypatch.setattr(os, "open", create)
    replace_file(path, "secret", OLD)
    assert set(seen) == {0o600}


def test_a_link_and_what_it_leads_to_have_one_fence(path: Path) -> None:
    replace_file(path, "new", NEW)
    link = path.parent / "elsewhere" / "link.txt"
    link.parent.mkdir()
    link.symlink_to(path)
    with pytest.raises(holdfast.StaleFence):
        replace_file(link, "stale", OLD)
    replace_file(link, "newer", NEW)
    assert link.is_symlink()
    assert path.read_text() == "newer"


def test_a_record_that_cannot_be_read_is_not_taken_for_none(path: Path) -> None:
    replace_file(path, "new", NEW)
    for content in ("", "8", "eight b", "8 b c", "0 b", "-5 b", "+8 b", "1_0 b", "inf b", f"{2**53} b", f"{10**18} b"):
        Path(f"{path}.fence").write_text(content)
        with pytest.raises(holdfast.InvalidConfig, match="no fence and holder"):
            replace_file(path, "one", OLD)
    assert path.read_text() == "new"


PLANTED: dict[str, Callable[[Path], object]] = {
    "a link": lambda place: place.symlink_to(place.parent / "elsewhere"),
    "a link to a file": lambda place: place.symlink_to(__file__),
    "a FIFO": os.mkfifo,
    "a device": lambda place: place.symlink_to("/dev/null"),
    "a directory": Path.mkdir,
    "a socket": lambda place: _bind(place),
}


def _bind(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(place.parent):  # for the path may be too long
        listener.bind(place.name)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("suffix", ["lock", "fence"])
def test_only_a_regular_file_is_used_as_lock_or_fence(path: Path, kind: str, suffix: str) -> None:
    """A FIFO would make the writer wait for ever, a link would lock, or create, a file elsewhere."""
    planted = path.with_name(f"report.txt.{suffix}")
    PLANTED[kind](planted)
    with pytest.raises(holdfast.InvalidConfig, match=rf"report\.txt\.{suffix}.*it must be a regular file"):
        replace_file(path, "data", NEW)
    assert not path.exists()
    assert not (path.parent / "elsewhere").exists()


def test_a_fifo_among_the_temporary_files_does_not_block(path: Path) -> None:
    os.mkfifo(path.with_name(f"report.txt.{'0' * 16}.tmp"))
    replace_file(path, "data", NEW)
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    "write", [enter_file, lambda path, ours: replace_file(path, "one", ours)], ids=["enter", "replace"]
)
def test_what_is_no_file_is_refused_and_nothing_is_left_beside_it(path: Path, write: Any) -> None:
    path.mkdir()
    fifo = path / "fifo"
    os.mkfifo(fifo)
    for target, kind in ((path, "a directory"), (fifo, "no regular file")):
        with pytest.raises(holdfast.InvalidConfig, match=f"it is {kind}; name a file"):
            write(target, NEW)
    assert os.listdir(path.parent) == [path.name]
    assert os.listdir(path) == ["fifo"]


def test_a_directory_that_is_not_there_is_the_callers_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(path.parent / "none" / "report.txt", "one", OLD)


def test_waiting_for_another_process_has_an_end(path: Path) -> None:
    replace_file(path, "one", OLD)
    with Path(f"{path}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(holdfast.AcquireTimeout, match="may be stopped"):
            replace_file(path, "two", NEW, wait=0.02)
        assert path.read_text() == "one"
    replace_file(path, "two", NEW, wait=0)
    for bad in (-1, float("nan"), True):
        with pytest.raises(holdfast.InvalidConfig, match="wait="):
            replace_file(path, "three", NEW, wait=bad)
        with pytest.raises(holdfast.InvalidConfig, match="wait="):
            enter_file(path, NEW, wait=bad)
    assert names(path) == ["report.txt", "report.txt.fence", "report.txt.lock"]


class Crash(BaseException):
    """The process ends here: nothing that comes after is done, no clean-up either."""


def count_and_crash(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """From the call of that number on, nothing that changes the disk is done any more; how many calls there were."""
    calls = 0

    def crashing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Crash
            return real(*arguments, **options)

        return call

    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, crashing(getattr(os, name)))
    return lambda: calls


@pytest.mark.parametrize("first", [True, False], ids=["first write", "later write"])
@pytest.mark.parametrize("at", CRASH_POINTS)
def test_after_a_crash_the_fence_is_never_lower_than_that_of_the_data(
    path: Path, monkeypatch: pytest.MonkeyPatch, at: int, first: bool
) -> None:
    if not first:
        replace_file(path, "7", OLD)
    with monkeypatch.context() as patch:
        calls = count_and_crash(patch, at)
        try:
            replace_file(path, "8", NEW)
        except Crash:
            pass
        else:
            assert calls() <= at
    data = int(path.read_text()) if path.exists() else 0
    record = Path(f"{path}.fence")
    fence = int(record.read_text().split()[0]) if record.exists() else 0
    assert fence >= data
    assert data in (0 if first else 7, 8)
    if fence == 8:
        with pytest.raises(holdfast.StaleFence):
            replace_file(path, "7", OLD)
    replace_file(path, "8", NEW)  # the crashed writer may try again, and the next holder may write
    replace_file(path, "9", Stamp("x", 9, "c"))
    assert path.read_text() == "9"
    assert names(path) == ["report.txt", "report.txt.fence", "report.txt.lock"]


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(path: Path) -> None:
    code = """
    from holdfast.guard import Stamp, file
    def late(*_):
        say("in mid-write")
        sys.stdin.readline()
        raise SystemExit
    file._file_lock = late
    file.replace_file(sys.argv[1], "7", Stamp("x", 7, "a"))
    """
    mine = path.with_name("report.txt.0123456789.tmp")
    mine.write_text("not ours")
    with Script(code, str(path)) as killed:
        killed.hear("in mid-write")
        (left,) = set(names(path)) - {mine.name}
        killed.send(signal.SIGKILL)
        killed.wait()
    with Script(code, str(path)) as alive:
        alive.hear("in mid-write")
        (its,) = set(names(path)) - {mine.name, left}
        replace_file(path, "8", NEW)
        assert names(path) == sorted(["report.txt", "report.txt.fence", "report.txt.lock", mine.name, its])
        alive.write("go on\n")
        alive.finish()
    assert names(path) == sorted(["report.txt", "report.txt.fence", "report.txt.lock", mine.name])


def test_a_file_that_was_removed_before_it_was_locked_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removed it at that very moment, taking it for one that a crash left."""
    flock = fcntl.flock
    removed: list[Path] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(path.parent.glob("*.tmp"))
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    replace_file(path, "one", OLD)
    assert path.read_text() == "one"
    assert len(removed) == 1


def test_all_crash_points_are_tried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        calls = count_and_crash(patch, at=1000)
        replace_file(path, "8", NEW)
    assert calls() == len(CRASH_POINTS)


def test_readers_find_a_whole_file_at_all_times(path: Path) -> None:
    size = 200_000
    replace_file(path, b"\0" * size, Stamp("x", 1, "a"))
    done = threading.Event()

    def write() -> None:
        for fence in range(2, 30):
            replace_file(path, bytes([fence]) * size, Stamp("x", fence, "a"))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = 0
    while not done.is_set():
        content = path.read_bytes()
        assert len(content) == size
        assert len(set(content)) == 1
        assert content[0] >= last
        last = content[0]
    writer.join()


def test_processes_exclude_each_other(path: Path) -> None:
    """A process that is stopped between the comparison and the renaming makes the others wait, and then is first."""
    code = """
    from holdfast.guard import Stamp, file
    rename = file._rename
    def late(source, target):
        say("at it")
        sys.stdin.readline()
        rename(source, target)
    file._rename = late
    file.replace_file(sys.argv[1], "7", Stamp("x", 7, "a"))
    say("written")
    """
    with Script(code, str(path)) as script:
        script.hear("at it")
        with pytest.raises(holdfast.AcquireTimeout):
            replace_file(path, "8", NEW, wait=0.05)
        script.write("go on\n")
        script.hear("at it")
        script.write("go on\n")
        script.hear("written")
        script.finish()
    assert path.read_text() == "7"
    replace_file(path, "8", NEW)
    with pytest.raises(holdfast.StaleFence):
        replace_file(path, "7", OLD)
