"""``holdfast run``, as a shell would call it, on a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast import guard
from holdfast.cli import main, parse_duration
from holdfast.cli.margins import margins
from tests.cli.shell import (
    CLI,
    PATIENCE_S,
    Call,
    Start,
    ended,
    environment,
    error_line,
    events_of,
    eventually,
    first_line,
    is_gone,
    lines_of,
)
from tests.engine_choices import EmbeddedServer
from tests.servers import Server, free_port, pause_process
from tests.support import Script

# Makes its stdin the controlling terminal of its session, as a login would, then becomes its arguments.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


# The command and its surroundings ----------------------------------------------------------------------------


def test_the_exit_code_is_the_commands_and_the_streams_are_its_own(server: Server, call: Call) -> None:
    code, out, err = call(server, "job", "--", "sh", "-c", "cat; echo oops >&2; exit 7", stdin="hello\n")
    assert (code, out, lines_of(err)) == (7, "hello\n", ["oops"])
    assert server.client().exists("job") == 0


def test_name_and_fence_are_in_the_commands_environment(server: Server, call: Call) -> None:
    script = "echo $HOLDFAST_NAME $HOLDFAST_FENCE ${HOLDFAST_FENCES-none}"
    env = environment(HOLDFAST_FENCES="of an outer run", HOLDFAST_URL=server.url)
    first = call(None, "job", "--", "sh", "-c", script, env=env)[1].split()
    second = call(None, "job", "--", "sh", "-c", script, env=env)[1].split()
    assert first[0] == "job"
    assert first[2] == "none"
    assert int(first[1]) < int(second[1])


@pytest.mark.parametrize("by_option", [True, False])
def test_the_url_reaches_the_command_only_if_asked_for(server: Server, call: Call, by_option: bool) -> None:
    """It may hold a password, and most commands have no use for it."""
    script = "echo ${HOLDFAST_URL-none}"
    env = environment(HOLDFAST_URL="redis://user:secret@127.0.0.1:1" if by_option else server.url)
    url = server if by_option else None
    assert call(url, "job", "--", "sh", "-c", script, env=env)[:2] == (0, "none\n")
    assert call(url, "--pass-url", "job", "--", "sh", "-c", script, env=env)[:2] == (0, f"{server.url}\n")


def test_several_names_are_one_lock_with_a_fence_for_each(server: Server, call: Call) -> None:
    script = 'printf "%s\n" "$HOLDFAST_NAME" "$HOLDFAST_FENCE" "$HOLDFAST_FENCES"'
    code, out, err = call(server, "--json", "c", "a", "b", "--", "sh", "-c", script)
    names, fence, fences = out.splitlines()
    acquired, exited, released = events_of(err)
    assert code == 0
    assert names == "a b c"
    assert list(json.loads(fences)) == ["a", "b", "c"]
    assert int(fence) == max(json.loads(fences).values())
    assert (acquired["event"], acquired["name"], acquired["fence"]) == ("acquired", "a, b, c", int(fence))
    assert acquired["fences"] == json.loads(fences)
    assert exited == {"event": "exited", "code": 0}
    assert released == {"event": "released", "name": "a, b, c"}
    assert server.client().exists("a", "b", "c") == 0


@pytest.mark.parametrize("names", [["job"], ["job", "other"]], ids=["one", "several"])
def test_the_command_can_write_behind_the_fence_as_this_holder(
    server: Server, call: Call, tmp_path: Path, names: list[str]
) -> None:
    script = (
        "import os; from holdfast import guard; "
        "fence, holder = int(os.environ['HOLDFAST_FENCE']), os.environ['HOLDFAST_HOLDER']; "
        f"guard.replace_file({str(tmp_path / 'report')!r}, b'done', guard.Stamp('job', fence, holder)); "
        "print(fence, holder)"
    )
    said = [call(server, *names, "--", sys.executable, "-c", script)[1].split() for _ in range(2)]
    fences, holders = zip(*said, strict=True)
    assert len(set(holders)) == 2
    stale = guard.Stamp("job", int(fences[0]), holders[0])
    with pytest.raises(holdfast.StaleFence):
        guard.replace_file(tmp_path / "report", b"late", stale)
    assert (tmp_path / "report").read_bytes() == b"done"


def test_json_tells_the_whole_story(server: Server, call: Call) -> None:
    code, _, err = call(server, "--json", "job", "--", "sh", "-c", "exit 3")
    acquired, exited, released = events_of(err)
    assert code == 3
    assert acquired["event"] == "acquired"
    assert acquired["name"] == "job"
    assert acquired["fence"] > 0
    assert acquired["waited"] >= 0
    assert exited == {"event": "exited", "code": 3}
    assert released == {"event": "released", "name": "job"}


def test_a_command_that_a_signal_ended(server: Server, call: Call) -> None:
    assert call(server, "job", "--", "sh", "-c", "kill -KILL $$")[0] == 128 + signal.SIGKILL


def test_a_command_that_cannot_be_run_leaves_the_lock_free(server: Server, call: Call, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    code, _, err = call(server, "job", "--", str(tmp_path / "missing"))
    assert code == 127
    assert "missing" in err
    # On a busy machine it may have said before that it waits for the lock.
    assert len(lines_of(err)) == 1
    assert call(server, "job", "--", str(text))[0] == 126
    assert server.client().exists("job") == 0


def test_file_descriptors_reach_the_command_and_none_of_ours_do(server: Server, call: Call) -> None:
    read, write = os.pipe()
    try:
        code, out, _ = call(
            server, "job", "--", "sh", "-c", f"echo handed >/dev/fd/{write}; ls /dev/fd/ | wc -l", pass_fds=[write]
        )
        _, plain, _ = call(server, "job", "--", "sh", "-c", "ls /dev/fd/ | wc -l")
        assert code == 0
        assert os.read(read, 100) == b"handed\n"
        assert int(out) == int(plain) + 1
    finally:
        os.close(read)
        os.close(write)


def test_signals_that_python_ignores_are_not_ignored_by_the_command(server: Server, call: Call) -> None:
    _, out, _ = call(server, "job", "--", "sh", "-c", "grep SigIgn /proc/self/status; grep SigBlk /proc/self/status")
    if not out:
        pytest.skip("no /proc here")
    ours = Path("/proc/self/status").read_text()
    found = re.search(r"SigIgn:\s*(\w+)", ours)
    assert found is not None
    ignored_before = int(found[1], 16)
    by_python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    real = (1 << 31) - 1  # beyond those, the C library has some for itself
    ignored, blocked = [int(line.split()[1], 16) & real for line in out.splitlines()]
    assert (ignored & by_python, blocked) == (0, 0)
    assert ignored == ignored_before & ~by_python & real


# Usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "job"],
        ["run", "job", "--"],
        ["run", "job", "--", ""],
        ["run", "job", "--", "", "x"],
        ["run", "--", "true"],
        ["run", "--nonsense", "job", "--", "true"],
        ["run", "--ttl", "soon", "job", "--", "true"],
        ["run", "--ttl", "0", "job", "--", "true"],
        ["run", "--ttl", "nan", "job", "--", "true"],
        ["run", "--wait", "-1", "job", "--", "true"],
        ["run", "--wait", "1000000d", "job", "--", "true"],
        ["run", "--at-least", "2m", "--max-hold", "60", "job", "--", "true"],
        ["run", "--shared", "--permits", "2", "job", "--", "true"],
        ["run", "--shared", "one", "two", "--", "true"],
        ["run", "--shared", "--exclusive", "job", "--", "true"],
        ["run", "--permits", "2", "one", "two", "--", "true"],
        ["run", "--permits", "0", "job", "--", "true"],
        ["run", "--busy-code", "256", "job", "--", "true"],
        ["run", "--url", "carrier-pigeon://host", "job", "--", "true"],
        ["run", "--url", "redis://localhost", "a{b", "--", "true"],
        ["run", "--url", "redis://localhost", "job", "job", "--", "true"],
        ["run", "--url", "redis://localhost", "--label", "x" * 1000, "job", "--", "true"],
    ],
)
def test_wrong_usage_is_64(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 64
    assert "Traceback" not in capsys.readouterr().err


def test_an_empty_command_is_refused_before_the_lock_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--url", f"redis://127.0.0.1:{free_port()}", "job", "--", ""])
    assert "the command after '--' is empty" in capsys.readouterr().err


def test_a_long_command_name_is_cut_to_make_a_label(server: Server, tmp_path: Path) -> None:
    command = tmp_path / ("x" * 250)
    command.write_text("#!/bin/sh\necho ran\n")
    command.chmod(0o755)
    done = subprocess.run(
        [*CLI, "run", "--url", server.url, "job", "--", str(command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for args, expected in ((["run", "--help"], "--at-least"), (["--version"], holdfast.__version__), (["-h"], "run")):
        with pytest.raises(SystemExit) as exit:
            main(args)
        assert exit.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("1.5", 1.5),
        (".5", 0.5),
        ("250ms", 0.25),
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("1d", 86400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "1e3", "inf", "1,5", "5 5", "٣"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize("ttl", [0.1, 1, 3, 30, 3600])
def test_margins_leave_time_for_each_step(ttl: float) -> None:
    notice, last, grace = margins(ttl)
    assert 0 < last < notice < 0.5 * ttl
    assert 0 < grace <= notice


# The server --------------------------------------------------------------------------------------------------


def test_nothing_listens(call: Call) -> None:
    started = time.monotonic()
    code, _, err = call(f"redis://127.0.0.1:{free_port()}", "job", "--", "true")
    assert code == 69
    assert len(lines_of(err)) == 1
    assert time.monotonic() - started < 10
    (event,) = events_of(call(f"redis://127.0.0.1:{free_port()}", "--json", "job", "--", "true")[2])
    assert event["event"] == "unavailable"


@pytest.fixture
def default_directory(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose embedded server is in a directory of its own, if no URL names one."""
    with EmbeddedServer() as server:
        (tmp_path / "sitecustomize.py").write_text(
            "from holdfast.engines.local import server\n"
            f"server.default_directory = lambda: {server.url.removeprefix('local://')!r}\n"
        )
        yield environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")


