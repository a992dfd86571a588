"""A run as one page of HTML, for a browser: it needs no network, no script, and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.commands.runs.page.markup import Markup, tag
from ddplaunch.commands.runs.page.style import STYLE

if TYPE_CHECKING:
    from ddplaunch.job.record import Record

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load: nothing. So no text of a rank can become a program, whatever it holds."""


def page(shares: Sequence[Record]) -> str:
    """Return the page of a run, from the records of its nodes as far as they are here, node 0's first."""
    from ddplaunch.commands.runs.page import facts, failure, resources, timeline
    from ddplaunch.commands.runs.page.run import Run

    run = Run.of(shares)
    well = run.first.code == 0  # what ranks were doing in the midst of it is not what people look for
    sections = (
        failure.section(run),
        *([timeline.section(run)] if well else []),
        *failure.inspections(run),
        *([] if well else [timeline.section(run)]),
        resources.section(run),
        facts.notes(run),
        facts.section(run),
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
    body = tag("body", facts.header(run), tag("main", *filter(None, sections)), facts.footer())
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
