"""A run as one page of HTML, for a browser: it needs no network, no script, and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ddplaunch.commands.runs.page import sections, timeline
from ddplaunch.commands.runs.page.markup import STYLE, Markup, tag
from ddplaunch.commands.runs.page.run import PageRun
from ddplaunch.errors import UsageError, shown
from ddplaunch.job.record import RunRecord

STDOUT = "-"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load: nothing. So no text of a rank can become a program, whatever it holds."""


def page(shares: Sequence[RunRecord], effective: str = "") -> str:
    """Return the page of a run, from the records of its nodes as far as they are here, node 0's first.

    ``effective`` says in a line where its time went.
    """
    run = PageRun.of(shares)
    well = run.first.code == 0  # what ranks were doing meanwhile is then of less interest
    parts = (
        sections.failure(run),
        *([timeline.section(run)] if well else []),
        *sections.inspections(run),
        *([] if well else [timeline.section(run)]),
        sections.resources(run),
        sections.notes(run),
        sections.facts(run),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{run.name}: ddplaunch"),
        tag("style", Markup(STYLE)),
    )
    body = tag("body", sections.header(run, effective), tag("main", *filter(None, parts)), sections.footer())
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def write_page(shares: Sequence[RunRecord], file: str, effective: str) -> None:
    """Write the page of a run from the records of its nodes; a file that is there already is replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    text = page(shares, effective)
    if file == STDOUT:
        return click.echo(text, nl=False)
    try:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a file"
        raise UsageError(f"--html {shown(file)}: {why}", "name a file that you may write to, or - for stdout") from None
    click.echo(f"written: {file}")
