"""The HTML report: a run as one self-contained page for a browser, without network access.

``page.html.jinja`` is the page. The values of each section come from a function of ``sections``, ``timeline``,
``charts`` or ``output_section``, called in ``render_page``; ``page_run`` has the data of all sections.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.features.runs.html_report import charts, output_section, sections, timeline
from ddplaunch.features.runs.html_report.page_run import REFRESH_S, PageInputs, PageRun
from ddplaunch.features.runs.html_report.template import SCRIPT, SCRIPT_HASH, STYLE, load_template
from ddplaunch.features.runs.report_text import PROGRAM_HEADS
from ddplaunch.observe.history.run_record import RunRecord

STDOUT = "-"

_NOTHING = PageInputs()


def content_security_policy(*, live: bool) -> str:
    """Return the CSP of the page: only its own script runs, and nothing is loaded; ``live``: it may load itself again.

    So nothing that a rank has printed can run as a script.
    """
    more = "; connect-src 'self'" if live else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'{more}"


def render_page(shares: Sequence[RunRecord], inputs: PageInputs = _NOTHING) -> str:
    """Return the page of a run, from the records of its nodes that are here, node 0's first."""
    run = PageRun.from_records(shares, inputs)
    return load_template("page.html.jinja").render(
        run=run,
        ended_well=run.first.code == 0,
        policy=content_security_policy(live=inputs.live),
        style=STYLE,
        script=SCRIPT,
        refresh_s=REFRESH_S,
        header=sections.header(run),
        failure=sections.failure(run),
        inspections=[*sections.inspections(run)],
        output=output_section.output(run),
        ticks=[*timeline.axis_ticks(run.total)],
        timeline=timeline.timeline(run),
        charts=charts.charts(run),
        slow=sections.slow_ranks(run),
        resources=sections.resources(run),
        hosts=sections.hosts(run),
        programs=sections.programs(run),
        program_heads=PROGRAM_HEADS,
        notes=sections.notes(run),
        plan=inputs.plan,
        devices=sections.devices(run),
        command=sections.command(run),
        facts=[*sections.facts(run)],
        footer=sections.footer(run),
    )


def write_page(shares: Sequence[RunRecord], file: str, inputs: PageInputs) -> None:
    """Write the page of a run from the records of its nodes; an existing file is replaced.

    Raises UsageError if the file cannot be written.
    """
    write_html(render_page(shares, inputs), file)


def write_html(text: str, file: str) -> None:
    """Write a page; an existing file is replaced. Raises UsageError if it cannot be written."""
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