def test_without_a_server_it_says_once_that_locks_are_local(call: Call, default_directory: dict[str, str]) -> None:
    env, name = default_directory, "nightly"
    code, _, err = call(None, name, "--", "true", env=env)
    assert code == 0
    assert err.count("local://") == 1  # on a slow machine, it may also say that it waits
    assert call(None, "--quiet", name, "--", "true", env=env) == (0, "", "")
    code, out, err = call("local://", name, "--", "true", env=env)
    assert (code, out) == (0, "")
    assert "local://" not in err


def test_a_server_that_is_gone_at_the_end_does_not_change_the_exit_code(own_server: Server, start: Start) -> None:
    process = start(own_server, "job", "--", "sh", "-c", "echo ready; read line; exit 4", stdin=subprocess.PIPE)
    assert first_line(process) == "ready\n"
    own_server.kill()
    code, _, err = ended(process)
    assert code == 4
    assert "'job' was not released" in err
    assert len(lines_of(err)) == 1


# Excluding each other ----------------------------------------------------------------------------------------


def test_commands_under_one_lock_never_overlap(server: Server, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"echo start $$ >>{log}; sleep 0.1; echo end $$ >>{log}"
    crowd = [start(server, "--quiet", "job", "--", "sh", "-c", script) for _ in range(5)]
    assert [ended(process)[0] for process in crowd] == [0] * 5
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 10
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin[0], end[0]) == ("start", "end")
        assert begin[1] == end[1]


