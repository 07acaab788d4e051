"""URLs of Sentinels and clusters: what they mean, what is refused, and which Sentinel is believed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel

import holdfast
from holdfast.engines.redis import sentinel
from holdfast.engines.redis.sentinel import Followed, Node, Primary, Said, Sentinels
from holdfast.engines.redis.target import resolve
from holdfast.protocol import primary
from holdfast.protocol.primary import GO_BACK_AFTER, RECHECK_AFTER, Choice, Sighting
from holdfast.url import locate, redact
from tests.servers import free_port


def test_hosts_service_and_database() -> None:
    location = locate("redis+sentinel://user:p%40ss@h1:26380,h2,[::1]:26381/my%20master/3?socket_timeout=2")
    assert location.hosts == (("h1", 26380), ("h2", 26379), ("::1", 26381))
    assert (location.engine, location.service) == ("sentinel", "my master")
    assert location.address == "redis+sentinel://h1:26380,h2:26379,[::1]:26381/my master/3"


def test_cluster_nodes() -> None:
    location = locate("rediss+cluster://:secret@h1:7000,h2:7001?replicas=1")
    assert location.hosts == (("h1", 7000), ("h2", 7001))
    assert (location.engine, location.address) == ("cluster", "rediss+cluster://h1:7000,h2:7001")
    assert location.redis_url.startswith("rediss://:secret@")
    assert location.options == {"replicas": 1}


def settings_of(url: str, *, aio: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    target = resolve(url, aio=aio)
    assert target.sentinels is not None
    return target.settings, target.sentinels._nodes[0].settings


@pytest.mark.parametrize("aio", [False, True])
def test_credentials_of_servers_and_of_sentinels_are_apart(aio: bool) -> None:
    servers, sentinels = settings_of(
        "redis+sentinel://app:one@h1/mymaster/3?sentinel_username=ops&sentinel_password=tw%40o", aio=aio
    )
    assert (servers["username"], servers["password"], servers["db"]) == ("app", "one", 3)
    assert (sentinels["username"], sentinels["password"], sentinels.get("db", 0)) == ("ops", "tw@o", 0)


@pytest.mark.parametrize("aio", [False, True])
@pytest.mark.parametrize(
    ("url", "servers", "sentinels"),
    [
        ("redis+sentinel://h1/m", False, False),
        ("rediss+sentinel://h1/m", True, True),
        ("valkeys+sentinel://h1/m", True, True),
        ("rediss+sentinel://h1/m?sentinel_ssl=false&ssl_ca_certs=/ca", True, False),
        ("redis+sentinel://h1/m?sentinel_ssl=true&sentinel_ssl_ca_certs=/ca", False, True),
    ],
)
def test_tls_is_chosen_for_both_or_for_each(url: str, servers: bool, sentinels: bool, aio: bool) -> None:
    target = resolve(url, aio=aio)
    assert target.sentinels is not None
    assert target.tls == servers
    node = target.sentinels._nodes[0]
    assert ("SSL" in node.connection_class.__name__) == sentinels
    assert (node.settings.get("ssl_ca_certs") == "/ca") == ("sentinel_ssl_ca_certs" in url)


def test_tls_files_are_for_both_unless_said_otherwise() -> None:
    servers, sentinels = settings_of("rediss+sentinel://h1/m?ssl_ca_certs=/a&ssl_certfile=/b", aio=False)
    assert servers["ssl_ca_certs"] == sentinels["ssl_ca_certs"] == "/a"
    servers, sentinels = settings_of("rediss+sentinel://h1/m?ssl_ca_certs=/a&sentinel_ssl_ca_certs=/c", aio=False)
    assert (servers["ssl_ca_certs"], sentinels["ssl_ca_certs"]) == ("/a", "/c")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://", "a host is missing"),
        ("redis+sentinel:///mymaster", "a host is missing"),
        ("redis+sentinel://h1,,h2/mymaster", "a host is missing"),
        ("redis+sentinel://h1:26379", "names no service"),
        ("redis+sentinel://h1:26379/", "names no service"),
        ("redis+sentinel://h1:26379//0", "names no service"),
        ("redis+sentinel://h1:26379/mymaster/0/1", "not /service/database"),
        ("redis+sentinel://h1:26379/mymaster/one", "not a number"),
        ("redis+sentinel://h1:port/mymaster", "host or port cannot be read"),
        ("redis+sentinel://h1:70000/mymaster", "host or port cannot be read"),
        ("redis+sentinel://h1:0/mymaster", "host or port cannot be read"),
        ("redis+sentinel://[::1:26379/mymaster", "host or port cannot be read"),
        ("redis+sentinel://h1/mymaster#0", "percent-encode"),
        ("redis+sentinel://h1/mymaster?colour=blue", "an option 'colour' that does not exist"),
        ("redis+sentinel://h1/mymaster?sentinel_colour=blue", "an option 'colour' that does not exist"),
        ("redis+sentinel://h1/mymaster?socket_timeout=soon", "socket_timeout cannot be read"),
        ("redis+sentinel://h1/mymaster?sentinel_ssl=maybe", "neither true nor false"),
        (
            "redis+sentinel://h1/mymaster?replicas=some",
            "replicas .* give a whole number from 0 to 1000000, or none",
        ),
        ("redis://h1/0?replicas=-1", "replicas .* give a whole number from 0 to 1000000, or none"),
        ("redis+cluster://h1:7000/3", "database 0 only"),
        ("redis+cluster://", "a host is missing"),
        ("redis+raft://h1", "does not know its scheme"),
    ],
)
def test_an_impossible_url_is_one_clear_line(url: str, problem: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=problem) as refused:
        holdfast.connect(url)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis+sentinel://h1:1,h2:2/m/0", "redis+sentinel://h1:1,h2:2/m/0"),
        ("redis+sentinel://u:secret@h1:1,h2:2/m/0?sentinel_password=x", "redis+sentinel://***@h1:1,h2:2/m/0?***"),
        ("redis+sentinel://u:secret", "redis+sentinel://***"),
        ("redis+sentinel://u:secret,h2:1/m", "redis+sentinel://***"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_the_address_of_a_redis_client_says_what_it_is() -> None:
    manager = redis.sentinel.Sentinel([("h1", 26379), ("h2", 26380)], password="s3kr1t", db=2)
    with holdfast.connect(manager.master_for("mymaster")) as client:
        assert repr(client) == "<holdfast.blocking.Client of redis+sentinel://h1:26379,h2:26380/mymaster/2>"
    with pytest.raises(holdfast.InvalidConfig, match="use master_for"):
        holdfast.connect(manager.slave_for("mymaster"))
    ours = redis.asyncio.sentinel.Sentinel([("h1", 26379)], ssl=True).master_for("mymaster")
    target = resolve(ours, aio=True)
    assert (target.address, target.tls) == ("rediss+sentinel://h1:26379/mymaster/0", True)


def test_sentinels_that_cannot_be_reached_are_named(connect: Any) -> None:
    ports = [free_port(), free_port()]
    url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/mymaster/0"
    with pytest.raises(holdfast.Unavailable) as refused:
        connect(url).lock("x").acquire()
    assert refused.value.causes == {f"Sentinel 127.0.0.1:{port}": "nothing listens there" for port in ports}


def test_a_server_that_is_no_sentinel_is_named(connect: Any, url: str) -> None:
    with pytest.raises(holdfast.Unavailable, match="it is no Sentinel"):
        connect(url.replace("redis://", "redis+sentinel://").replace("/0", "/mymaster/0")).lock("x").acquire()


# Which Sentinel is believed.


def state_of(port: int, epoch: int, flags: str = "master", *, address: int | None = 0, phase: str = "") -> Said:
    """``address``: the port that GET-MASTER-ADDR-BY-NAME names, if another; None if that is forbidden."""
    state = {"name": "m", "ip": "10.0.0.1", "port": str(port), "config-epoch": str(epoch), "num-other-sentinels": "2"}
    state |= {"flags": flags} | ({"failover-state": phase} if phase else {})
    return Said(None if address is None else ("10.0.0.1", address or port), {"m": state})


class Play:
    """A client's search among Sentinels that answer as told."""

    def __init__(self, count: int = 3, **options: Any) -> None:
        nodes = [Node(f"h{number}", object, {}) for number in range(count)]
        self.sentinels = Sentinels("m", nodes, **options)
        self.asked: list[str] = []
        self.moves = 0
        self.sentinels.primary.on_move.append(self._count)

    def _count(self) -> None:
        self.moves += 1

    def find(self, **answers: Any) -> tuple[str, int]:
        self.asked.clear()
        search = self.sentinels._search(3.0)
        try:
            node, _ = next(search)
            while True:
                self.asked.append(node.address)
                answer = answers[node.address]
                node, _ = search.send(answer.pop(0) if isinstance(answer, list) else answer)
        except StopIteration as found:
            endpoint: tuple[str, int] = found.value
            return endpoint


