"""``holdfast doctor`` on etcd: on broken clusters, and on a server that answers what another etcd would."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from holdfast.cli.doctor.etcd.cluster import url_of as url_of_member
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING
from holdfast.cli.doctor.trips import judged
from holdfast.url import locate
from tests.cli.shell import eventually
from tests.cli.test_doctor import findings, level_of
from tests.cli.test_operate import call
from tests.etcd.faulty_server import FaultyServer, is_whole_http
from tests.etcd.test_late_requests import fill
from tests.fleet_etcd import EtcdFleet, Member, coded, find_etcd
from tests.servers import free_port

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture
def old_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The etcd of these tests is one that the doctor warns of."""
    monkeypatch.setattr("holdfast.cli.doctor.etcd.checks.CORRUPTING", ())
    monkeypatch.setattr("holdfast.cli.doctor.etcd.checks.CRASHING", (3, 4, 0))


@pytest.fixture
def single() -> Iterator[EtcdFleet]:
    with EtcdFleet(1) as fleet:
        yield fleet


@pytest.fixture
def guarded(single: EtcdFleet) -> EtcdFleet:
    """A cluster with users; app may use the keys of app: only, reader may read them, nobody has no role."""
    for name in ("root", "app", "reader", "nobody"):
        single.ask("/v3/auth/user/add", {"name": name, "password": "secret"})
    for name, access in (("root", ""), ("app", "READWRITE"), ("reader", "READ")):
        single.ask("/v3/auth/role/add", {"name": name})
        single.ask("/v3/auth/user/grant", {"user": name, "role": name})
        keys = {"permType": access, "key": coded("app:"), "range_end": coded("app;")}
        if access:
            single.ask("/v3/auth/role/grant", {"name": name, "perm": keys})
    single.ask("/v3/auth/enable", {})
    return single


def url_of(fleet: EtcdFleet, user: str, password: str = "secret") -> str:
    return fleet.url.replace("://", f"://{user}:{password}@")


def place(member: Member) -> str:
    return f"{member.name} (127.0.0.1:{member.client_port})"


def etcdctl(fleet: EtcdFleet, line: str) -> None:
    """Run commands that the doctor advises."""
    where = f"--endpoints=127.0.0.1:{fleet.members[0].client_port}"
    user = ["--user=root:secret"] if " user " in line or " role " in line else []
    for command in line.split(" && "):
        words = shlex.split(command)
        assert words[0] == "etcdctl"
        binary = Path(find_etcd()).parent / "etcdctl"
        subprocess.run([binary, where, *user, *words[1:]], check=True, capture_output=True, timeout=30)


def only(found: Found, check: str) -> dict[str, Any]:
    (finding,) = found[check]
    return finding


@pytest.mark.usefixtures("old_is_good")
def test_nothing_threatens_locks_on_a_good_cluster(fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, fleet.url)
    assert code == 0
    assert set(found) == {
        *("members", "leader", "version", "database", "clock"),
        *("alarms", "permissions", "round trip"),
    }
    assert {finding["level"] for some in found.values() for finding in some} == {OK}
    assert only(found, "members")["message"] == "3 members, and all answer: 1 may fail"
    leads = only(found, "leader")["message"]
    assert leads == f"{place(fleet.leader())} leads, and each member says so"
    assert "default quota is assumed, because 3.5.1 does not tell its own)" in only(found, "database")["message"]
    assert only(found, "permissions")["message"] == "it has no users, so each client may do all that locks need"
    assert re.fullmatch(r"a round trip takes [\d.]+ ms", only(found, "round trip")["message"])
    assert fleet.client().range("holdfast:doctor:") == {}
    code, out, err = call(capsys, "doctor", fleet.url)
    assert "✓ alarms: no alarm is raised" in out
    assert "nothing there breaks locks" in err


def test_an_etcd_that_can_lose_writes_is_a_warning(fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, fleet.url)
    assert code == 1
    message = "it is etcd 3.5.1: a member that is killed under load can lose writes, and locks with them"
    assert (only(found, "version")["level"], only(found, "version")["message"]) == (WARNING, message)


