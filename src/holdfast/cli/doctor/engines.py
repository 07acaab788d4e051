"""Which checks are for which engine, and which rules a user needs there."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.blocking import Client
from holdfast.cli.doctor import examination
from holdfast.cli.doctor.etcd.examination import findings_on_etcd
from holdfast.cli.doctor.findings import Finding
from holdfast.cli.doctor.memcached import findings_on_memcached
from holdfast.url import Location


def findings_on(client: Client, prefix: str, location: Location) -> Iterable[Finding]:
    """What all checks of this engine have found. StepFailed if a server does not answer."""
    if location.engine == "etcd":
        return findings_on_etcd(client, prefix, location)
    if location.engine == "memcached":
        return findings_on_memcached(client)
    return examination.findings_on(client, prefix, location)
