"""A file that is replaced as a whole, unless a later holder has replaced it before us.

Beside ``report.json`` stand ``report.json.fence``, the fence and the holder of its last write, and
``report.json.lock``, an empty file that is locked (flock) from the comparison to the replacement, so that for the
processes of this machine they are one step. Readers lock nothing: they find the old file or the new one.

What is written first? The fence. Whoever crashes in between leaves a fence that is greater than that of the data, which
harms nobody: the next holder's is greater still. The other order would leave new data under an old fence, and a
stale holder could replace them. Each of the two is written to a file of its own, synced, renamed, and the directory
synced, so that the order is also that of the disk.

The data are written before the lock is taken, so that it is held for a moment only. A process that is stopped in just
that moment makes the others wait, as it must: when it wakes, its next step is to rename.

What is written to is ``report.json.<random>.tmp``, locked by whoever writes it. One that nobody has locked was left by
a crash. The first write of the next holder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from holdfast.errors import AcquireTimeout, InvalidConfig
from holdfast.guard.stamp import Stamp, stamp
from holdfast.lease import MAX_FENCE, BaseLease
from holdfast.options import seconds

__all__ = ["enter_file", "replace_file"]

_POLL: Final = 0.005
# A directory that others may write to can hold a link to a file elsewhere, or a FIFO, on which open() would wait.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RECORD: Final = re.compile(r"([0-9]{1,16}) (\S+)\s*")


def replace_file(
    path: str | os.PathLike[str],
    data: bytes | str,
    lease: BaseLease | Stamp,
    *,
    name: str | None = None,
    wait: float = 10.0,
) -> None:
    """Replace the file by one with these data (a str is encoded as UTF-8); StaleFence if a later holder has done so.

    It keeps the mode of the file that it replaces, and its owner if it may. ``wait`` is for how many seconds another
    process may be at it.
    """
    seconds("wait", wait)
    claim = stamp(lease, name=name)
    target = _resolve(path)
    content = _content(data)
    with _temporary(target, content) as fresh, _alone(target, wait):
        _raise_fence(target, claim, str(path))
        _rename(fresh, target)


def enter_file(
    path: str | os.PathLike[str], lease: BaseLease | Stamp, *, name: str | None = None, wait: float = 10.0
) -> None:
    """Refuse earlier holders from now on, and replace nothing. Do it before you read what you will change."""
    seconds("wait", wait)
    claim = stamp(lease, name=name)
    target = _resolve(path)
    with _alone(target, wait):
        _raise_fence(target, claim, str(path))


def _content(data: bytes | str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    try:
        memoryview(data)
    except TypeError:
        raise InvalidConfig(
            f"data of type {type(data).__name__}", "give bytes or a str, such as json.dumps()"
        ) from None
    return data


def _resolve(path: str | os.PathLike[str]) -> Path:
    """The file that a link leads to, which has one fence with it. InvalidConfig if it could not be replaced."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "no regular file"
        raise InvalidConfig(f"{str(path)!r:.200}", f"it is {kind}; name a file, which is then replaced as a whole")
    return target


def _raise_fence(target: Path, claim: Stamp, shown: str) -> None:
    fence_file = target.with_name(f"{target.name}.fence")
    stored = _read(fence_file)
    claim.check(shown, stored)
    if stored is None or stored[1] != claim.holder:
        _tidy_up(target)
    with _temporary(fence_file, f"{claim.fence} {claim.holder}\n".encode()) as record:
        _rename(record, fence_file)


def _read(fence_file: Path) -> tuple[int, str] | None:
    try:
        descriptor = _open_regular(fence_file)
    except FileNotFoundError:
        return None  # nobody has written under a fence yet
    try:
        with open(descriptor, encoding="utf-8") as file:
            record = _RECORD.fullmatch(file.read())
    except UnicodeDecodeError:
        record = None
    if record is None or not 0 < int(record[1]) <= MAX_FENCE:
        # It is never seen half-written, so somebody else wrote it, and what the last fence was nobody knows.
        raise InvalidConfig(
            str(fence_file), "it holds no fence and holder; restore it, or remove it if no holder is left"
        )
    return int(record[1]), record[2]


@contextmanager
def _temporary(target: Path, content: bytes) -> Iterator[Path]:
    """A file beside the target, on the disk as a whole; gone at the end, unless it was renamed."""
    try:
        there = target.stat()
    except FileNotFoundError:
        there = None
    # Never open to more than the target is, not even while it is empty: whoever has opened it can read it later.
    path, descriptor = _create(target, 0o666 if there is None else there.st_mode & 0o666)
    with open(descriptor, "wb") as file:
        try:
            if there is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, there.st_uid, there.st_gid)
                os.fchmod(descriptor, there.st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            yield path
        finally:
            path.unlink(missing_ok=True)


def _create(target: Path, mode: int) -> tuple[Path, int]:
    """A new file, locked, so that nobody takes it for one that a crash has left behind."""
    while True:
        path = target.with_name(f"{target.name}.{token_hex(8)}.tmp")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # somebody has tidied up before it was locked


def _tidy_up(target: Path) -> None:
    """Remove what those have left who crashed while they wrote. It is no harm if that cannot be done."""
    ours = re.compile(re.escape(target.name) + r"(\.fence)?\.[0-9a-f]{16}\.tmp")
    for name in filter(ours.fullmatch, os.listdir(target.parent)):
        with suppress(OSError):
            descriptor = os.open(target.with_name(name), _READ)
            try:
                if _flock(descriptor):
                    os.unlink(target.with_name(name))
            finally:
                os.close(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _alone(target: Path, wait: float) -> Iterator[None]:
    """No other process, and no other thread, is here for the same target."""
    until = time.monotonic() + wait
    lock_file = target.with_name(f"{target.name}.lock")  # never renamed nor removed, or two could lock two files
    descriptor = _open_regular(lock_file, os.O_CREAT)
    try:
        while not _flock(descriptor):
            if time.monotonic() >= until:
                raise AcquireTimeout(
                    str(lock_file), wait, "another process has been at it for so long; it may be stopped"
                )
            time.sleep(_POLL)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        os.close(descriptor)


def _open_regular(path: Path, flags: int = 0) -> int:
    """Open a file of ours to read. InvalidConfig for a link, FIFO, device or directory that was put in its place."""
    descriptor = -1
    try:
        descriptor = os.open(path, _READ | flags, 0o666)
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # by a link, a socket or a directory
        if not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode):
            raise
        regular = False
    if not regular:
        if descriptor >= 0:
            os.close(descriptor)
        raise InvalidConfig(f"{str(path)!r:.200}", "it must be a regular file; see what put it there, and remove it")
    return descriptor


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
