"""Which server a client uses behind Sentinels: a function of what the Sentinels say and what the client knows.

Invariant. Two Sentinels that have heard of the same decision send their clients to the same server. A client that has
followed a decision goes back to an earlier primary only if most Sentinels name an earlier one, and the server of that
decision says that it is a replica, or no Sentinel has named that server for ``GO_BACK_AFTER``.

The Sentinels number their decisions (the *epoch*), and ``SENTINEL MASTERS`` has that number. But during a failover the
Sentinel that leads it still lists the old primary there, already with the new number, from the promotion of a replica
until all other replicas follow it; a replica that hangs makes that half a minute. ``SENTINEL GET-MASTER-ADDR-BY-NAME``
has the new address from the promotion on, but no number. So both are asked, the address first, and this module puts the
two answers together:

    listed server                address        this means
    ---------------------------  -------------  ------------------------------------------------------------
    not replaced                 the same       no failover, or none that has promoted a replica: follow it
    replaced, failover goes on   another one    follow the address; the flags of MASTERS describe the old server
    replaced, failover goes on   the same       a replica was promoted between the two answers: ask again
    not replaced                 another one    a failover ended between the two answers: ask again
    replaced                     not permitted  the new primary is not known here: ask another Sentinel

Atomic: each answer, but not both together. The two are sent in one go, and the table covers what can happen in between.

Why not the address alone? Without a number, a Sentinel that has not heard of a failover could not be told from one that
has.

Why wait before going back? Sentinels that name an earlier decision were set up again, so their numbers have restarted;
or they have not heard of the latest decision, because the Sentinel that led the failover died or is cut off. Their
answers are the same. Sentinels that have not heard demote the new primary within about 20 s: they ask it for its role
every 10 s, and wait 8 s for news before they act.

Why not go back when the new primary does not answer? One fault may silence it and the Sentinel that knows it.

Late replies. A primary that was paused executes, when it resumes, what was sent to it before, and takes itself for a
primary until a Sentinel demotes it. So a client asks a Sentinel not only before a step, if it has not asked for
``RECHECK_AFTER``, but also before it uses a reply that took longer than that (``is_late``).
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

Endpoint: TypeAlias = tuple[str, int]

FOLLOW: Final = "follow"
BEHIND: Final = "behind"  # it names the primary of an earlier decision than the client knows
ASK_AGAIN: Final = "ask again"
DOWN: Final = "down"
REPLACED: Final = "replaced"  # by a server that this user may not ask for

GO_BACK: Final = "go back"
STAY: Final = "stay"
UNKNOWN: Final = "unknown"  # too few Sentinels have answered
GO_BACK_AFTER: Final = 30.0  # seconds
RECHECK_AFTER: Final = 1.0  # seconds


class Sighting(NamedTuple):
    """What one Sentinel says about a service."""

    address: Endpoint | None  # by GET-MASTER-ADDR-BY-NAME; None if this user may not use that
    listed: Endpoint  # by MASTERS, like all that follows
    epoch: int
    failing_over: bool = False  # this Sentinel leads a failover
    promoted: bool = False  # in which a replica has been promoted
    up: bool = True  # the listed server is up, as far as this Sentinel knows


class Choice(NamedTuple):
    verdict: str
    endpoint: Endpoint
    epoch: int


def choose(seen: Sighting, known_epoch: int) -> Choice:
    """What to do about this answer; the endpoint and its epoch are meant to be used if the verdict is FOLLOW."""
    endpoint = seen.address or seen.listed
    if seen.address is None and seen.promoted:
        verdict = REPLACED
    elif endpoint == seen.listed:
        verdict = ASK_AGAIN if seen.promoted else FOLLOW if seen.up else DOWN
    else:
        verdict = FOLLOW if seen.failing_over else ASK_AGAIN
    if verdict is FOLLOW and seen.epoch < known_epoch:
        verdict = BEHIND
    return Choice(verdict, endpoint, seen.epoch)


def settle(behind: int, sentinels: int, unconfirmed_for: float, *, demoted: bool) -> str:
    """What to do if no Sentinel can be followed, and ``behind`` of them are BEHIND.

    ``unconfirmed_for``: the seconds since a Sentinel named the primary that the client follows. ``demoted``: since
    then, that server has said that it is a replica.
    """
    if 2 * behind <= sentinels:
        return UNKNOWN
    return GO_BACK if demoted or unconfirmed_for >= GO_BACK_AFTER else STAY


def is_late(waited: float) -> bool:
    """Whether a reply comes so late that its server may have been replaced before it was executed."""
    return waited > RECHECK_AFTER
