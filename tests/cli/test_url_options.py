"""Options in the URL that the command line is given: its namespace decides which lock a NAME is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import holdfast
from tests.cli.shell import environment
from tests.cli.test_operate import call as call_here
from tests.servers import Server

SHOP = "?namespace=shop%3A"


@pytest.mark.parametrize("way", ["--url", "HOLDFAST_URL"])
def test_a_name_is_looked_up_in_the_namespace_of_the_url(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    url = server.url + SHOP
    if way == "HOLDFAST_URL":
        monkeypatch.setenv("HOLDFAST_URL", url)
    where = ("--url", url) if way == "--url" else ()
    with holdfast.connect(server.url, namespace="shop:") as client:
        lease = client.lock("nightly", label="report").acquire()
        assert "report @" in call_here(capsys, "who", *where, "nightly")[1]
        assert [info["name"] for info in json.loads(call_here(capsys, "ls", "--json", *where)[1])] == ["nightly"]
        assert call_here(capsys, "who", "--json", "--url", server.url, "nightly")[1] == "null\n"
        assert call_here(capsys, "break", *where, "nightly", "--reason", "it hangs", "--yes")[0] == 0
        assert "it hangs" in call_here(capsys, "history", *where, "nightly")[1]
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_run_takes_them_and_still_waits_for_a_server_as_long_as_it_is_told(
    server: Server, call: Callable[..., tuple[int, str, str]]
) -> None:
    with holdfast.connect(server.url).lock("shop:nightly"):
        code, _, err = call(f"{server.url}{SHOP}&timeout=2&outage_wait=0", "--wait", "0", "nightly", "--", "true")
        assert code == 75, err
        assert call(server.url, "--wait", "0", "nightly", "--", "true")[0] == 0
    env = environment(HOLDFAST_URL=server.url + SHOP)
    code, out, err = call(None, "--pass-url", "nightly", "--", "sh", "-c", "echo $HOLDFAST_NAME $HOLDFAST_URL", env=env)
    assert (code, out) == (0, f"nightly {server.url}{SHOP}\n")


@pytest.mark.parametrize("command", [("who", "x"), ("ls",), ("doctor",), ("run", "x", "--", "true")])
def test_an_option_that_a_url_cannot_have_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "redis://h/0?ttl=5")
    code, out, err = call_here(capsys, *command)
    assert (code, out) == (64, "")
    assert err.endswith(
        "Error: URL 'redis://h/0?***': it has an option 'ttl' that does not exist there; give ttl= to lock()\n"
    )


def test_the_namespace_is_the_prefix_for_the_doctor_unless_one_is_given(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "~shop:*" in call_here(capsys, "doctor", "--acl", server.url + SHOP)[1]
    for prefix in ("", "app:"):
        assert f"~{prefix}* " in call_here(capsys, "doctor", "--acl", "--prefix", prefix, server.url + SHOP)[1]
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~shop:*", "&shop:*", "+@all")
        try:
            url = server.url.replace("//", "//app:pw@") + SHOP
            findings = json.loads(call_here(capsys, "doctor", "--json", url)[1])["findings"]
            assert {finding["level"] for finding in findings if finding["check"] == "permissions"} == {"ok"}
        finally:
            admin.execute_command("ACL", "DELUSER", "app")