def test_busy(server: Server, call: Call) -> None:
    server.client().set("job", "somebody else's")
    code, out, err = call(server, "--wait", "0", "job", "--", "echo", "ran")
    assert (code, out) == (75, "")
    assert "'job' is held" in err
    assert len(err.splitlines()) == 1
    code, _, err = call(server, "--json", "--wait", "2500ms", "job", "--", "true")
    assert code == 75
    assert json.loads(err.splitlines()[0])["event"] == "waiting"
    assert [event["event"] for event in events_of(err)] == ["busy"]
    assert (events_of(err)[-1]["holder"]["host"], events_of(err)[-1]["holder"]["fence"]) == ("", None)
    assert call(server, "--quiet", "--wait", "0", "job", "--", "true") == (75, "", "")


def test_nothing_is_taken_when_one_of_several_names_is_busy(server: Server, call: Call) -> None:
    client = server.client()
    client.set("b", "somebody else's")
    assert call(server, "--wait", "0", "a", "b", "c", "--", "true")[0] == 75
    assert client.exists("a", "c") == 0
    assert client.get("b") == b"somebody else's"


def test_a_wait_for_several_names_reserves_those_that_are_free(server: Server, start: Start, call: Call) -> None:
    client = server.client()
    client.set("b", "somebody else's")
    process = start(server, "--json", "a", "b", "--", "echo", "ran")
    waiting = json.loads(error_line(process))
    assert (waiting["event"], waiting["name"]) == ("waiting", "a, b")
    eventually(lambda: client.exists("a"), what="the free name is reserved")
    code, out, _ = call(server, "--wait", "0", "a", "--", "echo", "meanwhile")
    assert (code, out) == (75, "")
    client.delete("b")
    code, out, err = ended(process)
    assert (code, out) == (0, "ran\n")
    assert [event["event"] for event in events_of(err)] == ["acquired", "exited", "released"]
    assert client.exists("a", "b") == 0


