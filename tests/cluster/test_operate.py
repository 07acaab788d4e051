"""The commands for operators on a cluster: all primaries are looked at."""

from __future__ import annotations

import json

import pytest

import holdfast
from holdfast.names import slot_of
from tests.cli.test_operate import call
from tests.fleet_cluster import ClusterFleet


def test_locks_of_all_primaries_are_listed_and_broken(
    fleet: ClusterFleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", fleet.url)
    with holdfast.connect(fleet.url) as client:
        names = [f"operate:{number}" for number in range(12)]
        leases = {name: client.lock(name, label="stuck").acquire() for name in names}
        assert len({slot_of(name) * 3 // 16384 for name in names}) == 3, "on each of three primaries"
        listed = json.loads(call(capsys, "ls", "--json", "operate:*")[1])
        assert [info["name"] for info in listed] == sorted(names)
        for name in names[:3]:
            assert call(capsys, "break", name, "--reason", "it is stuck", "--yes")[0] == 0
            assert leases[name].lost.wait(20)
            assert leases[name].reason.endswith(": it is stuck")
            assert json.loads(call(capsys, "history", name, "--json")[1])[0]["reason"] == "it is stuck"
        assert len(json.loads(call(capsys, "ls", "--json", "operate:*")[1])) == 9
        for name, lease in leases.items():
            if name in names[:3]:
                with pytest.raises(holdfast.LeaseLost):
                    lease.release()
            else:
                lease.release()


def test_several_names_of_several_slots_are_inspected_by_their_own_fences(fleet: ClusterFleet) -> None:
    with holdfast.connect(fleet.url) as client, holdfast.connect(fleet.url) as operator:
        lease = client.lock("operate:a", "operate:b", "operate:c").acquire()
        for name, fence in lease.fences.items():
            info = operator.inspect(name)
            assert info is not None
            assert info.holders[0].fence == fence
        operator.break_lock("operate:b", fence=lease.fences["operate:b"], reason="it is stuck")
        assert lease.lost.wait(20)
        assert lease.reason.endswith(": it is stuck")
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_the_doctor_looks_at_each_primary(fleet: ClusterFleet, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json", fleet.url)
    findings = json.loads(out)["findings"]
    assert code in (0, 1)
    assert len({finding["server"] for finding in findings if finding["check"] == "eviction"}) == 3
    assert [finding["level"] for finding in findings if finding["check"] == "permissions"] == ["ok"]
