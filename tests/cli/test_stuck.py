"""The commands of docs/stuck.md, as a reader runs them: they find, explain and free a lock that is stuck."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.cli.shell import PATIENCE_S, environment
from tests.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "stuck.md").read_text()


def test_the_commands_of_the_page_free_a_stuck_lock(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.protocol.mutex.NOTICE_WAIT", 10.0)  # a busy server may take longer to tell the reason
    (script,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    program = f'holdfast() {{ "{sys.executable}" -m holdfast.cli "$@"; }}\nset -e\n'
    program += script.replace("redis://localhost:6379/0", server.url)
    with holdfast.connect(server.url) as client:
        lease = client.lock("nightly:report", label="report-builder").acquire()
        done = subprocess.run(
            ["sh", "-c", program],
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            env=environment(COLUMNS="160"),
        )
        assert done.returncode == 0, done.stderr
        assert "report-builder @" in done.stdout
        assert str(lease.fence) in done.stdout
        assert done.stdout.count("the report hangs since noon") == 1
        assert lease.lost.wait(PATIENCE_S)
        assert lease.reason.endswith(": the report hangs since noon")
        assert client.inspect("nightly:report") is None
        try:
            lease.release()
        except holdfast.LeaseLost:
            pass


def test_each_command_that_a_page_names_exists() -> None:
    from holdfast.cli import Commands

    named = set(re.findall(r"`holdfast ([a-z]+)", PAGE + (Path(__file__).parents[2] / "docs" / "cli.md").read_text()))
    assert named <= set(Commands.homes)
    assert set(Commands.homes) <= named
