"""``holdfast doctor``: the command, and how its findings look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.blocking import Client
from holdfast.cli import UNAVAILABLE
from holdfast.cli.doctor.checks import CHECKS, clock_and_network
from holdfast.cli.doctor.findings import DANGER, LEVELS, NOTE, OK, WARNING, Finding, Server
from holdfast.cli.doctor.keys import Keys, look_through
from holdfast.cli.doctor.permissions import acl_line, needed, permissions
from holdfast.cli.operate.common import Output, run_on
from holdfast.cli.operate.listing import progress
from holdfast.errors import HoldfastError
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.inspection.locks import escaped

PROBLEMS: Final = 1
TIMEOUT: Final = 5.0

_SIGNS: Final = {DANGER: ("✗", "bold red"), WARNING: ("!", "yellow"), NOTE: ("i", "cyan"), OK: ("✓", "green")}
_PLAIN: Final = {"✗": "x", "✓": "+"}
_PASSWORD: Final = ("on", ">PASSWORD")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    short_help="Say what threatens locks on a server.",
)
@click.argument("target", metavar="[URL]", required=False)
@click.option("--url", metavar="URL", help="The same as the argument.  [default: HOLDFAST_URL, else local://]")
@click.option("--prefix", default="", metavar="TEXT", help="With what your names start, if an ACL restricts keys.")
@click.option("--acl", is_flag=True, help="Print the ACL rules of a user that may do what locks need, and no more.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
@click.pass_context
def doctor(ctx: click.Context, *, target: str | None, url: str | None, prefix: str, acl: bool, as_json: bool) -> int:
    """Look at a server, and say in plain words what threatens locks there.

    Checked are: version, eviction, persistence, replication and lag, its clock and the way to it, permissions, and keys
    that no lock has written. Nothing is changed, except that some keys named PREFIXholdfast:doctor:... exist for a
    moment. The exit code is 0 if nothing threatens locks, 1 if something does, 69 if there is no answer, and 64 on etcd
    and memcached, which this command does not know.
    """
    output = Output(as_json=as_json)
    if acl:
        return print_acl(output, prefix, cluster="cluster" in (target or url or ""))
    return run_on(ctx, target or url, output, lambda client: examine(client, output, prefix), namespace=prefix)


def print_acl(output: Output, prefix: str, *, cluster: bool) -> int:
    """The least-privilege users: of programs, and of operators."""
    lines = {
        "program": acl_line("holdfast", [*_PASSWORD, *needed(prefix, cluster=cluster, operate=False)]),
        "operator": acl_line("holdfast-ops", [*_PASSWORD, *needed(prefix, cluster=cluster, operate=True)]),
    }
    if output.as_json:
        output.json(lines)
    else:
        click.echo("# a program that uses locks")
        click.echo(lines["program"])
        click.echo("# an operator: also holdfast ls, break and history")
        click.echo(lines["operator"])
    return 0


def examine(client: Client, output: Output, prefix: str) -> int:
    client._driver.require("holdfast doctor")
    try:
        findings = sorted(_findings(client, prefix), key=lambda finding: LEVELS.index(finding.level))
    except StepFailed as failed:
        output.say(str(failed.error))
        return UNAVAILABLE
    problems = [finding for finding in findings if finding.level in (DANGER, WARNING)]
    if output.as_json:
        output.json({"healthy": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(output.console(), findings)
        output.say(_verdict(problems, any(finding.level == NOTE for finding in findings)))
    return PROBLEMS if problems else 0


def _findings(client: Client, prefix: str) -> Iterator[Finding]:
    driver = client._driver
    servers = [Server(address, engine, TIMEOUT) for address, engine in driver.servers(TIMEOUT).items()]
    cluster = len(servers) > 1 or any(server.info("server").get("redis_mode") == "cluster" for server in servers)
    shortest = _shortest_lease(client)
    for server in servers:
        found = [finding for check in CHECKS for finding in check(server)]
        found += clock_and_network(server, shortest)
        if server is servers[0]:
            found += permissions(server, prefix, cluster=cluster, may_subscribe=_may_subscribe(client, prefix))
        yield from (replace(finding, server=server.address) for finding in found)
    yield from _keys(client, prefix).findings()


def _shortest_lease(client: Client) -> float | None:
    """The least that is left of a lease: one that is renewed always has more than half of its ttl left."""
    try:
        left = [holder.remaining for info in client.locks() for holder in info.holders if holder.remaining is not None]
    except HoldfastError:  # it is not allowed, and the permissions say so
        return None
    return min(left, default=None)


def _may_subscribe(client: Client, prefix: str) -> bool:
    """Whether this client can be notified, tried as a waiter does."""
    try:
        return bool(client._driver.shared.listen(TIMEOUT, (f"{prefix}holdfast:doctor",)))
    except StepFailed:
        return False


def _keys(client: Client, prefix: str) -> Keys:
    keys = Keys()
    with progress(lambda: f"looked at {keys.scanned:,} keys ..."), suppress(StepFailed):  # the permissions say why
        client._driver.run(look_through(keys, f"{escaped(prefix)}*", TIMEOUT))
    return keys


def _print(console: Console, findings: Iterable[Finding]) -> None:
    several = len({finding.server for finding in findings if finding.server}) > 1
    plain = not console.encoding.startswith("utf")
    shown = Table.grid(padding=(0, 1))
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        where = f"{finding.server}: " if several and finding.server else ""
        line = Text.assemble((f"{finding.check}: ", "bold"), f"{where}{finding.message}")
        shown.add_row(Text(_PLAIN.get(sign, sign) if plain else sign, style), line)
        if finding.advice:
            shown.add_row("", Text(finding.advice, style="" if finding.level in (DANGER, WARNING) else "dim"))
    console.print(shown)


def _verdict(problems: list[Finding], noted: bool) -> str:
    if not problems:
        return "nothing there breaks locks" + ("; the notes (i) say what they do not survive" if noted else "")
    return "1 problem threatens locks there" if len(problems) == 1 else f"{len(problems)} problems threaten locks there"
