"""A run as one page of HTML, for a browser: it needs no network and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ddplaunch.commands.runs.page import charts, output, sections, timeline
from ddplaunch.commands.runs.page.markup import STYLE, Markup, tag
from ddplaunch.commands.runs.page.run import Beside, PageRun
from ddplaunch.commands.runs.page.script import HASH, RENEWED, SCRIPT
from ddplaunch.errors import UsageError, shown
from ddplaunch.job.record import RunRecord

STDOUT = "-"

_NOTHING = Beside()


def policy(*, live: bool) -> str:
    """What a browser may load: nothing, of a ``live`` page itself; and run: our script alone.

    So no text of a rank can become a program.
    """
    more = "; connect-src 'self'" if live else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src '{HASH}'{more}"


def page(shares: Sequence[RunRecord], beside: Beside = _NOTHING) -> str:
    """Return the page of a run, from the records of its nodes as far as they are here, node 0's first."""
    run = PageRun.of(shares, beside)
    life = [timeline.section(run), charts.section(run)]
    seen, now = [*sections.inspections(run)], [output.section(run)]
    parts = (
        sections.failure(run),
        *(life if run.first.code == 0 else [*seen[-1:], *now, *life]),
        sections.slow(run),
        sections.resources(run),
        sections.hosts(run),
        *([*now, *seen] if run.first.code == 0 else seen[:-1]),  # of less interest where the run ended well
        sections.notes(run),
        sections.plan(run),
        sections.facts(run),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(live=beside.live)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{run.name}: ddplaunch"),
        tag("style", Markup(STYLE)),
    )
    script = tag("script", Markup(SCRIPT))
    body = tag("body", sections.header(run), tag("main", *filter(None, parts)), sections.footer(run), script)
    every = RENEWED if beside.live else None
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en', data_renewed=every)}\n"


def write_page(shares: Sequence[RunRecord], file: str, beside: Beside) -> None:
    """Write the page of a run from the records of its nodes; a file that is there already is replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    text = page(shares, beside)
    if file == STDOUT:
        return click.echo(text, nl=False)
    try:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a file"
        raise UsageError(f"--html {shown(file)}: {why}", "name a file that you may write to, or - for stdout") from None
    click.echo(f"written: {file}")
