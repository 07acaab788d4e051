"""The directory of an embedded server: made if need be, refused if another user could get at what is in it.

This user and root are trusted. No other user may write to the directory, or be able to put another directory in its
place. The latter depends on every directory on the way to it, and on the way to what symbolic links lead to:

    it belongs to another user             refused: its owner can rename what is in it
    others may write, no sticky bit        refused: they can rename what is in it
    others may write, with a sticky bit    fine (/tmp), if the next part belongs to a trusted user

A group counts as others, unless it is root's or this user's private one. Access lists beyond the mode are not read.
"""

from __future__ import annotations

import os
import stat

from holdfast.errors import InvalidConfig

__all__ = ["make_private"]

_MOST_LINKS = 40  # as the kernel's own limit


def make_private(directory: str) -> None:
    """Make it if it is not there; InvalidConfig if another user could use or replace it."""
    what = f"local://{directory}"
    _check_way(what, directory)
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass  # Another starter was quicker. What is there now is checked like any other.
        except OSError as error:
            raise InvalidConfig(
                what, f"the directory cannot be made ({error.strerror}); make it, with mode 700"
            ) from error
        _check_way(what, directory)  # again: a part that was missing could have been made by another user
        found = os.lstat(directory)
    except OSError as error:
        raise InvalidConfig(what, f"the directory cannot be used ({error.strerror}); name another") from error
    if stat.S_ISLNK(found.st_mode):
        raise InvalidConfig(what, "it is a symbolic link, and could soon point elsewhere; name what it points to")
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidConfig(what, "it is not a directory; name one, or a path where one can be made")
    if found.st_uid != os.geteuid():
        raise InvalidConfig(
            what,
            f"it belongs to user {found.st_uid} and you are user {os.geteuid()}; name one of your own",
        )
    if stat.S_IMODE(found.st_mode) & 0o777 != 0o700:
        raise InvalidConfig(
            what,
            f"its mode is {stat.S_IMODE(found.st_mode):03o}, and it must be yours alone; see what is there, "
            f"then chmod 700 {directory}",
        )


def _check_way(what: str, directory: str) -> None:
    """Walk as the kernel does, part by part. A missing part ends it: what follows from that is the caller's to say."""
    trusted = _trusted_users()
    at, parts, links = "/", directory.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":  # only in the target of a link
            at = os.path.dirname(at)
            continue
        path = os.path.join(at, part)
        try:
            entry = os.lstat(path)
        except OSError:
            entry = None
        problem = _problem(at, os.stat(at), path, entry, trusted)
        if problem:
            raise InvalidConfig(
                what,
                f"{problem}, so another user could put another directory in its place; "
                "name one below your home directory or /tmp",
            )
        if entry is None:
            return
        if not stat.S_ISLNK(entry.st_mode):
            at = path
            continue
        links += 1
        if links > _MOST_LINKS:
            return  # the caller's lstat fails likewise
        target = os.readlink(path)
        parts += target.split("/")[::-1]
        if target.startswith("/"):
            at = "/"


def _problem(at: str, holder: os.stat_result, path: str, entry: os.stat_result | None, trusted: set[int]) -> str | None:
    """Why another user could rename this entry of the directory ``at``; None if none could."""
    mode = stat.S_IMODE(holder.st_mode)
    if holder.st_uid not in trusted:
        return f"{at} belongs to user {holder.st_uid}"
    if not (mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(holder.st_gid))):
        return None
    if not mode & stat.S_ISVTX:
        return f"others may write to {at} (mode {mode:03o}, without the sticky bit)"
    if entry is not None and entry.st_uid not in trusted:
        return f"others may write to {at}, and {path} belongs to user {entry.st_uid}"
    return None


def _trusted_users() -> set[int]:
    users = {0, os.geteuid()}
    try:
        with open("/proc/self/uid_map") as mapping, open("/proc/sys/kernel/overflowuid") as overflow:
            if mapping.read().split() != ["0", "0", "4294967295"]:
                users.add(int(overflow.read()))  # in a user namespace, the machine's root looks like this
    except OSError:
        pass  # not Linux
    return users


def _is_private(group: int) -> bool:
    """Whether it is root's group, or one that this user alone is in, as many systems make for each user."""
    import grp
    import pwd

    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
