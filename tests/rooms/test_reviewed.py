"""What a review of rooms has found."""

from __future__ import annotations

import threading
from typing import Any

import holdfast
from holdfast.lease import ENDED


class _Interleaving:
    """What an object remembers, and while it is looked at another thread acquires."""

    def __init__(self, semaphore: Any) -> None:
        self._semaphore = semaphore
        self._seen = False
        self.acquired: list[Any] = []

    @property
    def phase(self) -> str:
        if not self._seen:
            self._seen = True
            other = threading.Thread(target=lambda: self.acquired.append(self._semaphore.acquire()))
            other.start()
            other.join()
        return ENDED


def test_what_others_acquire_meanwhile_is_not_forgotten_with_what_has_ended(client: holdfast.Client) -> None:
    semaphore = client.semaphore("a", 1000)
    meanwhile: Any = _Interleaving(semaphore)
    semaphore._leases[meanwhile] = meanwhile
    leases = [semaphore.acquire() for _ in range(20)]
    assert len(meanwhile.acquired) == 1, "so it was looked through"
    for _ in leases + meanwhile.acquired:
        semaphore.release()
    assert not any(lease.held for lease in leases + meanwhile.acquired)
