"""A file that is replaced as a whole, unless a later holder has replaced it.

Beside ``report.json`` are two files. ``report.json.fence`` has the fence and the holder of its last write.
``report.json.lock`` is empty, and is locked (flock) from the comparison to the replacement. So these two are one step
for the processes of this machine. Readers need no lock: they find the old file or the new one.

The fence is written first. A crash in between leaves a greater fence than that of the data. That does no harm, because
the fence of the next holder is greater still. The other order would leave new data under an old fence, and a stale
holder could replace them. Each file is written under a temporary name, synced and renamed, and its directory is synced.
So the order is the same on the disk.

The data are written before the lock is taken, so that it is held briefly. If a process is stopped while it holds the
lock, the others must wait: its next step is a rename.

The temporary file is ``report.json.<random>.tmp``, locked by its writer. An unlocked one was left by a crash; the first
write of the next holder removes it.
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
from holdfast.options import Seconds, seconds

__all__ = ["enter_file", "replace_file"]

_POLL: Final = 0.005
# Another user of the directory may put a link to a file elsewhere there, or a FIFO, on which open() would wait.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RECORD: Final = re.compile(r"([0-9]{1,16}) (\S+)\s*")


def replace_file(
    path: str | os.PathLike[str],
    data: bytes | str,
    lease: BaseLease | Stamp,
    *,
    name: str | None = None,
    wait: Seconds = 10.0,
) -> None:
    """Replace the file by these data (a str is encoded as UTF-8); StaleFence if a later holder has written.

    The new file keeps the mode of the old one, and its owner if permitted. ``wait``: seconds to wait while another
    process writes.
    """
    wait = seconds("wait", wait)
    ours = stamp(lease, name=name)
    target = _resolve(path)
    content = _content(data)
    with _temporary(target, content) as fresh, _file_lock(target, wait):
        _raise_fence(target, ours, str(path))
        _rename(fresh, target)


def enter_file(
    path: str | os.PathLike[str], lease: BaseLease | Stamp, *, name: str | None = None, wait: Seconds = 10.0
) -> None:
    """Refuse earlier holders from now on, and replace nothing. Do it before you read what you will change."""
    wait = seconds("wait", wait)
    ours = stamp(lease, name=name)
    target = _resolve(path)
    with _file_lock(target, wait):
        _raise_fence(target, ours, str(path))


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
    """The target of a link, so that both have one fence; InvalidConfig if it is no regular file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "no regular file"
        raise InvalidConfig(f"{str(path)!r:.200}", f"it is {kind}; name a file, which is replaced as a whole")
    return target


def _raise_fence(target: Path, ours: Stamp, shown: str) -> None:
    fence_file = target.with_name(f"{target.name}.fence")
    stored = _read(fence_file)
    ours.check(shown, stored)
    if stored is None or stored[1] != ours.holder:
        _remove_leftovers(target)
    with _temporary(fence_file, f"{ours.fence} {ours.holder}\n".encode()) as record:
        _rename(record, fence_file)


def _read(fence_file: Path) -> tuple[int, str] | None:
    try:
        descriptor = _open_regular(fence_file)
    except FileNotFoundError:
        return None  # no guarded write yet
    try:
        with open(descriptor, encoding="utf-8") as file:
            record = _RECORD.fullmatch(file.read())
    except UnicodeDecodeError:
        record = None
    if record is None or not 0 < int(record[1]) <= MAX_FENCE:
        # A rename is never seen half-done, so another program wrote it, and the last fence is unknown.
        raise InvalidConfig(
            str(fence_file), "it holds no fence and holder; restore it, or remove it if no holder is left"
        )
    return int(record[1]), record[2]


@contextmanager
def _temporary(target: Path, content: bytes) -> Iterator[Path]:
    """A synced file beside the target; removed at the end, unless it was renamed."""
    try:
        there = target.stat()
    except FileNotFoundError:
        there = None
    # Never more accessible than the target, even while empty: a process that opens it then can read it later.
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
    """A new file, locked, so that it is not taken for one that a crash left."""
    while True:
        path = target.with_name(f"{target.name}.{token_hex(8)}.tmp")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process removed it before it was locked


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files that crashed writers left. Failing to do so is harmless."""
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
def _file_lock(target: Path, wait: float) -> Iterator[None]:
    """Exclude other processes and threads that write the same target."""
    until = time.monotonic() + wait
    lock_file = target.with_name(f"{target.name}.lock")  # never renamed or removed, so all processes lock one file
    descriptor = _open_regular(lock_file, os.O_CREAT)
    try:
        while not _flock(descriptor):
            if time.monotonic() >= until:
                raise AcquireTimeout(
                    str(lock_file), wait, "another process has been writing all that time; it may be stopped"
                )
            time.sleep(_POLL)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # to close is not enough: a child forked meanwhile has it open, too
        os.close(descriptor)


def _open_regular(path: Path, flags: int = 0) -> int:
    """Open a file of ours to read; InvalidConfig if there is a link, FIFO, device or directory in its place."""
    descriptor = -1
    try:
        descriptor = os.open(path, _READ | flags, 0o666)
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # a link, a socket or a directory
        if not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode):
            raise
        regular = False
    if not regular:
        if descriptor >= 0:
            os.close(descriptor)
        raise InvalidConfig(f"{str(path)!r:.200}", "it must be a regular file; find out what created it, and remove it")
    return descriptor


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
