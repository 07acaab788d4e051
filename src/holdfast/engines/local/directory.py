"""The directory of an embedded server: chosen, created if necessary, refused if another user could use or replace it.

This user and root are trusted. No other user may be able to write to the directory, or to replace it by another one.
Whether it can be replaced depends on every directory on the path to it, and on the targets of symbolic links there:

    it belongs to another user             refused: its owner can rename entries
    others may write, no sticky bit        refused: they can rename entries
    others may write, with a sticky bit    allowed (/tmp), if the next part belongs to a trusted user

A group counts as others, unless it is root's or this user's private one. Access lists beyond the mode are not read.
"""

from __future__ import annotations

import os
import stat
from zlib import crc32

from holdfast.engines.local import warden as files
from holdfast.errors import InvalidConfig

TEMPORARY = "/tmp"
PATH_BYTES = 103  # the limit of macOS and the BSDs; Linux allows four more
_MOST_LINKS = 40  # the limit of the kernel


def default_directory() -> str:
    """The directory of this user's server, if the URL names none.

    It is in the home directory that the password database names, because programs that clean up temporary files leave
    that alone; or in /tmp, for a user without a home of its own to write to. No environment variable is read: HOME,
    TMPDIR and XDG_RUNTIME_DIR may differ between a cron job and a login shell, and the locks of both must exclude each
    other. A server that runs in one of the two places is used in any case.
    """
    places = [*_home_directory(), f"{TEMPORARY}/holdfast-{os.geteuid()}"]
    for place in places:
        if _is_safe(place) and files.is_locked(os.path.join(place, files.LOG)):
            return place
    return next((place for place in places[:-1] if _can_be_made(place)), places[-1])


def _home_directory() -> list[str]:
    """The directory below the home of this user, one for each machine: a home may be shared. Empty if it is too long.

    flock works across the machines that share a home, and a socket does not.
    """
    import pwd

    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return []  # for example in a container
    place = os.path.join(home, f".holdfast-{_machine()}")
    return [place] if os.path.isabs(place) and len(os.fsencode(os.path.join(place, files.SOCKET))) <= PATH_BYTES else []


def _machine() -> str:
    """Eight digits for this machine, which stay the same if its name changes."""
    try:
        with open("/etc/machine-id") as lines:
            name = lines.read().strip()
    except OSError:
        name = ""
    return f"{crc32((name or os.uname().nodename).encode()):08x}"


def may(path: str, mode: int) -> bool:
    """Whether this process, with its effective user, may do that."""
    return bool(path) and os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _is_safe(directory: str) -> bool:
    """Whether the directory exists and no other user could use or replace it."""
    try:
        _check_way(directory, directory)
        _check(directory, directory, os.lstat(directory))
    except (OSError, InvalidConfig):
        return False
    return True


def _can_be_made(directory: str) -> bool:
    """Whether the directory is private and can be written to, or can be made so, in a directory of this user."""
    parent = os.path.dirname(directory)
    try:
        _check_way(directory, directory)
        if os.path.lexists(directory):
            return _is_safe(directory) and may(directory, os.W_OK)
        return os.stat(parent).st_uid == os.geteuid() and may(parent, os.W_OK | os.X_OK)
    except (OSError, InvalidConfig):
        return False


def make_private(directory: str) -> None:
    """Create the directory if it is missing. Raises InvalidConfig if another user could use or replace it."""
    what = f"local://{directory}"
    _check_way(what, directory)
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass  # another process has just created it; the directory is checked below
        except OSError as error:
            raise InvalidConfig(
                what, f"the directory cannot be made ({error.strerror}); make it, with mode 700"
            ) from error
        _check_way(what, directory)  # once more: another user could have created a missing part
        found = os.lstat(directory)
    except OSError as error:
        raise InvalidConfig(what, f"the directory cannot be used ({error.strerror}); name another") from error
    _check(what, directory, found)


def _check(what: str, directory: str, found: os.stat_result) -> None:
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
            f"its mode is {stat.S_IMODE(found.st_mode):03o}, and it must be yours alone; name a directory in it, as in "
            f"local://{directory.rstrip('/')}/locks, or chmod 700 it if nothing else uses it",
        )


def _check_way(what: str, directory: str) -> None:
    """Check the path part by part, as the kernel walks it. A missing part ends the check; the caller deals with it."""
    trusted = _trusted_users()
    at, parts, links = "/", directory.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":  # only in the target of a symbolic link
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
            return  # the caller's lstat fails too
        target = os.readlink(path)
        parts += target.split("/")[::-1]
        if target.startswith("/"):
            at = "/"


def _problem(at: str, holder: os.stat_result, path: str, entry: os.stat_result | None, trusted: set[int]) -> str | None:
    """Why another user could rename this entry of the directory ``at``, or None."""
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
                users.add(int(overflow.read()))  # how the machine's root appears in a user namespace
    except OSError:
        pass  # not Linux
    return users


def _is_private(group: int) -> bool:
    """Whether it is root's group, or the private group of this user."""
    import grp
    import pwd

    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
