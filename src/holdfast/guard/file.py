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
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from holdfast.errors import AcquireTimeout, InvalidConfig
from holdfast.guard.stamp import Stamp, stamp
from holdfast.lease import BaseLease

__all__ = ["enter_file", "replace_file"]

_POLL: Final = 0.005


def replace_file(
    path: str | os.PathLike[str],
    data: bytes | str,
    lease: BaseLease | Stamp,
    *,
    name: str | None = None,
    wait: float = 10.0,
) -> None:
    """Replace the file by one with these data (a str is encoded as UTF-8); StaleFence if a later holder has done so.

    It keeps the mode of the file that it replaces. ``wait`` is for how many seconds another process may be at it.
    """
    claim = stamp(lease, name=name)
    target = _resolve(path)
    content = data.encode() if isinstance(data, str) else data
    with _temporary(target, content) as fresh, _alone(target, wait):
        _raise_fence(target, claim, str(path))
        _rename(fresh, target)


def enter_file(
    path: str | os.PathLike[str], lease: BaseLease | Stamp, *, name: str | None = None, wait: float = 10.0
) -> None:
    """Refuse earlier holders from now on, and replace nothing. Do it before you read what you will change."""
    claim = stamp(lease, name=name)
    target = _resolve(path)
    with _alone(target, wait):
        _raise_fence(target, claim, str(path))


def _resolve(path: str | os.PathLike[str]) -> Path:
    """A link and what it leads to are one file, with one fence."""
    return Path(os.path.realpath(path))


def _raise_fence(target: Path, claim: Stamp, shown: str) -> None:
    fence_file = target.with_name(f"{target.name}.fence")
    claim.check(shown, _read(fence_file))
    with _temporary(fence_file, f"{claim.fence} {claim.holder}\n".encode()) as record:
        _rename(record, fence_file)


def _read(fence_file: Path) -> tuple[int, str] | None:
    try:
        fence, holder = fence_file.read_text().split()
        return int(fence), holder
    except FileNotFoundError:
        return None  # nobody has written under a fence yet
    except ValueError:
        # It is never seen half-written, so somebody else wrote it, and what the last fence was nobody knows.
        raise InvalidConfig(
            str(fence_file), "it holds no fence and holder; restore it, or remove it if no holder is left"
        ) from None


@contextmanager
def _temporary(target: Path, content: bytes) -> Iterator[Path]:
    """A file beside the target, on the disk as a whole; gone at the end, unless it was renamed."""
    path = target.with_name(f"{target.name}.{token_hex(8)}.tmp")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, target.stat().st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)


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
    descriptor = os.open(lock_file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
