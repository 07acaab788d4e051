"""Locks on etcd, beyond acquire and release: what a client does with a hold, and what its requests may meet meanwhile.

In "again" the giver takes its own ticket back if no other client was faster: as a second process of its kind would. The
keys that it has handed over have its name, so only the invariants of holders are judged there.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.subjects.etcd import etcd_config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.lab.subjects.scripted import visits_config

ETCD_EXTENDED: Final = partial(visits_config, etcd_config, "a+htr", "tr", leaves_us=())
ETCD_AGAIN: Final = partial(visits_config, etcd_config, "ahptr", "tsr", leaves_us=AT_ONCE)
ETCD_FAILS: Final = partial(visits_config, etcd_config, "aksr", "ar", stay_us=5_600_000, leaves_us=())
ETCD_TRIES: Final = partial(
    visits_config, partial(etcd_config, semaphore_config, permits=1), "0sr", "0r", leaves_us=AT_ONCE
)
ETCD_READER: Final = partial(
    visits_config, partial(etcd_config, partial(rwlock_config, "WRW")), "adsr", "0r", "ar", leaves_us=()
)
