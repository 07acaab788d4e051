"""What the error replies of etcd mean: whether they go away, and whether the request may have taken effect.

Invariant. A reply counts as "not executed" only if etcd refuses the request before it gives it to the cluster.
"database space exceeded" does not: the member that finds the quota used up executes the request, and then answers so.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.errors import Unavailable
from holdfast.protocol.effects import StepFailed

SPACE_EXCEEDED: Final = "space exceeded"  # part of a message
DENIED: Final = "this user may not do that"
_CREDENTIALS: Final = "Check user and password in the URL: etcd://user:password@host"


class Refusal(NamedTuple):
    part: str  # of the message
    what: str
    advice: str
    passes: bool  # it goes away
    unknown: bool  # the request may have taken effect


REFUSALS: Final = (
    Refusal(
        "no leader", "its cluster has no leader", "A majority of the members must be up and connected", True, False
    ),
    Refusal("leader changed", "its cluster has just changed its leader", "Try again in a moment", True, True),
    Refusal(
        "request timed out", "its cluster did not agree in time", "A majority of the members must be up", True, True
    ),
    Refusal("too many requests", "it is overloaded", "Try again in a moment, or with fewer clients", True, False),
    Refusal(
        SPACE_EXCEEDED,
        "its database is full",
        "Compact and defragment it, then clear the alarm NOSPACE",
        True,
        True,
    ),
    Refusal("server stopped", "it is being stopped", "Try again in a moment", True, True),
    Refusal("not capable", "it is starting", "Try again in a moment", True, False),
    Refusal("learner", "it is a learner and serves no requests", "Name the voting members in the URL", False, False),
    Refusal("user name is empty", "it wants a user and a password", _CREDENTIALS, False, False),
    Refusal("authentication failed", "it refused the user or the password", _CREDENTIALS, False, False),
    Refusal("authentication is not enabled", "it has no users", "Leave user and password out of the URL", False, False),
    Refusal(
        "permission denied",
        DENIED,
        "See docs/etcd.md for the permissions that are needed",
        False,
        False,
    ),
)


def known_refusal(message: str, address: str) -> StepFailed | None:
    """The StepFailed for an error reply with this message; None if it is not one of the above."""
    for known in REFUSALS:
        if known.part in message:
            error = Unavailable({address: known.what}, known.advice)
            failed = StepFailed(error, sent=known.unknown, retry=known.passes)
            failed.answered = True
            return failed
    return None
