"""Text from outside reaches the terminal with its control characters escaped."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from holdfast.cli import Voice, main
from holdfast.untrusted import printable
from tests.cli.shell import Call, environment
from tests.proxy import Proxy, instead
from tests.servers import Server

TITLE = "\x1b]0;owned\x07"  # sets the title of the window


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("order:42 für 漢字", "order:42 für 漢字"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("bell\x07 back\x08 delete\x7f", "bell\\x07 back\\x08 delete\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("one\r\ntwo", "one\\r\\ntwo"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert ascii(printable(text)) == ascii(shown)


def test_line_ends_can_be_kept() -> None:
    assert printable("one\ntwo\r", keep="\n") == "one\ntwo\\r"


def test_messages_are_plain_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Voice(as_json=False, quiet=False).say("lost", f"{TITLE} was lost\nat once")
    assert capsys.readouterr().err == "holdfast: \\x1b]0;owned\\x07 was lost at once\n"
    Voice(as_json=True, quiet=False).say("lost", name=f"{TITLE}\x7f\x9b")
    err = capsys.readouterr().err
    assert is_plain(err)
    assert json.loads(err)["name"] == f"{TITLE}\x7f\x9b"


@pytest.mark.parametrize("args", [["run", f"a{TITLE}", "--", "true"], ["lab", "question", TITLE]])
def test_a_usage_error_is_plain(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 64
    assert is_plain(capsys.readouterr().err)


def test_an_error_reply_of_the_server_is_plain(server: Server, call: Call) -> None:
    with Proxy(server.port) as proxy:
        proxy.on("*", instead(b"-\x1b[31mSTOP now\r\n"), times=500)
        code, _, err = call(proxy.url, "--wait", "0", "job", "--", "true")
    assert code == 69
    assert "it answered \\x1b[31mSTOP" in err
    assert is_plain(err)


def test_the_log_of_a_server_that_does_not_start_is_plain(call: Call, tmp_path: Path) -> None:
    program = tmp_path / "broken-server"
    program.write_text(f"#!/bin/sh\nprintf '{TITLE}the port is in use'\nexit 1\n")
    program.chmod(0o700)
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as place:
        os.chmod(place, 0o700)
        env = environment(HOLDFAST_SERVER=str(program))
        code, _, err = call(f"local://{place}", "--wait", "0", "job", "--", "true", env=env)
    assert code == 69
    assert "\\x1b]0;owned\\x07the port is in use" in err
    assert is_plain(err)
