"""What the doctor asks of etcd beside what steps ask: who is a member, how each one does, what a user may do.

Invariant. These requests change nothing. Each but ``ReadRoles`` is answered by the member that gets it, from what that
member knows, so it has an answer while there is no leader. Ids of members are text.

Since 3.5.28 and 3.6.9, an etcd with users allows ``ReadStatus`` to the role root only.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class ListMembers(NamedTuple):
    """The result is a MemberList."""


class ReadStatus(NamedTuple):
    """What the member that gets it says of itself; the result is a MemberStatus."""


class ListAlarms(NamedTuple):
    """The result is a tuple of Alarms."""


class ReadRoles(NamedTuple):
    """The names of the roles of this user, who may always ask for them; the result is a tuple."""

    user: str


Question: TypeAlias = ListMembers | ReadStatus | ListAlarms | ReadRoles


class Entry(NamedTuple):
    """A member, as the cluster lists it. One that was never started has no name and no address."""

    id: str
    name: str
    addresses: tuple[str, ...]  # the URLs for clients that it announces
    learner: bool


class MemberList(NamedTuple):
    cluster: str
    answered_by: str
    members: tuple[Entry, ...]


class Alarm(NamedTuple):
    kind: str  # NOSPACE or CORRUPT
    member: str


class MemberStatus(NamedTuple):
    version: str
    leader: str  # "" if it knows none
    revision: int
    size: int  # of its database, in bytes
    in_use: int  # the part of it that a defragmentation keeps
    quota: int  # 0: it does not tell, as before 3.6
    alarms: tuple[Alarm, ...]
    date: float | None  # its time of day, cut off to whole seconds
