"""All checks of a cluster of etcd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.blocking import Client
from holdfast.cli.doctor.etcd.checks import findings_of
from holdfast.cli.doctor.etcd.cluster import look_at
from holdfast.cli.doctor.etcd.permissions import permissions
from holdfast.cli.doctor.findings import UNCHECKED, Finding
from holdfast.url import Location

TIMEOUT: Final = 5.0


def findings_on_etcd(client: Client, prefix: str, location: Location) -> Iterator[Finding]:
    """What all checks have found. StepFailed if no member answers."""
    cluster = look_at(location)
    yield from findings_of(cluster)
    if cluster.asked and not any(status.leader for _, status in cluster.asked):
        yield Finding("permissions", UNCHECKED, "not checked: no member leads", "run holdfast doctor when one does")
        return
    ((_, engine),) = client._driver.servers(TIMEOUT).items()
    yield from permissions(engine, prefix, location.settings.get("user", ""), TIMEOUT)
