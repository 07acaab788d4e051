"""``holdfast doctor`` on Redis 7.0, whose errors about permissions in scripts read differently."""

from __future__ import annotations

import pytest

from holdfast.cli.doctor.findings import DANGER, NOTE
from holdfast.cli.doctor.permissions import rules_of_operator
from tests.cli.test_doctor import findings
from tests.cli.test_doctor_acl import SINGLE
from tests.fleets import find_redis
from tests.servers import Server


def test_redis_before_7_2_tells_in_its_own_way_what_scripts_may_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    rules = [rule for rule in rules_of_operator("", SINGLE) if rule not in ("+zadd", "+lpush")]
    with Server(binary=find_redis()) as server, server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">secret", *rules)
        code, found = findings(capsys, f"redis://app:secret@127.0.0.1:{server.port}/0")
    assert code == 1
    advice = {finding["advice"]: finding["level"] for finding in found["permissions"]}
    assert advice == {"ACL SETUSER app +zadd": DANGER, "ACL SETUSER app +lpush": NOTE}
