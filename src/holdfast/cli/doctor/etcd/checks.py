"""What the doctor checks on a cluster of etcd: its members, leader, versions, database and clocks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from holdfast.cli.doctor.checks import LARGEST_SKEW
from holdfast.cli.doctor.etcd.cluster import Cluster, Member
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING, Finding
from holdfast.errors import rounded
from holdfast.protocol.intents.maintenance import MemberStatus
from holdfast.untrusted import shown

OLDEST: Final = (3, 4, 0)
CORRUPTING: Final = ((3, 5, 0), (3, 5, 1), (3, 5, 2))  # https://etcd.io/docs/v3.5/op-guide/data_corruption/
CRASHING: Final = (3, 5, 5)  # before it: https://github.com/etcd-io/etcd/issues/14110
NEARLY_FULL: Final = 0.8  # of the quota
DEFAULT_QUOTA: Final = 2 * 2**30  # bytes

Findings = Iterable[Finding]

_LONGEST: Final = 64  # characters of what a member says
_WANTS_ROOT: Final = (
    "since 3.5.28 and 3.6.9, only a user with the role root may ask for this: put such a user into the URL"
)


def members(cluster: Cluster) -> Findings:
    """How many members vote, which do not answer, and how many more may fail."""
    if len(cluster.ids) > 1:
        advice = "name the members of one cluster: a lock in one does not exclude a lock in the other"
        yield Finding("members", DANGER, f"the URL names members of {len(cluster.ids)} clusters", advice)
    for look in cluster.strays:
        message = f"the URL names {look.address}, which does not answer: {look.why}"
        advice = "start it; or, if it is no member any more, take it out of the URL"
        yield Finding("members", WARNING, message, advice)
    if not cluster.complete:
        message = "not checked: this user may not list the members"
        yield Finding("members", UNCHECKED, message, _WANTS_ROOT)
        return
    yield from _votes(cluster)
    yield from _learners(cluster)
    reachable = [member for member in cluster.voters if member.look.address]  # one that was never started has none
    unnamed = [member for member in reachable if not member.named]
    if unnamed:
        addresses = ",".join(member.look.address for member in reachable)
        message = f"the URL leaves out {_names(unnamed)}: clients never ask a member that the URL does not name"
        yield Finding("members", NOTE, message, f"name them all: {addresses}")


def _votes(cluster: Cluster) -> Findings:
    voters = cluster.voters
    silent = [member for member in voters if member.look.why]
    count, needed = len(voters), len(voters) // 2 + 1
    if silent:
        answering = count - len(silent)
        spare = answering - needed
        rest = (
            f"locks need {needed}" if spare < 0 else "none of them may fail" if spare == 0 else f"{spare} more may fail"
        )
        causes = ", ".join(f"{member.name}: {member.look.why}" for member in silent)
        message = f"{answering} of {count} members answer, and {rest}. No answer from {causes}"
        if any(member.named for member in silent):
            yield Finding("members", WARNING, message, "start it again, or replace it")
        else:  # an address that is announced may be one that only the other members can reach
            advice = "start it again; or, if it runs, run holdfast doctor where its address can be reached"
            yield Finding("members", UNCHECKED, f"not checked: {message}", advice)
    elif count == 1:
        message = "there is only one member: while it is down, no lock works"
        yield Finding("members", WARNING, message, "run 3 members, of which 1 may fail")
    elif count == needed:
        message = f"{count} members, and none may fail: locks need them all"
        yield Finding("members", WARNING, message, "add a member: of 3, 1 may fail")
    else:
        yield Finding("members", OK, f"{count} members, and all answer: {count - needed} may fail")


def _learners(cluster: Cluster) -> Findings:
    for member in cluster.members:
        if not member.voter and member.named:
            message = f"the URL names {member.name}, a learner, which serves no lock"
            yield Finding("members", WARNING, message, "name the voting members only, or promote it")
        elif not member.voter:
            yield Finding("members", NOTE, f"{member.name} is a learner: it has no vote yet", "etcdctl member promote")


def leader(cluster: Cluster) -> Findings:
    asked = cluster.asked
    leaders = {status.leader for _, status in asked if status.leader}
    cut_off = [member for member, status in asked if not status.leader]
    if not leaders:
        needed = len(cluster.voters) // 2 + 1
        advice = f"{needed} of {len(cluster.voters)} members must be up and reach each other"
        yield Finding("leader", DANGER, "no member leads, so no lock works", advice)
    elif len(leaders) > 1:
        named = " and ".join(sorted(cluster.name_of(each) for each in leaders))
        advice = "run holdfast doctor again; if it stays so, the members do not reach each other"
        yield Finding("leader", WARNING, f"the members name different leaders: {named}", advice)
    elif gone := [member for member in cluster.voters if member.id in leaders and member.look.why]:
        message = f"{_names(gone)} leads and does not answer: no lock works until the others have chosen another leader"
        yield Finding("leader", WARNING, message, "run holdfast doctor again in a few seconds")
    elif cut_off:
        leads = f"{cluster.name_of(*leaders)} leads"
        message = f"{leads}, but there is no leader for {_names(cut_off)}, so no lock works there"
        yield Finding("leader", WARNING, message, "check the network between these members and the leader")
    else:
        agree = ", and each member says so" if len(asked) > 1 else ""
        yield Finding("leader", OK, f"{cluster.name_of(*leaders)} leads{agree}")


def version(cluster: Cluster) -> Findings:
    found = {member.name: _version(status) for member, status in cluster.asked}
    known = [each for each in found.values() if each is not None]
    for member, status in cluster.asked:
        if found[member.name] is None:
            text = shown(status.version, _LONGEST)
            advice = "Holdfast needs etcd 3.4 or newer: see what is installed there"
            yield Finding("version", UNCHECKED, f"not checked: {member.name} calls its version {text!r}", advice)
    if not known:
        return
    oldest = min(known)
    text = f"etcd {'.'.join(map(str, oldest))}"
    if oldest < OLDEST:
        yield Finding("version", DANGER, f"it is {text}", "Holdfast needs etcd 3.4 or newer")
    elif oldest in CORRUPTING:
        message = f"it is {text}: a member that is killed under load can lose writes, and locks with them"
        yield Finding("version", WARNING, message, "upgrade to 3.5.5 or newer")
    elif oldest < CRASHING:
        message = f"it is {text}: a member can crash when a client leaves during a request"
        yield Finding("version", WARNING, message, "upgrade to 3.5.5 or newer (docs/etcd.md)")
    else:
        yield Finding("version", OK, f"it is {text}")
    if len(set(known)) > 1:
        each = ", ".join(f"{name}: {'.'.join(map(str, one))}" for name, one in found.items() if one is not None)
        yield Finding("version", NOTE, f"the members run different versions ({each})", "finish the upgrade")


def database(cluster: Cluster) -> Findings:
    """Whether the database will soon be full: then etcd grants no lock, and raises an alarm."""
    if any(alarm.kind == "NOSPACE" for alarm in cluster.alarms or ()):
        return  # it is full, whatever its quota is: see the alarms
    member, status = max(cluster.asked, key=lambda each: each[1].size / (each[1].quota or DEFAULT_QUOTA))
    quota = status.quota or DEFAULT_QUOTA
    largest = f"{status.size:,} of {quota:,} bytes"
    nearly_full = status.size > NEARLY_FULL * quota
    if not status.quota:
        told = shown(status.version, _LONGEST)
        largest += f" (etcd's default quota is assumed, because {told} does not tell its own)"
    if not nearly_full:
        yield Finding("database", OK, f"it uses {largest}")
        return
    advice = f"etcdctl defrag --cluster frees {status.size - status.in_use:,} bytes; or compact, or raise the quota"
    if status.quota:
        message = f"it is nearly full: {member.name} uses {largest}. A full one grants no lock"
        yield Finding("database", WARNING, message, advice)
    else:
        advice = f"compare it with --quota-backend-bytes: a full one grants no lock. {advice}"
        yield Finding(
            "database", UNCHECKED, f"not checked whether it is nearly full: {member.name} uses {largest}", advice
        )


def alarms(cluster: Cluster) -> Findings:
    if cluster.alarms is None:
        yield Finding("alarms", UNCHECKED, "not checked: this user may not ask for alarms", _WANTS_ROOT)
    elif not cluster.alarms:
        yield Finding("alarms", OK, "no alarm is raised")
    for kind in sorted({alarm.kind for alarm in cluster.alarms or ()}):
        raised = ", ".join(sorted(cluster.name_of(each.member) for each in cluster.alarms or () if each.kind == kind))
        message, advice = f"alarm {shown(kind, _LONGEST)} of {raised}", "see its log"
        if kind == "NOSPACE":
            revision = max((status.revision for _, status in cluster.asked), default=0) or "REVISION"
            message += ": the database is full, so no lock is granted. Holders go on"
            repair = f"etcdctl compact {revision} && etcdctl defrag --cluster && etcdctl alarm disarm"
            advice = f"{repair}; if it stays full, raise --quota-backend-bytes"
        elif kind == "CORRUPT":
            message += ": members have different data, so a lock can have two holders"
            advice = "find the odd one by etcdctl endpoint hashkv --cluster, replace it, then etcdctl alarm disarm"
        yield Finding("alarms", DANGER, message, advice)


def clock(cluster: Cluster) -> Findings:
    """No lock depends on the time of day: a lease of etcd is counted by a clock that does not jump."""
    told = [(member.look.ahead, member) for member, status in cluster.asked if status.date is not None]
    if not told:
        yield Finding("clock", NOTE, "no member tells its time of day; no lock depends on it")
        return
    ahead, member = max(told, key=lambda each: abs(each[0]))
    if abs(ahead) <= LARGEST_SKEW:
        yield Finding("clock", OK, "the clocks of its members and of this machine differ by less than 2 s")
        return
    side = "ahead of" if ahead > 0 else "behind"
    message = f"the clock of {member.name} is {rounded(abs(ahead))} s {side} this machine's"
    yield Finding("clock", NOTE, message, "set both by NTP. Locks do not depend on it; certificates and logs do")


def _version(status: MemberStatus) -> tuple[int, int, int] | None:
    found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", status.version)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _names(some: list[Member]) -> str:
    return ", ".join(member.name for member in some)


def findings_of(cluster: Cluster) -> Findings:
    yield from members(cluster)
    if cluster.asked:
        for check in (leader, version, database, clock):
            yield from check(cluster)
    else:
        message = "not checked: leader, version, database and clock, which no member tells this user"
        yield Finding("status", UNCHECKED, message, _WANTS_ROOT)
    yield from alarms(cluster)