def test_the_first_sentinel_that_knows_a_primary_is_believed_and_asked_first_next_time() -> None:
    play = Play()
    answers = {"h0": TimeoutError(), "h1": state_of(7000, 1), "h2": state_of(7000, 1)}
    assert play.find(**answers) == ("10.0.0.1", 7000)
    assert play.asked == ["h0", "h1"]
    play.find(**answers)
    assert play.asked == ["h1"]


@pytest.mark.parametrize("flags", ["master,s_down", "master,o_down", "slave"])
def test_a_primary_that_is_down_is_not_used(flags: str) -> None:
    play = Play(1)
    with pytest.raises(holdfast.Unavailable, match="is down, and no other has taken over yet"):
        play.find(h0=state_of(7000, 1, flags))


LEADING = "master,s_down,o_down,failover_in_progress"  # these describe the old primary


def test_the_leader_of_a_failover_is_asked_for_the_address_because_it_lists_the_old_primary() -> None:
    play = Play()
    leader, other = state_of(7000, 6, LEADING, address=7001, phase="reconf_slaves"), state_of(7001, 6)
    assert play.find(h0=leader) == ("10.0.0.1", 7001)
    assert play.sentinels.primary.followed.epoch == 6
    assert play.find(h0=leader, h1=other) == ("10.0.0.1", 7001)
    with pytest.raises(holdfast.Unavailable, match="7000, which was replaced since"):
        play.find(h0=state_of(7000, 5), h1=TimeoutError(), h2=TimeoutError())


