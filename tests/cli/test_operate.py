"""``holdfast ls``, ``who``, ``break``, ``history``, ``watch`` and ``top``: what they print, and what they exit with."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from rich.console import Console

import holdfast
from holdfast.cli import main
from holdfast.cli.operate.tables import duration
from holdfast.cli.operate.top import Screen, Snapshots
from holdfast.cli.operate.watching import changes
from holdfast.holder import Holder, LockInfo, Waiter
from tests.cli.shell import CLI, PATIENCE_S, environment, eventually
from tests.servers import Server, free_port

LONG = "a-very-long-name:" + "x" * 80


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exited:
        main(args)
    code = exited.value.code
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[holdfast.Client]:
    monkeypatch.setenv("HOLDFAST_URL", server.url)
    with holdfast.connect(server.url) as client:
        yield client


@contextlib.contextmanager
def stuck(client: holdfast.Client, name: str = "job") -> Iterator[holdfast.Lease]:
    """A lock with a holder and a waiter."""
    lease = client.lock(name, label="nightly").acquire()

    def wait() -> None:
        with holdfast.connect(os.environ["HOLDFAST_URL"]) as other:
            # One long wait: between two short ones no waiter would be listed.
            if (mine := other.lock(name, label="deploy").acquire(timeout=3 * PATIENCE_S)) is not None:
                mine.release()

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        eventually(lambda: (info := client.inspect(name)) is not None and info.waiters)
        yield lease
    finally:
        with contextlib.suppress(holdfast.HoldfastError):
            lease.release()
        waiter.join(PATIENCE_S)


def test_ls_prints_the_contract_as_json(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with stuck(client) as lease, client.semaphore("pool", 2), client.lock("other"):
        code, out, err = call(capsys, "ls", "--json")
        found = {info["name"]: info for info in json.loads(out)}
        assert (code, err) == (0, "")
        assert set(found) == {"job", "pool", "other"}
        job = found["job"]
        assert job["kind"] == "lock"
        (holder,) = job["holders"]
        assert (holder["label"], holder["pid"], holder["fence"]) == ("nightly", os.getpid(), lease.fence)
        assert holder["host"]
        assert holder["since"] == pytest.approx(time.time(), abs=60)
        assert 0 < holder["remaining"] <= 30
        (waiter,) = job["waiters"]
        assert waiter["label"] == "deploy"
        assert waiter["waiting"] >= 0
        assert [info["name"] for info in json.loads(call(capsys, "ls", "--json", "o*")[1])] == ["other"]
        assert lease.token not in out


def test_ls_without_a_lock_prints_an_empty_list(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "ls", "--json")[:2] == (0, "[]\n")
    code, out, err = call(capsys, "ls")
    assert (code, out) == (0, "")
    assert "no lock like '*' is held" in err


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 120])
def test_a_table_fits_the_terminal_and_has_the_whole_name(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with client.lock(LONG, label="中文 wide"), stuck(client):
        for args in (["ls"], ["who", "job"], ["who", LONG]):
            _, out, _ = call(capsys, *args)
            assert max(len(line) for line in out.splitlines()) <= columns, out
        listed = "".join(line.split()[0] for line in call(capsys, "ls")[1].splitlines() if line.strip())
        assert LONG in listed


def test_a_table_that_is_piped_is_not_cut(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with client.lock(LONG, label="x" * 64) as lease:
        out = call(capsys, "ls")[1]
        assert f"{LONG} " in out
        assert "x" * 64 in out
        assert str(lease.fence) in out
        assert "\x1b" not in out


def test_control_characters_of_others_do_not_reach_the_terminal(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.lock("job", label="\x1b[31mred\n"):
        for args in (["ls"], ["who", "job"]):
            out = call(capsys, *args)[1]
            assert "\x1b" not in out
            assert "\\x1b[31mred" in out


def test_who_explains_one_lock(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with stuck(client) as lease:
        code, out, _ = call(capsys, "who", "job")
        assert code == 0
        assert "nightly @" in out
        assert "deploy @" in out
        assert str(lease.fence) in out
        assert "unless it is renewed" in out
        assert json.loads(call(capsys, "who", "job", "--json")[1])["name"] == "job"
    code, out, err = call(capsys, "who", "free", "--json")
    assert (code, out) == (0, "null\n")
    assert "is free" in err


def test_break_frees_the_lock_and_the_history_says_so(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.protocol.mutex.NOTICE_WAIT", 10.0)  # a busy server may take longer to tell the reason
    with stuck(client) as lease:
        code, out, err = call(capsys, "break", "job", "--reason", "the job hangs", "--yes")
        assert (code, out) == (0, "")
        assert "was taken from nightly @" in err
        assert lease.lost.wait(PATIENCE_S)
        assert lease.reason.endswith(": the job hangs")
    code, out, _ = call(capsys, "history", "job")
    assert code == 0
    assert "the job hangs" in out
    (entry,) = json.loads(call(capsys, "history", "job", "--json")[1])
    assert (entry["reason"], entry["holder"]["fence"]) == ("the job hangs", lease.fence)
    assert call(capsys, "history", "other", "--json")[1] == "[]\n"


def test_break_as_json_prints_what_was_broken(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    lease = client.lock("job").acquire()
    code, out, err = call(capsys, "break", "job", "--reason", "why", "--yes", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["fence"] > lease.fence
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["break", "free", "--reason", "why", "--yes"], 1, "nothing to break"),
        (["break", "job", "--reason", "why"], 64, "--yes"),
        (["break", "job", "--yes"], 64, "--reason"),
        (["break", "job"], 64, "--yes and --reason"),
        (["break", "job", "--reason", "\udce9", "--yes"], 64, "lone surrogate"),
        (["break", "job", "--reason", "\x1b[31mred", "--yes"], 64, "control character"),
        (["ls", "\udce9*"], 64, "lone surrogate"),
        (["break", "job", "--reason", "why" * 200, "--yes"], 64, "600 characters"),
        (["break", "job", "--reason", "why", "--yes", "--fence", "7"], 1, "not held with fence 7"),
        (["break", "job", "--reason", "why", "--yes", "--fence", "7"], 1, "Its holder is"),
        (["break", "job", "--reason", "why", "--yes", "--id", "beef"], 1, "not held with id beef"),
        (["break", "pool", "--reason", "why", "--yes"], 64, "2 holders"),
        (["who", "x:hf1:y"], 64, "cannot be a name"),
        (["who"], 64, "Missing argument"),
        (["ls", ""], 64, "pattern"),
        (["ls", "--url", "nonsense://x"], 64, "nonsense"),
        (["top"], 64, "terminal"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    with client.lock("job") as lease, client.semaphore("pool", 2) as one, client.semaphore("pool", 2) as two:
        found, out, err = call(capsys, *args)
        assert (found, out) == (code, "")
        assert says in err
        assert lease.held
        assert one.held
        assert two.held


@pytest.mark.parametrize("command", [["ls"], ["who", "x"], ["break", "x"], ["history", "x"], ["doctor"]])
def test_no_server_is_69(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, err = call(capsys, *command, "--url", f"redis://127.0.0.1:{free_port()}/0")
    assert (code, out) == (69, "")
    assert "nothing listens there" in err


def test_one_of_two_permits_is_broken_by_its_fence(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with client.semaphore("pool", 2) as one:
        two = client.semaphore("pool", 2).acquire()
        assert call(capsys, "break", "pool", "--reason", "why", "--yes", "--fence", str(two.fence))[0] == 0
        assert two.lost.wait(PATIENCE_S)
        assert one.held
        with pytest.raises(holdfast.LeaseLost):
            two.release()


def test_watch_tells_events_as_they_happen(server: Server, client: holdfast.Client) -> None:
    process = subprocess.Popen(
        [*CLI, "watch", "job", "--json", "--interval", "50ms", "--for", "60"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(HOLDFAST_URL=server.url, PYTHONUNBUFFERED="1"),
    )
    try:
        assert process.stdout is not None

        def next_event() -> dict[str, Any]:
            event: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            assert event["name"] == "job"
            return event

        assert next_event()["event"] == "free"
        with stuck(client) as lease:
            held = next_event()
            assert (held["event"], held["holder"]["fence"]) == ("held", lease.fence)
            waiting = next_event()
            assert (waiting["event"], waiting["waiter"]["label"]) == ("waiting", "deploy")
            client.break_lock("job", fence=lease.fence, reason="the job hangs")
            seen: dict[str, dict[str, Any]] = {}
            while "broken" not in seen:
                event = next_event()
                seen[event["event"]] = event
            assert seen["broken"]["reason"] == "the job hangs"
            assert "released" not in seen, "a broken hold was not released"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_watch_says_an_outage_once_and_ends_with_69(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    code, out, _ = call(capsys, "watch", "job", "--url", url, "--json", "--interval", "20ms", "--for", "0.5")
    assert code == 69
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["unavailable"]


@pytest.mark.parametrize(("elapsed", "how"), [(0.5, "released"), (31.0, "expired")])
def test_watch_tells_a_release_from_a_lease_that_ran_out(elapsed: float, how: str) -> None:
    before = LockInfo("job", "lock", (Holder("nightly", "web1", 1, fence=5, remaining=30.0, id="a"),))
    assert [kind for kind, _, _ in changes(before, None, elapsed)] == [how]


def test_watch_tells_two_waiters_of_one_process_apart() -> None:
    """With cohort=0 each caller has its own place in the queue."""
    one, two = (
        LockInfo("x", "lock", waiters=(Waiter(host="h", pid=7, waiting=1.0),) * places, waiter_count=places)
        for places in (1, 2)
    )
    assert [kind for kind, _, _ in changes(one, two)] == ["waiting"]
    assert [kind for kind, _, _ in changes(two, one)] == ["left"]
    assert [kind for kind, _, _ in changes(two, two)] == []


def test_who_of_a_key_that_is_no_lock_does_not_call_it_free(
    client: holdfast.Client, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.hset("it's", "field", "value")
    code, _, err = call(capsys, "who", "it's")
    assert code == 0
    assert "another program has a key of this name" in err


@pytest.mark.parametrize("columns", [40, 80])
def test_the_history_shows_in_every_width_who_broke_it_and_why(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lease = client.lock("job", label="nightly").acquire()
    client.break_lock("job", fence=lease.fence, reason="it hangs since midnight, says the operator", label="oncall")
    _, out, _ = call(capsys, "history", "job")
    assert max(len(line) for line in out.splitlines()) <= columns
    assert "oncall @" in out
    assert "nightly @" in out
    assert "it hangs since" in out
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_the_longest_wait_is_listed_first_if_wanted(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.lock("a"), stuck(client, "b"):
        found = json.loads(call(capsys, "ls", "--sort", "wait", "--json")[1])
        assert [info["name"] for info in found] == ["b", "a"]


def test_a_pattern_without_a_star_says_how_to_list_more(
    client: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.lock("nightly:report"):
        assert "For names that contain it: holdfast ls '*nightly*'" in call(capsys, "ls", "nightly")[2]
        assert "holdfast ls 'night*'" in call(capsys, "who", "night*")[2]


def test_rows_of_top_are_one_line_each() -> None:
    """Else the row that is chosen could be below the screen."""
    found = [LockInfo(f"order:{number}", "lock", (Holder("a long label " * 4, "web1", 1),)) for number in range(50)]
    snapshots, screen = Snapshots.__new__(Snapshots), Screen()
    snapshots.found, snapshots.error, snapshots.looks = found, "", 1
    snapshots.note = "redis://127.0.0.1:7000/0 is one node of a cluster, and locks on its other nodes are not seen"
    screen.sort, screen.place = "name", 49
    console = Console(width=60, height=20, file=io.StringIO())
    console.print(screen.draw(snapshots, console))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 20
    assert sum(line.strip() in snapshots.note for line in lines if line.strip()) == 2, "the whole note, in two lines"
    assert any("order:9" in line for line in lines), "the last by name"


def test_hints_can_be_pasted_into_a_shell(client: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    lease = client.lock("a job").acquire()
    code, _, err = call(capsys, "break", "a job", "--reason", "stuck", "--yes")
    assert (code, "holdfast history 'a job'" in err) == (0, True)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


class Terminal:
    """A program on a terminal of that size, and what it has written so far."""

    def __init__(self, *args: str, url: str, columns: int = 80, rows: int = 24) -> None:
        self._keyboard, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.written = ""
        self.process = subprocess.Popen(
            [*CLI, *args],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment(HOLDFAST_URL=url, NO_COLOR="1", TERM="xterm"),
            start_new_session=True,
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._keyboard, 65536):
                self.written += chunk.decode(errors="replace")

    def expect(self, text: str) -> None:
        eventually(lambda: text in self.written, f"{text!r} in {self.written[-3000:]!r}")
        self.written = ""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._keyboard)


def test_top_sorts_filters_opens_and_quits(server: Server, client: holdfast.Client) -> None:
    with stuck(client), client.lock("other"):
        with Terminal("top", "--interval", "0.2", url=server.url) as terminal:
            terminal.expect("sorted by wait")
            terminal.type("s")
            terminal.expect("sorted by held")
            terminal.type("/oth\r")
            terminal.expect("1 of 2 locks")
            terminal.type("\r")
            terminal.expect("unless it is renewed")
            terminal.type("\x1b")
            terminal.expect("HELD BY")
            terminal.type("q")
            assert terminal.process.wait(PATIENCE_S) == 0


def test_progress_is_shown_on_a_terminal_also_if_no_lock_is_found(own_server: Server) -> None:
    own_server.client().set("other", "x")
    own_server.pause()  # as slow as a server with very many keys
    with Terminal("ls", url=own_server.url) as terminal:
        try:
            terminal.expect("looked at")
        finally:
            own_server.resume()
        terminal.expect("no lock like")


def test_break_shows_who_loses_the_lock_and_asks(server: Server, client: holdfast.Client) -> None:
    with stuck(client) as lease:
        with Terminal("break", "job", url=server.url, columns=200) as terminal:
            terminal.expect("Reason")
            terminal.type("the job hangs\n")
            terminal.expect("Break it?")
            terminal.type("n\n")
            assert terminal.process.wait(PATIENCE_S) != 0
        assert lease.held
        with Terminal("break", "job", "--reason", "the job hangs", url=server.url, columns=200) as terminal:
            terminal.expect("loses the lock")
            terminal.type("y\n")
            assert terminal.process.wait(PATIENCE_S) == 0
        assert lease.lost.wait(PATIENCE_S)


def test_the_arrows_move_within_the_list() -> None:
    shown = [LockInfo(name, "lock", (Holder(),)) for name in "abc"]
    screen = Screen()
    for key, place in (("\x1b[B", 1), ("j", 2), ("\x1b[B", 2), ("\x1b[A", 1), ("k", 0), ("k", 0)):
        screen.press(key, shown)
        assert screen.place == place
    screen.press("\x1b[B", [])
    assert screen.place == 0


def test_the_longest_wait_comes_first() -> None:
    found = [
        LockInfo("held", "lock", (Holder(since=1.0),), at=100.0),
        LockInfo("waits", "lock", (Holder(since=50.0),), (Waiter(waiting=3.0),), 1, 1, at=100.0),
    ]
    screen = Screen()
    assert [info.name for info in screen.select(found)] == ["waits", "held"]
    screen.press("s", found)
    assert [info.name for info in screen.select(found)] == ["held", "waits"]
    screen.filter = "wai"
    assert [info.name for info in screen.select(found)] == ["waits"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.04, "0.0s"),
        (9.96, "10.0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3725, "1h2m"),
        (86400 * 3 + 7200, "3d2h"),
    ],
)
def test_a_duration_is_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    asked = {"_HOLDFAST_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'holdfast'; from holdfast.cli import main; main()"]
    script = subprocess.run(command, capture_output=True, text=True, env=environment(**asked), timeout=60)
    assert script.returncode == 0, script.stderr
    assert "_HOLDFAST_COMPLETE" in script.stdout
    words = {"bash": ("holdfast wh", "1"), "zsh": ("holdfast wh", "1"), "fish": ("holdfast wh", "wh")}[shell]
    asked = {"_HOLDFAST_COMPLETE": f"{shell}_complete", "COMP_WORDS": words[0], "COMP_CWORD": words[1]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**asked), timeout=60)
    assert "who" in done.stdout


def test_the_help_leads_from_a_stuck_lock_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "--help")[1]
    assert "'holdfast ls' finds it" in out
    section = out.partition("A lock is stuck:")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in section.splitlines()[1:4]] == ["ls", "who", "break"]


def test_a_reader_that_has_seen_enough_is_no_error(server: Server, client: holdfast.Client) -> None:
    with client.lock("job"):
        process = subprocess.Popen(
            [*CLI, "ls", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(HOLDFAST_URL=server.url),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        with process.stderr as stderr:
            assert stderr.read() == b""