def test_the_command_ends_when_one_of_several_keys_was_taken(server: Server, start: Start) -> None:
    client = server.client()
    process = start(server, "--ttl", "3", "--json", "a", "b", "--", "sh", "-c", "echo ready; sleep 1000")
    assert first_line(process) == "ready\n"
    client.set("b", "a thief's")
    code, _, err = ended(process)
    acquired, lost, exited = events_of(err)
    assert code == 76
    assert (lost["event"], lost["name"], lost["fence"]) == ("lost", "a, b", acquired["fence"])
    assert exited == {"event": "exited", "code": 128 + signal.SIGTERM}
    assert client.get("b") == b"a thief's"


def test_a_key_that_is_no_lock_is_refused_and_nothing_is_kept(server: Server, call: Call) -> None:
    client = server.client()
    client.hset("b", "field", "value")
    code, out, err = call(server, "a", "b", "--", "echo", "ran")
    assert (code, out) == (64, "")
    assert "another name" in err
    assert client.exists("a") == 0


def test_the_wait_ends_while_the_server_hangs_and_only_events_are_told(own_server: Server, start: Start) -> None:
    own_server.pause()
    process = start(own_server, "--json", "--wait", "500ms", "job", "--", "echo", "ran")
    code, out, err = ended(process)
    assert (code, out) == (69, "")
    last = events_of(err)[-1]
    assert last["event"] == "unavailable"
    waited = re.search(r"did not answer within ([\d.]+) s", last["message"])
    assert waited
    assert 0.5 <= float(waited[1]) < 4.0, "not the 5 s of the client's timeout"


def test_it_waits_for_a_server_that_comes_back_as_long_as_it_was_told_to(own_server: Server, start: Start) -> None:
    own_server.client().set("job", "somebody else's")
    process = start(own_server, "--json", "--wait", "1m", "job", "--", "echo", "ran")
    assert json.loads(error_line(process))["event"] == "waiting"
    own_server.kill()
    time.sleep(3.0)  # longer than the outage_wait of a client
    assert process.poll() is None
    own_server.restart()
    code, out, _ = ended(process)
    assert (code, out) == (0, "ran\n")


def test_a_signal_is_heeded_while_the_server_hangs(own_server: Server, start: Start) -> None:
    own_server.client().set("job", "somebody else's")
    process = start(own_server, "--json", "job", "--", "echo", "ran")
    assert json.loads(error_line(process))["event"] == "waiting"
    own_server.pause()
    time.sleep(0.5)
    process.terminate()
    assert ended(process)[:2] == (128 + signal.SIGTERM, "")


