"""``holdfast run`` acts on time, and ends with its documented exit code, whatever its standard streams are like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.shell import CLI, PATIENCE_S, Start, environment, eventually, first_line, is_gone, lines_of
from tests.servers import Server, free_port


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The write end of a pipe that is full and that nothing reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for size in (65536, 1):
        try:
            while True:
                os.write(write, b"x" * size)
        except BlockingIOError:
            pass
    os.set_blocking(write, True)  # the flag is shared with the processes that inherit the pipe
    yield write
    os.close(read)
    os.close(write)


# Stderr is full ---------------------------------------------------------------------------------------------


def test_the_command_runs_and_the_lock_is_released_while_stderr_is_full(
    server: Server, start: Start, full_pipe: int
) -> None:
    process = start(server, "--json", "job", "--", "sh", "-c", "echo ran; exit 3", stderr=full_pipe)
    assert process.wait(PATIENCE_S) == 3
    assert process.stdout is not None
    assert process.stdout.read() == "ran\n"
    assert server.client().exists("job") == 0


def test_a_lost_lock_ends_the_command_while_stderr_is_full(server: Server, start: Start, full_pipe: int) -> None:
    process = start(server, "job", "--", "sh", "-c", "echo $$; exec sleep 1000", stderr=full_pipe)
    command = int(first_line(process))
    server.client().set("job", "another client's token")
    assert process.wait(PATIENCE_S) == 76  # long before the ttl of 30 s, at which the guard kills
    assert is_gone(command)


def test_the_command_is_dead_before_the_lease_ends_while_stderr_is_full(
    own_server: Server, start: Start, full_pipe: int
) -> None:
    script = 'trap "" TERM; echo $$; while :; do sleep 0.05; done'
    process = start(own_server, "--ttl", "3", "job", "--", "sh", "-c", script, stderr=full_pipe)
    command = int(first_line(process))
    own_server.pause()
    assert process.wait(PATIENCE_S) == 76
    assert is_gone(command)


def test_max_hold_frees_the_lock_for_the_next_holder_while_stderr_is_full(
    server: Server, start: Start, full_pipe: int, tmp_path: Path
) -> None:
    beats = tmp_path / "beats"
    beat = (
        f"import pathlib\nbeats = pathlib.Path({str(beats)!r})\nprint('ready', flush=True)\nwhile True: beats.touch()"
    )
    first = start(server, "--ttl", "3", "--max-hold", "1", "job", "--", sys.executable, "-c", beat, stderr=full_pipe)
    assert first_line(first) == "ready\n"
    second = start(server, "--wait", "15", "job", "--", sys.executable, "-c", "import time; print(time.time())")
    out, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, err
    assert first.wait(PATIENCE_S) == 76
    assert beats.stat().st_mtime < float(out)


def test_signals_are_passed_on_while_stderr_is_full(server: Server, start: Start, full_pipe: int) -> None:
    script = 'exec 2>/dev/null; trap "exit 5" TERM; echo ready; while :; do sleep 0.05; done'
    process = start(server, "--json", "job", "--", "sh", "-c", script, stderr=full_pipe)
    assert first_line(process) == "ready\n"
    process.terminate()
    assert process.wait(PATIENCE_S) == 5
    assert server.client().exists("job") == 0


def test_a_signal_ends_the_wait_while_stderr_is_full(server: Server, start: Start, full_pipe: int) -> None:
    client = server.client()
    client.set("job", "another client's token")
    process = start(server, "--json", "job", "--", "true", stderr=full_pipe)
    eventually(lambda: client.zcard("job:hf1:queue:{job}"), "queueing")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert client.zcard("job:hf1:queue:{job}") == 0


def test_messages_come_in_order_before_the_end(server: Server, start: Start) -> None:
    """A reader that comes late, but comes, gets them all."""
    process = start(server, "--json", "job", "--", "sh", "-c", "echo between >&2")
    process.wait(PATIENCE_S)
    assert process.stderr is not None
    lines = lines_of(process.stderr.read())
    assert [line.split('"')[3] for line in lines if line != "between"] == ["acquired", "exited", "released"]


def test_neither_logging_nor_warnings_nor_tracebacks_of_threads_block(full_pipe: int) -> None:
    """More than the queue takes, from a thread such as the keeper's."""
    code = """
import logging, threading, warnings
from holdfast.cli.streams import unblocked_stderr

def work():
    for number in range(3000):
        logging.getLogger("redis").warning("number %s", number)
        warnings.warn(f"number {number}")
    1 / 0

with unblocked_stderr() as start_writing:
    start_writing()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=full_pipe,
        env=environment(PYTHONWARNINGS="always"),
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"done\n")


# Every outcome, with stderr full and with streams closed ------------------------------------------------------

STREAMS = ["full", "2>&-", ">&-", "<&- >&- 2>&-"]


def run_with(streams: str, full_pipe: int, *args: str) -> int:
    if streams == "full":
        command, stderr = [*CLI, *args], full_pipe
    else:
        command, stderr = ["sh", "-c", f'exec "$@" {streams}', "sh", *CLI, *args], subprocess.DEVNULL
    return subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment(), timeout=3 * PATIENCE_S, check=False
    ).returncode


@pytest.mark.parametrize("streams", STREAMS)
def test_every_exit_code_is_the_documented_one(server: Server, streams: str, full_pipe: int, tmp_path: Path) -> None:
    client = server.client()
    client.set("busy", "another client's token")
    at, away = ("run", "--url", server.url), ("run", "--url", f"redis://127.0.0.1:{free_port()}")
    taking = f"import redis, time; redis.Redis.from_url({server.url!r}).set('lost', 'taken'); time.sleep(60)"
    cases: dict[str, tuple[int, tuple[str, ...]]] = {
        "ordinary": (7, (*at, "job", "--", "sh", "-c", f"touch {tmp_path}/ran; exit 7")),
        "busy": (75, (*at, "--wait", "0", "busy", "--", "true")),
        "waited in vain": (75, (*at, "--wait", "2", "busy", "--", "true")),
        "server down": (69, (*away, "job", "--", "true")),
        "lost": (76, (*at, "--ttl", "3", "lost", "--", sys.executable, "-c", taking)),
        "held too long": (76, (*at, "--max-hold", "300ms", "long", "--", "sleep", "60")),
        "no such command": (127, (*at, "missing", "--", str(tmp_path / "missing"))),
        "wrong option": (64, (*at, "--nonsense", "job", "--", "true")),
        "wrong name": (64, (*at, "a{b", "--", "true")),
    }
    with ThreadPoolExecutor(4) as pool:
        codes = pool.map(lambda case: run_with(streams, full_pipe, *case[1]), cases.values())
    assert dict(zip(cases, codes, strict=True)) == {case: code for case, (code, _) in cases.items()}
    assert (tmp_path / "ran").exists()
    assert client.exists("job", "long", "missing") == 0


def test_a_closed_stream_is_the_null_device_for_the_command(server: Server, tmp_path: Path) -> None:
    """Not a free number, which a socket of the command, or of ours, would get and be written to."""
    result = tmp_path / "result"
    script = (
        "import os\nnull = os.stat(os.devnull)\n"
        f"open({str(result)!r}, 'w').write(str([os.path.samestat(os.fstat(fd), null) for fd in (0, 1, 2)]))"
    )
    command = [*CLI, "run", "--url", server.url, "job", "--", sys.executable, "-c", script]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment(), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
    assert result.read_text() == "[True, True, True]"
