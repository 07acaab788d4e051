"""``holdfast doctor``: the command, and how its findings look."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.blocking import Client
from holdfast.cli import UNAVAILABLE, URL_HELP
from holdfast.cli.doctor.engines import findings_on
from holdfast.cli.doctor.etcd.permissions import role_lines
from holdfast.cli.doctor.findings import DANGER, LEVELS, NOTE, OK, UNCHECKED, WARNING, Finding, acl_line
from holdfast.cli.doctor.permissions import Use, rules_of_operator, rules_of_program, rules_on_sentinels
from holdfast.cli.operate.common import Output, run_on
from holdfast.errors import InvalidConfig
from holdfast.protocol.effects import StepFailed
from holdfast.url import Location, locate

PROBLEMS: Final = 1
INCOMPLETE: Final = 77  # EX_NOPERM: no problem was found, but not all checks could be made

_SIGNS: Final = {
    DANGER: ("✗", "bold red"),
    WARNING: ("!", "yellow"),
    UNCHECKED: ("?", "magenta"),
    NOTE: ("i", "cyan"),
    OK: ("✓", "green"),
}
_PLAIN: Final = {"✗": "x", "✓": "+"}
_PASSWORD: Final = ("on", ">PASSWORD")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    short_help="Say what threatens locks on a server.",
)
@click.argument("target", metavar="[URL]", required=False)
@click.option("--url", metavar="URL", help=URL_HELP)
@click.option(
    "--prefix",
    metavar="TEXT",
    help="With what your names start, if a user may use some keys only.  [default: namespace= of the URL]",
)
@click.option("--acl", is_flag=True, help="Print how to make a user that may do what locks need, and no more.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
@click.pass_context
def doctor(
    ctx: click.Context, *, target: str | None, url: str | None, prefix: str | None, acl: bool, as_json: bool
) -> int:
    """Look at a server, and say in plain words what threatens locks there.

    Checked are: version, eviction, persistence, replication and lag, its clock and the way to it, permissions, and keys
    that no lock has written. On etcd: its members, their leader, versions, database, alarms and clocks, the way to
    them, and permissions. On memcached: version, eviction, memory, connections, clock, the way to it, and a lock.

    Nothing is changed, except that some keys named PREFIXholdfast:doctor:... exist for a moment. The exit code is 0 if
    nothing threatens locks, 1 if something does, 77 if no problem was found but some checks could not be made, and 69
    if there is no answer.
    """
    output = Output(as_json=as_json)
    if target and url:
        raise click.UsageError("two servers were named: give the URL once", ctx)
    named = target or url or os.environ.get("HOLDFAST_URL") or "local://"
    try:
        location = locate(named)
    except InvalidConfig as error:
        raise click.UsageError(str(error), ctx) from error
    if acl and location.engine == "memcached":
        problem = "memcached has no users: each program that reaches its port may change each lock"
        raise click.UsageError(f"--acl: {problem}. Limit which machines reach it (-l, a firewall)", ctx)
    if prefix is None:
        prefix = str(location.options.get("namespace", ""))
    if acl:
        return print_role(output, prefix) if location.engine == "etcd" else print_acl(output, prefix, Use.of(location))
    return run_on(
        ctx, target or url, output, lambda client: examine(client, output, prefix, location), namespace=prefix
    )


def print_acl(output: Output, prefix: str, use: Use) -> int:
    """The least-privilege users: of programs, and of operators; and, if there are Sentinels, the user there."""
    lines = {
        "program": acl_line("holdfast", [*_PASSWORD, *rules_of_program(prefix, use)]),
        "operator": acl_line("holdfast-ops", [*_PASSWORD, *rules_of_operator(prefix, use)]),
    }
    if use.sentinel:
        lines["sentinel"] = acl_line("holdfast", [*_PASSWORD, *rules_on_sentinels()])
    if output.as_json:
        output.json(lines)
    else:
        click.echo("# a program that uses locks")
        click.echo(lines["program"])
        click.echo("# an operator: also holdfast ls, break, history and doctor")
        click.echo(lines["operator"])
        if use.sentinel:
            click.echo("# on each Sentinel, for programs and operators (sentinel_username= in the URL)")
            click.echo(lines["sentinel"])
    return 0


def print_role(output: Output, prefix: str) -> int:
    """The commands that make the least-privilege user of etcd: programs and operators need the same there."""
    lines = role_lines(prefix)
    if output.as_json:
        output.json(dict.fromkeys(("program", "operator"), "\n".join(lines)))
    else:
        click.echo("# a program that uses locks; and an operator: holdfast ls, break, history and doctor")
        click.echo("\n".join(lines))
    return 0


def examine(client: Client, output: Output, prefix: str, location: Location) -> int:
    try:
        findings = sorted(findings_on(client, prefix, location), key=lambda finding: LEVELS.index(finding.level))
    except StepFailed as failed:
        output.say(str(failed.error))
        return UNAVAILABLE
    problems = sum(finding.level in (DANGER, WARNING) for finding in findings)
    unchecked = sorted({finding.check for finding in findings if finding.level == UNCHECKED})
    if output.as_json:
        healthy = not problems and not unchecked
        output.json({"healthy": healthy, "unchecked": unchecked, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(output.console(), findings)
        output.say(_verdict(problems, len(unchecked), any(finding.level == NOTE for finding in findings)))
    return PROBLEMS if problems else INCOMPLETE if unchecked else 0


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
            shown.add_row(
                "", Text(finding.advice, style="" if finding.level in (DANGER, WARNING, UNCHECKED) else "dim")
            )
    console.print(shown)


def _verdict(problems: int, unchecked: int, noted: bool) -> str:
    found = "1 problem threatens locks there" if problems == 1 else f"{problems} problems threaten locks there"
    if unchecked:
        checks = "1 check" if unchecked == 1 else f"{unchecked} checks"
        found = f"{found}, and" if problems else "no problem was found, but"
        return f"{found} {checks} could not be made (?): follow the advice there, and run this again"
    if not problems:
        return "nothing there breaks locks" + ("; the notes (i) say what they do not survive" if noted else "")
    return found