@pytest.mark.parametrize(
    "between",
    [
        state_of(7000, 6, LEADING, phase="reconf_slaves"),  # promoted after the answer with the address
        state_of(7001, 6, address=7000),  # and ended after it
    ],
)
def test_a_sentinel_whose_answers_do_not_agree_is_asked_again(between: Said) -> None:
    play = Play()
    after = state_of(7001, 6)
    assert play.find(h0=[between, after]) == ("10.0.0.1", 7001)
    assert play.asked == ["h0", "h0"]
    assert play.find(h0=between, h1=after) == ("10.0.0.1", 7001)
    assert play.asked == ["h0", "h0", "h0", "h1"]


def test_a_user_that_may_not_ask_for_the_address_goes_by_the_list_and_waits_while_that_is_old() -> None:
    play = Play(1)
    assert play.find(h0=state_of(7000, 5, address=None)) == ("10.0.0.1", 7000)
    early = state_of(7000, 5, "master,failover_in_progress", address=None, phase="wait_promotion")
    assert play.find(h0=early) == ("10.0.0.1", 7000)
    with pytest.raises(holdfast.Unavailable, match="7000, which was replaced since"):
        play.find(h0=state_of(7000, 6, "master,failover_in_progress", address=None, phase="update_config"))
    assert play.find(h0=state_of(7001, 6, address=None)) == ("10.0.0.1", 7001)


def test_a_client_that_has_seen_a_failover_follows_no_sentinel_that_has_not() -> None:
    play = Play()
    play.find(h0=state_of(7001, 5))
    behind, ahead = state_of(7000, 4), state_of(7002, 6)
    assert play.find(h0=behind, h1=ahead, h2=ahead) == ("10.0.0.1", 7002)
    assert play.moves == 1
    with pytest.raises(holdfast.Unavailable, match="7000, which was replaced since"):
        play.find(h0=behind, h1=TimeoutError(), h2=TimeoutError())
    assert play.sentinels.primary.endpoint == ("10.0.0.1", 7002)


