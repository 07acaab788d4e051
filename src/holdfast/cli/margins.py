"""How long before the end of a lease the command of ``holdfast run`` must end."""

from __future__ import annotations

from typing import Final, NamedTuple

LONGEST_NOTICE_S: Final = 10.0
LONGEST_GRACE_S: Final = 2.0


class Margins(NamedTuple):
    """Seconds before the end of the lease at which the command is signalled."""

    notice: float  # SIGTERM
    last: float  # SIGKILL
    grace: float  # between the two, if the lease is lost already


def margins(ttl: float) -> Margins:
    return Margins(min(ttl / 3, LONGEST_NOTICE_S), min(ttl / 10, 1.0), min(ttl / 3, LONGEST_GRACE_S))
