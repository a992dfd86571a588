"""``ddplaunch report``: how a run ended and why, its attempts, what each rank used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddplaunch.cli.parameters import Paths

if TYPE_CHECKING:
    from ddplaunch.job.record import Record


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.option(
    "--html", metavar="FILE", type=Paths(dir_okay=False), help="Write a page for a browser, which needs nothing else."
)
def report(run: str | None, as_json: bool, html: str | None) -> None:
    """Tell how a run ended: the failure again, its attempts, memory and CPU time of each rank.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the latest run.
    """
    from ddplaunch.console import colour_wanted
    from ddplaunch.console.report import render
    from ddplaunch.errors import UsageError
    from ddplaunch.job import past, runs
    from ddplaunch.job.record import to_json

    if as_json and html is not None:
        raise UsageError("--json and --html contradict each other", "leave one of them out")
    found = runs.find(run)
    shares = past.shares(found.run)
    if not shares:
        raise UsageError(f"{found.run} runs with --no-history, and has no record", "ddplaunch ps shows how it stands")
    if html is not None:
        from ddplaunch.cli.html_page import write_page

        return write_page(shares, html)
    if as_json:
        return click.echo(to_json(shares[0]))
    for line in render(shares, _output(found.run, shares[0])):
        click.echo(line, color=None if colour_wanted() else False)


def _output(run: str, record: Record) -> str | None:
    """Where what the ranks printed is."""
    from ddplaunch.job import logs

    if record.log_dir:
        return f"output: ddplaunch logs {run}, or {record.log_dir}"
    return f"output: ddplaunch logs {run}" if logs.files(run) else None
