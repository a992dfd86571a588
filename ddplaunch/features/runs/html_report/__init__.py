"""The HTML report: a run as one self-contained page for a browser, without network access.

A section is a function of ``sections`` and a line below; ``page_run`` has its data.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.features.runs.html_report import charts, output_section, sections, timeline
from ddplaunch.features.runs.html_report.html import SCRIPT, SCRIPT_HASH, STYLE, Markup, element
from ddplaunch.features.runs.html_report.page_run import REFRESH_S, PageInputs, PageRun
from ddplaunch.features.runs.run_record import RunRecord

STDOUT = "-"

_NOTHING = PageInputs()


def content_security_policy(*, live: bool) -> str:
    """Return the CSP of the page: a browser may run its own script only, and load nothing; ``live``: only the page.

    So no output of a rank can become a program.
    """
    more = "; connect-src 'self'" if live else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'{more}"


def render_page(shares: Sequence[RunRecord], inputs: PageInputs = _NOTHING) -> str:
    """Return the page of a run, from the records of its nodes as far as they are here, node 0's first."""
    run = PageRun.from_records(shares, inputs)
    life = [timeline.timeline_section(run), charts.charts_section(run)]
    seen, now = [*sections.inspections(run)], [output_section.output_section(run)]
    parts = (
        sections.failure(run),
        *(life if run.first.code == 0 else [*seen[-1:], *now, *life]),
        sections.slow_ranks(run),
        sections.resources(run),
        sections.hosts(run),
        *([*now, *seen] if run.first.code == 0 else seen[:-1]),  # less important after success
        sections.notes(run),
        sections.plan(run),
        sections.facts(run),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=content_security_policy(live=inputs.live)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{run.name}: ddplaunch"),
        element("style", Markup(STYLE)),
    )
    script = element("script", Markup(SCRIPT))
    body = element("body", sections.header(run), element("main", *filter(None, parts)), sections.footer(run), script)
    every = REFRESH_S if inputs.live else None
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en', data_renewed=every)}\n"


def write_page(shares: Sequence[RunRecord], file: str, inputs: PageInputs) -> None:
    """Write the page of a run from the records of its nodes; an existing file is replaced.

    Raises UsageError if the file cannot be written.
    """
    text = render_page(shares, inputs)
    if file == STDOUT:
        return click.echo(text, nl=False)
    try:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a file"
        hint = "name a file that you may write to, or - for stdout"
        raise UsageError(f"--html {sanitize_line(file)}: {why}", hint) from None
    click.echo(f"written: {file}")
