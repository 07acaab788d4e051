"""The members of a cluster of etcd, and what each of them says of itself.

The URL may name some members, and the cluster knows them all, so both are asked. Each member is asked alone. The first
try has no user: to authenticate takes a leader, and the doctor is wanted most while there is none.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from holdfast.blocking import connect
from holdfast.cli.doctor.findings import why
from holdfast.errors import Unavailable
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.intents.maintenance import (
    Alarm,
    Entry,
    ListAlarms,
    ListMembers,
    MemberList,
    MemberStatus,
    Question,
    ReadStatus,
)
from holdfast.protocol.intents.requests import ask
from holdfast.untrusted import shown
from holdfast.url import Location, locate

MEMBER_TIMEOUT: Final = 2.0  # seconds
_LONGEST_NAME: Final = 64


class Look(NamedTuple):
    """What one address has answered. ``listed`` and ``status`` are None if it refuses to say."""

    address: str
    listed: MemberList | None = None
    status: MemberStatus | None = None
    ahead: float = 0.0  # seconds by which its clock is ahead of ours, at least; negative if it is behind
    failed: StepFailed | None = None  # it did not answer

    @property
    def why(self) -> str:
        """Why it does not answer; "" if it does."""
        return why(self.failed) if self.failed is not None else ""


class Member(NamedTuple):
    """A member, by the name that people see."""

    id: str
    name: str
    look: Look
    voter: bool
    named: bool  # in the URL

    @property
    def status(self) -> MemberStatus | None:
        return self.look.status


class Cluster(NamedTuple):
    members: list[Member]
    strays: list[Look]  # addresses in the URL that do not answer, and that no member announces
    ids: set[str]  # of the clusters that the URL names: there should be one
    complete: bool  # the list of the members was not refused
    alarms: set[Alarm] | None  # None if no member may be asked for them

    @property
    def voters(self) -> list[Member]:
        return [member for member in self.members if member.voter]

    @property
    def asked(self) -> list[tuple[Member, MemberStatus]]:
        """The members that have told their status."""
        return [(member, member.status) for member in self.members if member.status is not None]

    def name_of(self, member_id: str) -> str:
        return next((member.name for member in self.members if member.id == member_id), f"member {member_id}")


def look_at(location: Location) -> Cluster:
    """All members. StepFailed if none answers."""
    looks = [_look(address, location) for address in location.address.partition("://")[2].split(",")]
    answered = [look for look in looks if look.failed is None]
    if not answered:
        raise _no_answer(looks)
    listed = next((look.listed for look in answered if look.listed is not None), None)
    ids = {look.listed.cluster for look in answered if look.listed is not None}
    if listed is None:
        members = [Member("", look.address, look, voter=True, named=True) for look in answered]
        strays = [look for look in looks if look.failed is not None]
        return Cluster(members, strays, ids, complete=False, alarms=_alarms(members, location))
    members = [_member(entry, looks, location) for entry in listed.members]
    seen = {member.look.address for member in members}
    strays = [look for look in looks if look.failed is not None and look.address not in seen]
    return Cluster(members, strays, ids, complete=True, alarms=_alarms(members, location))


def url_of(location: Location, address: str, *, with_user: bool) -> str:
    """The URL of one member, with the options of the URL that names the cluster."""
    scheme, settings = location.address.partition("://")[0], location.settings
    words = [quote(settings[part], safe="") for part in ("user", "password") if with_user and part in settings]
    files = [f"{name}={quote(value, safe='')}" for name, value in settings.items() if name.startswith("ssl_")]
    return f"{scheme}://{':'.join(words)}{'@' if words else ''}{address}{'?' if files else ''}{'&'.join(files)}"


def _member(entry: Entry, looks: list[Look], location: Location) -> Member:
    """A member of the list, asked at the address that the URL has for it, or that it announces."""
    addresses = list(filter(None, map(_place, entry.addresses)))
    look = next((look for look in looks if look.listed is not None and look.listed.answered_by == entry.id), None)
    named = look is not None
    if look is None:
        look = next((look for look in looks if look.failed is not None and look.address in addresses), None)
        named = look is not None
    if look is None:
        look = _announced(entry, addresses, location)
    name = shown(entry.name, _LONGEST_NAME)
    text = f"{name} ({look.address})" if name else f"a member that was never started ({entry.id})"
    return Member(entry.id, text, look, voter=not entry.learner, named=named)


def _place(url: str) -> str:
    """Host and port of an address that a member announces; empty if there is none that can be used."""
    try:
        place = urlsplit(url).netloc
        locate(f"etcd://{place}")
    except ValueError:  # InvalidConfig is one, too
        return ""
    return place


def _announced(entry: Entry, addresses: list[str], location: Location) -> Look:
    look = Look("", failed=_failure("it announces no address that clients can use"))
    for address in addresses:
        look = _look(address, location)
        if look.listed is not None and look.listed.answered_by != entry.id:
            look = Look(address, failed=_failure("another member answers at the address that it announces"))
        if look.failed is None:
            break
    return look


def _look(address: str, location: Location) -> Look:
    try:
        listed = _ask(address, location, ListMembers())
        began = time.time()
        status = _ask(address, location, ReadStatus())
        return Look(address, listed, status, _ahead(status, began, time.time()))
    except StepFailed as failed:
        return Look(address, failed=failed)


def _ahead(status: MemberStatus | None, began: float, ended: float) -> float:
    """By how much the clock of a member is ahead at least, if it told its time, in whole seconds, between both."""
    if status is None or status.date is None:
        return 0.0
    return max(0.0, status.date - ended) or min(0.0, status.date + 1.0 - began)


def _ask(address: str, location: Location, question: Question) -> Any:
    """The answer of one member; None if it refuses this question. StepFailed if it does not answer."""
    refused = False
    for with_user in dict.fromkeys((False, "user" in location.settings)):
        with connect(url_of(location, address, with_user=with_user)) as client:
            ((_, engine),) = client._driver.servers(MEMBER_TIMEOUT).items()
            try:
                return engine.run(ask(question), MEMBER_TIMEOUT)
            except StepFailed as failed:
                refused = refused or failed.answered
                if not refused:
                    raise
    return None


def _alarms(members: list[Member], location: Location) -> set[Alarm] | None:
    """All alarms. A status names them too, and may be allowed to another user than the list."""
    found = {alarm for member in members if member.status is not None for alarm in member.status.alarms}
    if any(member.status is not None for member in members):
        return found
    for member in members:
        if member.look.failed is None:
            try:
                alarms: tuple[Alarm, ...] | None = _ask(member.look.address, location, ListAlarms())
            except StepFailed:
                continue  # it answered a moment ago; another member may still
            return set(alarms) if alarms is not None else None
    return None


def _failure(what: str) -> StepFailed:
    return StepFailed(Unavailable({"": what}, ""), sent=False, retry=False)


def _no_answer(looks: list[Look]) -> StepFailed:
    """One failure for all addresses of the URL."""
    causes: dict[str, str] = {}
    for look in looks:
        assert look.failed is not None
        failed = look.failed
        if not isinstance(failed.error, Unavailable):
            return failed
        causes |= failed.error.causes
        advice = failed.error.advice
    return StepFailed(Unavailable(causes, advice), sent=False, retry=False)