def test_waiting_ends_when_the_lock_is_free(server: Server, start: Start) -> None:
    server.client().set("job", "somebody else's")
    process = start(server, "--json", "--wait", "1m", "job", "--", "true")
    assert json.loads(error_line(process))["event"] == "waiting"
    server.client().delete("job")
    code, _, err = ended(process)
    assert code == 0
    assert [event["event"] for event in events_of(err)] == ["acquired", "exited", "released"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_waiting_ends_the_wait_and_leaves_nothing(
    server: Server, start: Start, signum: signal.Signals
) -> None:
    client = server.client()
    client.set("job", "somebody else's")
    process = start(server, "--json", "first", "job", "--", "echo", "ran")
    assert json.loads(error_line(process))["event"] == "waiting"
    helpers = psutil.Process(process.pid).children()
    process.send_signal(signum)
    code, out, _ = ended(process)
    assert (code, out) == (128 + signum, "")
    assert client.get("job") == b"somebody else's"
    assert client.exists("first") == 0
    assert len(helpers) == 2
    eventually(lambda: all(is_gone(helper.pid) for helper in helpers))


def test_a_signal_that_strikes_in_a_destructor_is_not_lost(server: Server) -> None:
    code = """
        from holdfast.cli.signals import Inbox, Signalled

        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            with Inbox().interrupting():
                Dropped()
                time.sleep(60)
        except Signalled as signalled:
            say("ended by", signalled.signum)
    """
    with Script(code, server.url) as process:
        process.hear(f"ended by {signal.SIGTERM.value}")


# Signals -----------------------------------------------------------------------------------------------------


def has_lines(log: Path, expected: set[str]) -> bool:
    return log.exists() and expected <= set(log.read_text().split())


def test_signals_reach_the_whole_process_group(server: Server, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # What a script starts in the background ignores INT and QUIT, so the inner one is asked about the others.
    outer, inner = ("INT", "QUIT", "HUP", "USR1", "USR2"), ("HUP", "USR1", "USR2")
    traps = "".join(f'trap "echo $1-{name} >>{log}" {name}; ' for name in outer)
    script = tmp_path / "script"
    script.write_text(
        f'{traps} if [ "$1" = outer ]; then trap "exit 5" TERM; sh {script} inner & fi; '
        "echo $1-ready; while :; do sleep 0.05; done"
    )
    process = start(server, "job", "--", "sh", str(script), "outer")
    assert sorted(first_line(process) for _ in range(2)) == ["inner-ready\n", "outer-ready\n"]
    for name in outer:
        process.send_signal(getattr(signal, f"SIG{name}"))
        expected = {f"outer-{name}"} | ({f"inner-{name}"} if name in inner else set())
        eventually(partial(has_lines, log, expected), name)
    process.terminate()
    assert ended(process)[0] == 5
    assert server.client().exists("job") == 0


def test_what_was_ignored_stays_ignored(server: Server, start: Start) -> None:
    # As nohup does it.
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    process = subprocess.Popen(
        [*nohup, *CLI, "run", "--url", server.url, "job", "--", "sh", "-c", "echo ready; read line; exit 6"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        assert first_line(process) == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 6


def test_without_a_terminal_a_stopped_command_keeps_its_lock(server: Server, start: Start) -> None:
    process = start(
        server,
        "--ttl",
        "3",
        "job",
        "--",
        "sh",
        "-c",
        "echo $$; read line; exit 6",
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    command = psutil.Process(int(first_line(process)))
    process.send_signal(signal.SIGTSTP)
    eventually(lambda: command.status() == psutil.STATUS_STOPPED)
    time.sleep(3.5)  # longer than the ttl
    assert server.client().exists("job") == 1
    process.send_signal(signal.SIGCONT)
    eventually(lambda: command.status() != psutil.STATUS_STOPPED)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert ended(process)[0] == 6


# Losing the lock ---------------------------------------------------------------------------------------------

# Heeds nothing, has a child that does not either, and writes down the time for as long as it lives.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    sys.stdout.close()
with open(sys.argv[1] + str(os.getpid()), "a", buffering=1) as log:
    print(os.getpid(), flush=True) if not sys.stdout.closed else None
    while True:
        log.write(f"{time.time()}\\n")
        time.sleep(0.01)
"""


def last_beats(folder: Path) -> list[float]:
    logs = list(folder.glob("beat*"))
    assert len(logs) == 2
    return [float(log.read_text().split("\n")[-2]) for log in logs]


def test_the_command_is_dead_before_its_lock_ends_when_the_server_hangs(
    own_server: Server, start: Start, tmp_path: Path
) -> None:
    client = own_server.client()
    process = start(
        own_server, "--ttl", "5", "--json", "job", "--", sys.executable, "-c", STUBBORN, str(tmp_path / "beat")
    )
    command = int(first_line(process))
    client.client_pause(60_000, all=False)  # writes only, so that no renewal comes after ends_at is read
    ends_at = client.pexpiretime("job") / 1000
    own_server.pause()
    code, _, err = ended(process)
    assert code == 76
    assert is_gone(command)
    assert max(last_beats(tmp_path)) < ends_at
    assert [event["event"] for event in events_of(err)] == ["acquired", "lost", "exited"]


def test_a_command_that_heeds_sigterm_ends_by_it_when_the_server_is_gone(own_server: Server, start: Start) -> None:
    script = 'trap "echo bye; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
    process = start(own_server, "--ttl", "3", "job", "--", "sh", "-c", script)
    assert first_line(process) == "ready\n"
    own_server.kill()
    code, out, err = ended(process)
    assert (code, out) == (76, "bye\n")
    assert "'job' is lost" in err
    assert len([line for line in lines_of(err) if "holdfast:" in line]) == 1


@pytest.mark.parametrize("successor", [None, "somebody else's"])
def test_the_command_ends_when_its_key_was_deleted_or_taken(
    server: Server, start: Start, successor: str | None
) -> None:
    client = server.client()
    process = start(server, "--ttl", "3", "--json", "job", "--", "sh", "-c", "echo ready; sleep 1000")
    assert first_line(process) == "ready\n"
    if successor:
        client.set("job", successor)
    else:
        client.delete("job")
    code, _, err = ended(process)
    events = events_of(err)
    assert code == 76
    assert [event["event"] for event in events] == ["acquired", "lost", "exited"]
    assert events[1]["name"] == "job"
    assert events[1]["fence"] == events[0]["fence"]
    assert events[2]["code"] == 128 + signal.SIGTERM
    assert client.get("job") == (successor.encode() if successor else None)


def test_a_stubborn_command_is_killed_with_its_group_when_the_key_was_deleted(
    server: Server, start: Start, tmp_path: Path
) -> None:
    process = start(server, "--ttl", "1", "job", "--", sys.executable, "-c", STUBBORN, str(tmp_path / "beat"))
    first_line(process)
    eventually(lambda: len(list(tmp_path.glob("beat*"))) == 2)
    server.client().delete("job")
    assert ended(process)[0] == 76
    for log in tmp_path.glob("beat*"):
        assert is_gone(int(log.name.removeprefix("beat")))


def test_a_loss_is_a_loss_though_the_command_ends_well(server: Server, call: Call) -> None:
    client = server.client()
    script = f"import redis; redis.Redis.from_url({server.url!r}).delete('job')"
    code, _, err = call(server, "--json", "job", "--", sys.executable, "-c", script)
    assert code == 76
    # Whether it was told to end, or had ended before that, depends on who was quicker.
    assert {event["event"] for event in events_of(err)} >= {"acquired", "exited", "lost"}
    assert client.exists("job") == 0


def test_max_hold_ends_the_command(server: Server, call: Call) -> None:
    code, _, err = call(server, "--ttl", "3", "--max-hold", "500ms", "--json", "job", "--", "sleep", "1000")
    assert code == 76
    assert [event["event"] for event in events_of(err)] == ["acquired", "lost", "exited", "released"]
    assert server.client().exists("job") == 0


# Being killed ------------------------------------------------------------------------------------------------


def test_the_command_and_its_children_die_with_holdfast(server: Server, start: Start) -> None:
    process = start(server, "job", "--", "sh", "-c", "sleep 1000 & echo $$ $!; wait")
    pids = [int(pid) for pid in first_line(process).split()]
    helpers = psutil.Process(process.pid).children()
    process.kill()
    eventually(lambda: all(is_gone(pid) for pid in [*pids, *(helper.pid for helper in helpers)]))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_command_dies_with_holdfast_even_if_its_guard_was_killed(server: Server, start: Start) -> None:
    process = start(server, "job", "--", "sh", "-c", "echo $$; sleep 1000 >/dev/null 2>&1; true")
    command = int(first_line(process))
    (guard,) = (child for child in psutil.Process(process.pid).children() if child.pid != command)
    orphans = psutil.Process(command).children()
    guard.kill()
    process.kill()
    eventually(lambda: is_gone(command))
    for orphan in orphans:  # which is what the guard is for
        orphan.kill()


def test_the_command_is_dead_before_its_lock_ends_when_holdfast_is_stopped(
    server: Server, start: Start, tmp_path: Path
) -> None:
    process = start(server, "--ttl", "4", "job", "--", sys.executable, "-c", STUBBORN, str(tmp_path / "beat"))
    command = int(first_line(process))
    eventually(lambda: len(list(tmp_path.glob("beat*"))) == 2)
    pause_process(process.pid)  # first, so that no renewal comes after ends_at is read
    ends_at = server.client().pexpiretime("job") / 1000
    eventually(lambda: is_gone(command))
    assert max(last_beats(tmp_path)) < ends_at
    process.send_signal(signal.SIGCONT)
    assert ended(process)[0] == 76


# Keeping it longer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [(), ("--shared",), ("--permits", "1")], ids=["lock", "shared", "permits"])
def test_at_least_leaves_the_lock_behind_and_exits(server: Server, start: Start, kind: tuple[str, ...]) -> None:
    with holdfast.connect(server.url) as client:
        lock: Any = client.lock("job") if not kind else client.semaphore("job", 1)
        if kind == ("--shared",):
            lock = client.rwlock("job").write
        process = start(server, "--json", "--at-least", "5", *kind, "job", "--", "sh", "-c", "exit 9")
        began = time.monotonic()
        code, _, err = ended(process)
        events = events_of(err)
        assert code == 9
        assert [event["event"] for event in events] == ["acquired", "exited", "left"]
        assert 0 < events[-1]["seconds"] <= 5
        info = client.inspect("job")
        assert info is not None
        assert 0 < (info.holders[0].remaining or 0) <= 5, "neither the ttl of 30 s, nor nothing"
        lease = lock.acquire(timeout=20)
        assert lease is not None
        assert time.monotonic() - began < 30
        lease.release()


def test_at_least_is_over_before_the_command_ends(server: Server, call: Call) -> None:
    code, _, err = call(server, "--json", "--at-least", "10ms", "job", "--", "sleep", "0.2")
    assert code == 0
    assert [event["event"] for event in events_of(err)] == ["acquired", "exited", "released"]
    assert server.client().exists("job") == 0


def test_at_least_does_not_hide_a_loss(server: Server, start: Start) -> None:
    process = start(server, "--at-least", "1h", "job", "--", "sh", "-c", "echo ready; sleep 60")
    first_line(process)
    server.client().delete("job")
    assert ended(process)[0] == 76


# Other kinds of lock -----------------------------------------------------------------------------------------


def test_shared_commands_run_together_and_a_writer_is_busy(server: Server, start: Start, call: Call) -> None:
    first = start(server, "--shared", "job", "--", "sh", "-c", "echo ready; sleep 60")
    first_line(first)
    assert call(server, "--shared", "--wait", "0", "job", "--", "true")[0] == 0
    assert call(server, "--exclusive", "--wait", "0", "job", "--", "true")[0] == 75
    code, _, err = call(server, "--wait", "0", "job", "--", "true")
    assert (code, "need --exclusive" in err) == (64, True), "a plain lock of that name is another kind"
    with holdfast.connect(server.url) as client:
        assert client.rwlock("job").write.acquire(blocking=False) is None


def test_permits_limit_how_many_run_together(server: Server, start: Start, call: Call) -> None:
    for _ in range(2):
        first_line(start(server, "--permits", "2", "job", "--", "sh", "-c", "echo ready; sleep 60"))
    assert call(server, "--permits", "2", "--wait", "0", "job", "--", "true")[0] == 75
    assert call(server, "--permits", "3", "--wait", "0", "job", "--", "true")[0] == 0


def test_the_code_for_a_busy_lock_can_be_chosen(server: Server, call: Call) -> None:
    with holdfast.connect(server.url) as client, client.lock("job"):
        assert call(server, "--busy-code", "0", "--wait", "0", "job", "--", "false")[0] == 0
        assert call(server, "--busy-code", "9", "--wait", "2", "job", "--", "false")[0] == 9
        code, _, err = call(server, "--json", "--wait", "0", "job", "--", "false")
        assert code == 75
        assert events_of(err)[-1]["holder"]["pid"] == os.getpid()


# Terminals ---------------------------------------------------------------------------------------------------


class Screen:
    """A terminal with one program on it."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._keyboard, terminal = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *argv],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=env,
            start_new_session=True,
        )
        os.close(terminal)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def shows(self, text: str) -> bool:
        while select.select([self._keyboard], [], [], 0)[0]:
            try:
                more = os.read(self._keyboard, 4096)
            except OSError:  # how a terminal says that its last user is gone
                break
            if not more:
                break
            self.text += more.decode(errors="replace")
        return text in self.text

    def expect(self, text: str) -> None:
        try:
            eventually(lambda: self.shows(text), text)
        except AssertionError:
            raise AssertionError(f"{text!r} is not on the screen:\n{self.text}") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


@pytest.fixture
def screen() -> Iterator[Callable[..., Screen]]:
    with contextlib.ExitStack() as stack:

        def open_screen(*argv: str, **env: str) -> Screen:
            screen = Screen(list(argv), environment(PS1="$ ", **env))
            stack.callback(screen.close)
            return screen

        yield open_screen


def test_a_command_on_a_terminal_can_read_from_it_and_gets_ctrl_c_once(
    server: Server, screen: Callable[..., Screen]
) -> None:
    script = (
        'trap "echo in""t; n=x" INT; echo rea""dy; read line; echo got:$line; '
        'while [ -z "$n" ]; do sleep 0.05; done; sleep 0.3; exit 9'
    )
    terminal = screen(*CLI, "run", "--url", server.url, "job", "--", "sh", "-c", script)
    terminal.expect("ready")
    terminal.type("hello\n")
    terminal.expect("got:hello")
    terminal.type("\x03")
    terminal.expect("int")
    assert terminal.process.wait(PATIENCE_S) == 9
    terminal.shows("")
    assert terminal.text.count("int") == 1
    assert server.client().exists("job") == 0


def test_ctrl_c_ends_a_command_on_a_terminal(server: Server, screen: Callable[..., Screen]) -> None:
    terminal = screen(*CLI, "run", "--url", server.url, "job", "--", "sh", "-c", "echo rea''dy; exec sleep 1000")
    terminal.expect("ready")  # exec, because a shell that is just starting a child may overhear a signal
    terminal.type("\x03")
    assert terminal.process.wait(PATIENCE_S) == 128 + signal.SIGINT
    assert server.client().exists("job") == 0


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
BASH = ("bash", "--norc", "--noprofile", "-i")


def shell_line(server: Server, script: str, *options: str) -> str:
    return f"{sys.executable} -m holdfast.cli run {' '.join(options)} --url {server.url} job -- sh -c '{script}'"


@needs_bash
def test_ctrl_z_gives_the_prompt_back_and_fg_goes_on(server: Server, screen: Callable[..., Screen]) -> None:
    terminal = screen(*BASH)
    terminal.type(shell_line(server, 'echo rea""dy; read line; echo got:$line') + "; echo code:$?\n")
    terminal.expect("ready")
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.type("echo pro''mpt\n")
    terminal.expect("prompt")
    terminal.type("fg; echo then:$?\n")
    time.sleep(0.2)
    terminal.type("hello\n")
    terminal.expect("got:hello")
    terminal.expect("then:0")


@needs_bash
def test_a_command_suspended_for_too_long_is_killed_and_the_lock_is_lost(
    server: Server, screen: Callable[..., Screen]
) -> None:
    terminal = screen(*BASH)
    terminal.type(shell_line(server, 'echo rea""dy:$$:; read line', "--ttl", "1") + "\n")
    terminal.expect("ready:")
    eventually(lambda: terminal.shows(":") and terminal.text.count(":", terminal.text.index("ready:")) > 1)
    command = int(terminal.text.split("ready:")[1].split(":")[0])
    terminal.type("\x1a")
    terminal.expect("Stopped")
    eventually(lambda: is_gone(command))
    terminal.type("fg; echo then:$?\n")
    terminal.expect("then:76")


@needs_bash
def test_in_a_pipeline_a_command_gets_the_terminal_when_it_asks_for_it(
    server: Server, screen: Callable[..., Screen]
) -> None:
    terminal = screen(*BASH)
    terminal.type(
        shell_line(server, 'echo rea""dy; read line </dev/tty; echo got:$line') + " | cat; echo then:${PIPESTATUS[0]}\n"
    )
    terminal.expect("ready")
    terminal.type("hello\n")
    terminal.expect("got:hello")
    terminal.expect("then:0")


@needs_bash
def test_ctrl_c_in_a_pipeline_is_passed_on(server: Server, screen: Callable[..., Screen]) -> None:
    terminal = screen(*BASH)
    terminal.type(
        shell_line(server, 'trap "exit 9" INT; echo rea""dy; while :; do sleep 0.05; done')
        + " | (trap '' INT; cat); echo then:${PIPESTATUS[0]}\n"
    )
    terminal.expect("ready")
    terminal.type("\x03")
    terminal.type("\n")
    eventually(lambda: not server.client().exists("job"))


# No thread can be started ------------------------------------------------------------------------------------

# A stack that no machine can map, so pthread_create fails as it does at a limit of threads.
WITHOUT_THREADS = "import threading; threading.stack_size(1 << 46); from holdfast.cli import main; main()"


def run_without_threads(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS, "run", "--url", server.url, *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("wait", [(), ("--wait", "10"), ("--wait", "0")], ids=["for ever", "for a while", "not at all"])
def test_the_command_runs_although_no_thread_can_be_started(server: Server, wait: tuple[str, ...]) -> None:
    """The thread that would say that it waits, and the one that writes to stderr, can be done without."""
    done = run_without_threads(server, *wait, "job", "--", "sh", "-c", "echo ran; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ran\n", "")
    assert server.client().exists("job") == 0


def test_a_lease_that_no_thread_renews_ends_the_command(server: Server) -> None:
    done = run_without_threads(server, "--ttl", "1", "job", "--", "sleep", "60")
    assert done.returncode == 76
