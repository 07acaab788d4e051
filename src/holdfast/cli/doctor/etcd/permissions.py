"""What a user of etcd may not do that locks need, tried on a key of the doctor's own; and the role that allows it.

A role of etcd allows reading or writing of a range of keys. All names under one prefix are in one range, so a read of
that range says whether each lock can be read and watched. To write is tried on one key in it, which no lock uses.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any, Final

from holdfast.cli.doctor.findings import DANGER, OK, UNCHECKED, Finding, own_key, why
from holdfast.cli.doctor.trips import fastest, judged
from holdfast.errors import Unavailable
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.intents.inspecting import LAST
from holdfast.protocol.intents.maintenance import ReadRoles
from holdfast.protocol.intents.refusals import DENIED
from holdfast.protocol.intents.requests import Delete, Get, Program, Put, Txn, ask, grant_lease, keep_lease, perform

ROLE: Final = "holdfast"
_LEASE_S: Final = 10  # of the key, so that it ends even if the doctor is killed


def role_lines(prefix: str) -> list[str]:
    """The commands that make a role, and a user who may do what locks need, and no more."""
    return [
        f"etcdctl role add {ROLE}",
        grant_line(ROLE, prefix),
        f"etcdctl user add {ROLE}:PASSWORD",
        f"etcdctl user grant-role {ROLE} {ROLE}",
    ]


def grant_line(role: str, prefix: str) -> str:
    """To read and write: a permission for the same range replaces the one that the role has."""
    return f"etcdctl role grant-permission {shlex.quote(role)} --prefix=true readwrite {shlex.quote(prefix)}"


def permissions(engine: Any, prefix: str, user: str, timeout: float) -> Iterable[Finding]:
    """What this user may not do, with the line that allows it; and how long a round trip takes."""

    def run(program: Program) -> Any:
        return engine.run(program, timeout)

    key = own_key(prefix)
    try:
        missing = _missing(run, key, prefix)
        if missing:
            yield Finding("permissions", DANGER, *_denied(run, missing, prefix, user))
        elif user:
            yield Finding("permissions", OK, f"user {user!r} may do all that locks need")
        else:
            yield Finding("permissions", OK, "it has no users, so each client may do all that locks need")
        if "read" not in missing:
            yield judged(fastest(lambda: run(perform(Txn((), (Get(key),))))))
    except StepFailed as failed:
        advice = failed.error.advice if isinstance(failed.error, Unavailable) else ""
        if failed.answered and not failed.retry:
            yield Finding("permissions", DANGER, f"no lock works, because {why(failed)}", advice)
        else:
            yield Finding("permissions", UNCHECKED, f"not checked: {why(failed)}", advice)


def _missing(run: Any, key: str, prefix: str) -> list[str]:
    """Which accesses to the keys of locks this user lacks: read, write."""
    missing = []
    everything = Get(prefix or "\0", prefix + LAST, limit=1, keys_only=True)
    if not _may(run, perform(Txn((), (everything,)))):
        missing.append("read")
    lease = run(grant_lease(_LEASE_S)).result.lease
    if not _may(run, perform(Txn((), (Put(key, "", lease),)))):
        return [*missing, "write"]
    run(keep_lease(lease))
    run(perform(Txn((), (Delete(key),))))
    return missing


def _may(run: Any, program: Program) -> bool:
    try:
        run(program)
    except StepFailed as failed:
        if isinstance(failed.error, Unavailable) and DENIED in failed.error.causes.values():
            return False
        raise
    return True


def _denied(run: Any, missing: list[str], prefix: str, user: str) -> tuple[str, str]:
    """What this user may not do, and the line that allows it."""
    keys = f"all keys that start with {prefix!r}" if prefix else "all keys"
    # Another role may belong to other users, who must not get the permission. A role that exists is no obstacle.
    lines = [grant_line(ROLE, prefix)] if ROLE in run(ask(ReadRoles(user))) else _new_role(user, prefix)
    line = "; ".join(lines)
    hint = "give the prefix of your lock names with --prefix, or run: " if not prefix else ""
    return f"user {user!r} may not {' and '.join(missing)} {keys}", f"{hint}{line}"


def _new_role(user: str, prefix: str) -> list[str]:
    make, grant, *_ = role_lines(prefix)
    return [make, grant, f"etcdctl user grant-role {shlex.quote(user)} {ROLE}"]