def test_a_choice_that_another_thread_has_overtaken_moves_no_client_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread moves the client between the choice of this thread and the move that follows from it."""
    play = Play()
    play.find(h0=state_of(7000, 4))

    def overtaken(seen: Sighting, known_epoch: int) -> Choice:
        monkeypatch.undo()
        play.find(h1=state_of(7001, 5))
        return primary.choose(seen, known_epoch)

    monkeypatch.setattr(sentinel, "choose", overtaken)
    assert play.find(h0=state_of(7000, 4)) == ("10.0.0.1", 7001)
    assert play.sentinels.primary.followed == (("10.0.0.1", 7001), 5)
    assert play.moves == 1


def test_a_client_goes_back_only_from_the_decision_that_it_followed_when_it_chose() -> None:
    shared = Primary()
    shared.move(Followed(("h", 5), 5), shared.followed)
    known = shared.followed
    shared.move(Followed(("h", 6), 6), known)
    shared.move(Followed(("h", 4), 4), known)
    assert shared.followed == Followed(("h", 6), 6)
    shared.move(Followed(("h", 4), 4), shared.followed)
    assert shared.followed == Followed(("h", 4), 4)


@pytest.mark.parametrize(("first", "second"), [(4, 5), (5, 4), (5, 5)])
def test_of_two_threads_that_move_at_once_the_later_decision_wins(first: int, second: int) -> None:
    class Raced(dict[int, Followed]):
        """Another thread makes the move that is about to be made."""

        def setdefault(self, number: int, to: Followed) -> Followed:
            super().setdefault(1, Followed(("h", first), first))
            return super().setdefault(number, to)

    shared = Primary()
    known = shared.followed
    shared._moves = Raced(shared._moves)
    shared.move(Followed(("h", second), second), known)
    assert shared.followed == Followed(("h", 5), 5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(sentinel, "monotonic", lambda: now[0])
    return now


def test_sentinels_that_have_not_heard_of_a_failover_send_no_client_back(clock: list[float]) -> None:
    """The Sentinel that led the failover is gone, and the old primary has resumed."""
    play = Play()
    play.find(h0=state_of(7001, 5))
    behind = {"h0": TimeoutError(), "h1": state_of(7000, 4), "h2": state_of(7000, 4)}
    for clock[0] in (1.0, GO_BACK_AFTER - 1):
        assert play.find(**behind) == ("10.0.0.1", 7001)
        assert not play.sentinels.is_recheck_due(), "they have answered: asked again in a second"
    assert play.find(**{**behind, "h2": state_of(7001, 5)}) == ("10.0.0.1", 7001)
    clock[0] += GO_BACK_AFTER - 1
    assert play.find(**behind) == ("10.0.0.1", 7001), "one of them named it since"
    assert play.moves == 0


class Answering:
    """A connection to a server that answers ROLE; without a role, it refuses."""

    def __init__(self, port: int, role: bytes | None) -> None:
        self.host, self.port, self.role = "10.0.0.1", port, role

    def send_command(self, name: str) -> None:
        assert name == "ROLE"

    def read_response(self) -> list[bytes]:
        if self.role is None:
            raise redis.exceptions.NoPermissionError
        return [self.role]


def test_a_client_goes_back_at_once_if_the_primary_that_it_follows_was_demoted(clock: list[float]) -> None:
    play = Play()
    play.find(h0=state_of(7001, 5))
    behind = {"h0": TimeoutError(), "h1": state_of(7000, 4), "h2": state_of(7000, 4)}
    for port, role in ((7001, b"master"), (7002, b"slave")):
        with contextlib.suppress(holdfast.Unavailable):
            play.sentinels.check(Answering(port, role))
        assert play.find(**behind) == ("10.0.0.1", 7001)
    with pytest.raises(holdfast.Unavailable, match="it is a replica"):
        play.sentinels.check(Answering(7001, b"slave"))
    with pytest.raises(holdfast.Unavailable, match="7000, which was replaced since"):
        play.find(**{**behind, "h2": TimeoutError()})
    assert play.find(**behind) == ("10.0.0.1", 7000)
    assert play.moves == 1


@pytest.mark.parametrize("role", [b"master", None])
def test_a_late_handshake_counts_only_with_the_server_that_a_sentinel_names_after_it(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, role: bytes | None
) -> None:
    play = Play()
    play.find(h0=state_of(7000, 5))
    monkeypatch.setattr(play.sentinels, "recheck", lambda: play.find(h0=state_of(7001, 6)))
    clock[0] = RECHECK_AFTER
    play.sentinels.check(Answering(7000, role))
    assert play.moves == 0, "it came in time: nobody was asked"
    clock[0] = RECHECK_AFTER + 0.1
    with pytest.raises(holdfast.Unavailable, match="another server has become the primary"):
        play.sentinels.check(Answering(7000, role))
    play.sentinels.check(Answering(7001, role))


def test_sentinels_that_were_set_up_anew_are_followed_once_most_agree(clock: list[float]) -> None:
    play = Play()
    play.find(h0=state_of(7001, 5))
    anew = state_of(7003, 0)
    assert play.find(h0=anew, h1=anew, h2=anew) == ("10.0.0.1", 7001), "perhaps they have not heard"
    clock[0] = GO_BACK_AFTER
    assert play.find(h0=anew, h1=TimeoutError(), h2=anew) == ("10.0.0.1", 7003)
    assert play.find(h0=anew, h1=anew, h2=anew) == ("10.0.0.1", 7003)


def test_the_same_primary_again_drops_nothing() -> None:
    play = Play(1)
    play.find(h0=state_of(7000, 1))
    play.find(h0=state_of(7000, 2))
    assert play.moves == 0


def test_an_unknown_service_is_named() -> None:
    with pytest.raises(holdfast.Unavailable, match="it knows no service 'm'"):
        Play(1).find(h0=Said(None, {"other": {}}))


def test_settings_of_redis_py_are_kept() -> None:
    play = Play(1, fewest_others=3, forced_host="proxy")
    with pytest.raises(holdfast.Unavailable):
        play.find(h0=state_of(7000, 1))
    assert Play(1, forced_host="proxy").find(h0=state_of(7000, 1)) == ("proxy", 7000)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h1?db=5", "redis://h1:6379/5"),
        ("redis://h1/1?db=5", "redis://h1:6379/5"),
        ("redis+sentinel://h1/mymaster?db=5", "redis+sentinel://h1:26379/mymaster/5"),
        ("redis+cluster://h1?db=0", "redis+cluster://h1:6379"),
    ],
)
def test_a_database_among_the_options_is_in_the_address(url: str, address: str) -> None:
    assert resolve(url, aio=False).address == address


@pytest.mark.parametrize(
    ("url", "problem"), [("redis+cluster://h1?db=1", "database 0 only"), ("redis://h1?db=x", "is not a number")]
)
def test_a_database_that_cannot_be_is_refused(url: str, problem: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=problem):
        resolve(url, aio=False)


def test_after_a_silent_sentinel_the_next_recheck_asks_another_one(clock: list[float]) -> None:
    """A silent Sentinel uses up the time of a recheck, so the others are not asked in it."""
    sentinels = Sentinels("m", [Node(f"h{number}", object, {}) for number in range(3)])
    asked = []
    for _ in range(4):
        search = sentinels._search(0.25)
        node, patience = next(search)
        asked.append(node.address)
        clock[0] += patience
        with pytest.raises(holdfast.Unavailable):
            search.send(TimeoutError())
    assert asked == ["h0", "h1", "h2", "h0"]


def test_a_silent_sentinel_does_not_make_the_next_one_be_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent Sentinel uses up a recheck. The others are asked a second after each other; then pauses grow."""
    now = 0.0
    monkeypatch.setattr(sentinel, "monotonic", lambda: now)
    nodes = [Node(f"s{number}", object, {}) for number in range(3)]
    sentinels = Sentinels("mymaster", nodes)
    sentinels.primary.move(Followed(("127.0.0.1", 1), 0), Followed())
    asked: list[float] = []
    while len(asked) < 7:
        if sentinels.is_recheck_due():
            asked.append(now)
        now += 0.25
    assert asked == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0]