def test_a_member_that_is_down_is_named(fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    down = fleet.members[1]
    down.kill()
    code, found = findings(capsys, fleet.url)
    assert code == 1
    message = f"2 of 3 members answer, and none of them may fail. No answer from {place(down)}: nothing listens there"
    assert (only(found, "members")["level"], only(found, "members")["message"]) == (WARNING, message)


def test_a_member_that_hangs_is_named(fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    hung = fleet.members[2]
    hung.pause()
    found = findings(capsys, fleet.url)[1]
    assert f"{place(hung)}: it did not answer within 2 s" in only(found, "members")["message"]


def test_members_that_the_url_leaves_out_are_found_and_named(
    fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = fleet.members
    found = findings(capsys, f"etcd://127.0.0.1:{one.client_port}")[1]
    assert level_of(found, "members") == NOTE
    (note,) = (each for each in found["members"] if each["level"] == NOTE)
    assert place(two) in note["message"]
    assert place(three) in note["message"]
    assert all(str(each.client_port) in note["advice"] for each in fleet.members)
    three.kill()
    found = findings(capsys, f"etcd://127.0.0.1:{one.client_port}")[1]
    assert level_of(found, "members") == UNCHECKED, "its address may be one that only members can reach"


def test_an_address_of_the_url_that_is_no_member_is_a_warning(
    fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    found = findings(capsys, f"{fleet.url},127.0.0.1:{port}")[1]
    assert level_of(found, "members") == WARNING
    message = f"the URL names 127.0.0.1:{port}, which does not answer: nothing listens there"
    assert message in [each["message"] for each in found["members"]]


def test_without_a_majority_it_still_says_who_is_down(fleet: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    alive, *down = fleet.members
    for member in down:
        member.kill()
    eventually(lambda: "leader" not in fleet.ask("/v3/maintenance/status", {}, alive), "the loss of the leader")
    code, found = findings(capsys, fleet.url)
    assert code == 1
    leads = only(found, "leader")
    assert (leads["level"], leads["message"]) == (DANGER, "no member leads, so no lock works")
    assert leads["advice"] == "2 of 3 members must be up and reach each other"
    assert only(found, "members")["message"].startswith("1 of 3 members answer, and locks need 2. ")
    assert only(found, "permissions")["message"] == "not checked: no member leads"
    alive.pause()
    code, out, err = call(capsys, "doctor", fleet.url)
    assert (code, out) == (69, "")
    assert err.count("nothing listens there") == 2
    assert "it did not answer within 2 s" in err


def test_one_member_and_two_tolerate_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    says = [
        "there is only one member: while it is down, no lock works",
        "2 members, and none may fail: locks need them all",
    ]
    for count, message in enumerate(says, 1):
        with EtcdFleet(count) as fleet:
            found = findings(capsys, fleet.url)[1]
        assert (only(found, "members")["level"], only(found, "members")["message"]) == (WARNING, message)


def test_a_url_of_two_clusters_is_a_danger(
    fleet: EtcdFleet, single: EtcdFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, f"{fleet.url},{single.url.partition('://')[2]}")[1]
    assert level_of(found, "members") == DANGER
    assert "the URL names members of 2 clusters" in [each["message"] for each in found["members"]]


def test_a_learner_is_noted(single: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    learner = {"peerURLs": [f"http://127.0.0.1:{free_port()}"], "isLearner": True}
    single.ask("/v3/cluster/member/add", learner)
    notes = [each["message"] for each in findings(capsys, single.url)[1]["members"] if each["level"] == NOTE]
    assert len(notes) == 1
    assert "is a learner: it has no vote yet" in notes[0]


def test_a_full_database_is_a_danger_and_the_advice_repairs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with EtcdFleet(1, "--quota-backend-bytes=200000") as fleet:
        fill(fleet)
        code, found = findings(capsys, fleet.url)
        assert code == 1
        alarm = only(found, "alarms")
        says = f"alarm NOSPACE of {place(fleet.members[0])}: the database is full, so no lock is granted. Holders go on"
        assert (alarm["level"], alarm["message"]) == (DANGER, says)
        assert only(found, "permissions")["message"] == "not checked: its database is full"
        assert "database" not in found, "that it uses little of the default quota would be misleading"
        fleet.client().delete("ballast")
        etcdctl(fleet, findings(capsys, fleet.url)[1]["alarms"][0]["advice"].partition(";")[0])
        found = findings(capsys, fleet.url)[1]
        assert level_of(found, "alarms") == OK
        assert level_of(found, "permissions") == OK


def test_a_user_who_may_use_the_prefix_lacks_nothing(guarded: EtcdFleet, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, "--prefix", "app:", url_of(guarded, "app"))[1]
    assert only(found, "permissions")["message"] == "user 'app' may do all that locks need"
    assert "round trip" in found


@pytest.mark.parametrize(
    ("user", "prefix", "message"),
    [
        ("app", "", "user 'app' may not read and write all keys"),
        ("reader", "app:", "user 'reader' may not write all keys that start with 'app:'"),
        ("nobody", "app:", "user 'nobody' may not read and write all keys that start with 'app:'"),
    ],
)
def test_what_a_user_may_not_do_is_named_and_the_advice_allows_it(
    guarded: EtcdFleet, capsys: pytest.CaptureFixture[str], user: str, prefix: str, message: str
) -> None:
    code, found = findings(capsys, "--prefix", prefix, url_of(guarded, user))
    assert code == 1
    denied = only(found, "permissions")
    assert (denied["level"], denied["message"]) == (DANGER, message)
    hint, _, lines = denied["advice"].rpartition("or run: ")
    assert ("--prefix" in hint) == (not prefix)
    roles = [line for line in lines.split("; ") if "role add" in line or "grant-permission" in line]
    assert all(" holdfast" in line for line in roles), "a role of its own: another one may be that of other users"
    for line in lines.split("; "):
        etcdctl(guarded, line)
    found = findings(capsys, "--prefix", prefix, url_of(guarded, user))[1]
    assert only(found, "permissions")["message"] == f"user {user!r} may do all that locks need"


@pytest.mark.parametrize("prefix", ["", "app:"])
def test_the_user_that_is_printed_may_do_all(
    guarded: EtcdFleet, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    out = json.loads(call(capsys, "doctor", "--acl", "--json", "--prefix", prefix, guarded.url)[1])
    for line in out["program"].splitlines():
        etcdctl(guarded, line)
    url = url_of(guarded, "holdfast", "PASSWORD")
    assert level_of(findings(capsys, "--prefix", prefix, url)[1], "permissions") == OK
    with holdfast.connect(url, namespace=prefix) as client, client.semaphore("pool", 2), client.lock("a", "b"):
        assert {info.name for info in client.locks()} == {"pool", "a", "b"}


@pytest.mark.parametrize(
    ("user", "why"),
    [("app:wrong@", "it refused the user or the password"), ("", "it wants a user and a password")],
)
def test_a_user_who_is_refused_is_a_danger(
    guarded: EtcdFleet, capsys: pytest.CaptureFixture[str], user: str, why: str
) -> None:
    code, found = findings(capsys, guarded.url.replace("://", f"://{user}"))
    assert code == 1
    assert only(found, "permissions")["message"] == f"no lock works, because {why}"
    assert level_of(found, "leader") == OK, "members answer without a user"


def test_the_options_of_the_url_are_used_for_each_member(
    certificate: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = certificate
    with EtcdFleet(1, "--cert-file", file, "--key-file", key, scheme="etcds") as fleet:
        fleet.ask("/v3/auth/role/add", {"name": "root"})
        for name in ("root", "app"):
            fleet.ask("/v3/auth/user/add", {"name": name, "password": "a/secret@word"})
            fleet.ask("/v3/auth/user/grant", {"user": name, "role": "root"})
        fleet.ask("/v3/auth/enable", {})
        url = fleet.url.replace("127.0.0.1", "localhost").replace("://", "://app:a%2Fsecret%40word@")
        found = findings(capsys, f"{url}?ssl_ca_certs={file}")[1]
        assert (level_of(found, "leader"), level_of(found, "permissions")) == (OK, OK)
        location = locate(f"{url}?ssl_ca_certs={file}&fence_floor=5")
        address = url.rpartition("@")[2]
        assert url_of_member(location, address, with_user=True) == f"{url}?ssl_ca_certs={quote(file, safe='')}"
        assert "secret" not in url_of_member(location, address, with_user=False)
        code, out, err = call(capsys, "doctor", url)
        assert (code, out) == (69, "")
        assert "its TLS certificate is not trusted" in err


# What an etcd answers that is not at hand.


STATUS = "/v3/maintenance/status"


class Pretender:
    """A server in front of a member, which changes its answers to requests of one path."""

    def __init__(self, fleet: EtcdFleet, member: Member) -> None:
        self.path = STATUS
        self.changes: dict[str, Any] = {}
        self._fleet, self._member = fleet, member
        self.server = FaultyServer(member.client_port, is_whole_http)
        self.server.fault = self._answer
        self.url = f"etcd://127.0.0.1:{self.server.port}"

    def _answer(self, client: socket.socket, request: bytes) -> bool:
        if f"POST {self.path} ".encode() not in request:
            return False
        status = "403 Forbidden" if "error" in self.changes else "200 OK"
        body = json.dumps(self._fleet.ask(self.path, {}, self._member) | self.changes)
        head = f"HTTP/1.1 {status}\r\nDate: {self.changes.get('date', formatdate(usegmt=True))}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return True


@pytest.fixture
def pretender(single: EtcdFleet) -> Iterator[Pretender]:
    found = Pretender(single, single.members[0])
    with found.server:
        yield found


@pytest.fixture
def other(pretender: Pretender) -> Callable[[str, dict[str, Any]], str]:
    """Change the answers to that path; the URL to ask."""

    def change(path: str, changes: dict[str, Any]) -> str:
        pretender.path, pretender.changes = path, changes
        return pretender.url

    return change


@pytest.fixture
def one_of_three(fleet: EtcdFleet) -> Iterator[tuple[Pretender, str]]:
    """The first member of a cluster changes its answers; and the URL of all members."""
    found = Pretender(fleet, fleet.members[0])
    with found.server:
        yield found, ",".join([found.url, *(f"127.0.0.1:{member.client_port}" for member in fleet.members[1:])])


@pytest.mark.parametrize(
    ("version", "level", "message"),
    [
        ("3.3.27", DANGER, "it is etcd 3.3.27"),
        ("3.4.20", WARNING, "it is etcd 3.4.20: a member can crash when a client leaves during a request"),
        ("3.5.2", WARNING, "it is etcd 3.5.2: a member that is killed under load can lose writes"),
        ("3.5.21", OK, "it is etcd 3.5.21"),
        ("3.6.0-rc.1", OK, "it is etcd 3.6.0"),
        ("new\x1b", UNCHECKED, "calls its version 'new\\\\x1b'"),
    ],
)
def test_each_version_is_judged(
    other: Callable[..., str], capsys: pytest.CaptureFixture[str], version: str, level: str, message: str
) -> None:
    found = findings(capsys, other(STATUS, {"version": version}))[1]
    assert level_of(found, "version") == level
    assert message in only(found, "version")["message"]


def test_members_of_different_versions_are_noted(
    fleet: EtcdFleet, one_of_three: tuple[Pretender, str], capsys: pytest.CaptureFixture[str]
) -> None:
    newer, url = one_of_three
    newer.changes = {"version": "3.5.21"}
    found = findings(capsys, url)[1]
    (note,) = (each["message"] for each in found["version"] if each["level"] == NOTE)
    assert note.startswith("the members run different versions (")
    assert f"m0 (127.0.0.1:{newer.server.port}): 3.5.21" in note
    assert f"{place(fleet.members[1])}: 3.5.1" in note


@pytest.mark.parametrize(
    ("leader", "message"),
    [
        ("", r"m\d \(.*\) leads, but there is no leader for m0 \(127.0.0.1:\d+\), so no lock works there"),
        ("17", r"the members name different leaders: m\d \(.*\) and member 17"),
    ],
)
def test_members_that_do_not_agree_on_the_leader_are_a_warning(
    one_of_three: tuple[Pretender, str], capsys: pytest.CaptureFixture[str], leader: str, message: str
) -> None:
    odd, url = one_of_three
    odd.changes = {"leader": leader}
    found = only(findings(capsys, url)[1], "leader")
    assert found["level"] == WARNING
    assert re.fullmatch(message, found["message"])


@pytest.mark.parametrize(
    ("sizes", "level", "message"),
    [
        ({"dbSizeQuota": "1000000", "dbSize": "900000"}, WARNING, "uses 900,000 of 1,000,000 bytes. A full one grants"),
        ({"dbSizeQuota": "1000000", "dbSize": "500000"}, OK, "it uses 500,000 of 1,000,000 bytes"),
        ({"dbSize": str(2**31)}, UNCHECKED, "not checked whether it is nearly full"),
    ],
)
def test_a_database_that_is_nearly_full_is_a_warning(
    other: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    sizes: dict[str, str],
    level: str,
    message: str,
) -> None:
    found = findings(capsys, other(STATUS, sizes))[1]
    assert level_of(found, "database") == level
    assert message in only(found, "database")["message"]


def test_members_with_different_data_are_a_danger(
    other: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, other(STATUS, {"errors": ["memberID:17 alarm:CORRUPT "]}))[1]
    alarm = only(found, "alarms")
    says = "alarm CORRUPT of member 17: members have different data, so a lock can have two holders"
    assert (alarm["level"], alarm["message"]) == (DANGER, says)
    assert "etcdctl endpoint hashkv --cluster" in alarm["advice"]


@pytest.mark.parametrize(("seconds", "side"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_clock_that_is_wrong_is_noted(
    other: Callable[..., str], capsys: pytest.CaptureFixture[str], seconds: int, side: str
) -> None:
    url = other(STATUS, {"date": formatdate(time.time() + seconds, usegmt=True)})
    found = only(findings(capsys, url)[1], "clock")
    assert found["level"] == NOTE, "no lock depends on it"
    assert f"s {side} this machine's" in found["message"]
    found = only(findings(capsys, other(STATUS, {"date": "noon"}))[1], "clock")
    assert found["message"] == "no member tells its time of day; no lock depends on it"


def test_a_status_that_only_root_may_see_is_not_taken_as_good(
    other: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    denied = {"error": "etcdserver: permission denied", "message": "etcdserver: permission denied"}
    found = findings(capsys, other(STATUS, denied))[1]
    status = only(found, "status")
    assert status["level"] == UNCHECKED
    assert status["message"] == "not checked: leader, version, database and clock, which no member tells this user"
    assert status["advice"].startswith("since 3.5.28 and 3.6.9, only a user with the role root may ask for this")
    assert (level_of(found, "alarms"), level_of(found, "permissions")) == (OK, OK)
    found = findings(capsys, other("/v3/cluster/member/list", denied))[1]
    assert only(found, "members")["message"] == "not checked: this user may not list the members"
    assert level_of(found, "leader") == OK


@pytest.mark.parametrize("changes", [{"dbSize": "many"}, {"errors": 5}, {"version": None, "header": 1}])
def test_a_status_that_is_none_is_said(
    other: Callable[..., str], capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    code, out, err = call(capsys, "doctor", other(STATUS, changes))
    assert (code, out) == (69, "")
    assert "it sent something that is no reply of etcd" in err


def test_a_round_trip_that_is_slow_says_which_ttls_are_too_short() -> None:
    assert judged(0.01).level == OK
    slow = judged(0.25)
    assert (slow.level, slow.message) == (NOTE, "a round trip takes 250 ms")
    assert slow.advice.startswith("give ttls of 2.5 s or more")
    assert judged(4.0).level == WARNING, "too slow for the default ttl"
