"""Why the job failed: the report, who waited for whom, and the stacks of all ranks, equal ones together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddplaunch.commands.runs.page.markup import Markup, joined, tag
from ddplaunch.commands.runs.page.run import Run
from ddplaunch.console.failure import render_verdict
from ddplaunch.console.stacks import notes
from ddplaunch.diagnosis.grouping import Alike, grouped
from ddplaunch.diagnosis.inspection import Condition
from ddplaunch.diagnosis.sentences import sentences
from ddplaunch.diagnosis.standing import at_work
from ddplaunch.diagnosis.waits import waits
from ddplaunch.words import named, ranks, span

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Frame, Inspection, RankInspection

_OPEN = 3  # groups of ranks whose stacks are unfolded from the start
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def section(run: Run) -> Markup | None:
    """The failure report; None for a run without a failure."""
    if run.verdict is None:
        return None
    headline, *lines = _STYLES.sub("", render_verdict(run.verdict, run.first.nnodes)).splitlines()
    report = "\n".join(line.removeprefix("  ") for line in lines)
    told = tag("p", headline.removeprefix("ddplaunch: "), class_="headline")
    return tag("section", tag("h2", "Failure"), told, *([tag("pre", report)] if report else []), id="failure")


def inspections(run: Run) -> Iterator[Markup]:
    """What the ranks were doing, each time that they were asked."""
    found = sorted((each for share in run.shares for each in share.inspections), key=lambda each: each.moment)
    for number, each in enumerate(found):
        when = f"after {span(each.moment - run.began)}"
        waited = waits(each) or run.verdict is None  # else those who waited may have ended: the headline tells of it
        said = [tag("ul", *(tag("li", text) for text in sentences(each)), class_="waits")] if waited else []
        title = tag("h2", "What the ranks were doing, ", tag("span", when, class_="dim"))
        told = (tag("p", note, class_="dim") for note in notes(each))
        groups = (_group(alike, each, place < _OPEN) for place, alike in enumerate(grouped(each)))
        yield tag("section", title, *said, *told, *groups, id=f"stacks-{number}")


def _group(alike: Alike, inspection: Inspection, unfolded: bool) -> Markup:
    """The ranks that did the same, and the stacks of the first of them."""
    members = set(alike.ranks)
    hosts = dict.fromkeys(each.host for each in inspection.ranks if each.rank in members and each.host)
    where = tag("span", f" on {named(hosts)}", class_="dim") if hosts else ""
    state = alike.state if len(members) == 1 else re.sub("^waits", "wait", alike.state)
    waited = f" for {span(alike.waited)}" if alike.waited is not None else ""
    head = joined(tag("b", ranks(alike.ranks)), where, f": {state}{waited}")
    if threads := [*_threads(alike.example)]:
        return tag("details", tag("summary", head), *threads, open="" if unfolded else None)
    ended = alike.example.condition is Condition.EXITED
    why = f"; no stack: {alike.example.no_stack}" if alike.example.no_stack and not ended else ""
    return tag("p", joined(head, why), class_="stackless")


def _threads(rank: RankInspection) -> Iterator[Markup]:
    threads = [each for each in rank.threads if each.frames]
    for number, thread in enumerate(threads):
        if len(threads) > 1:
            title = thread.title if thread.name else f"thread {number}"
            name = "main thread" if thread is rank.threads[0] else title
            yield tag("p", name, class_="dim")
        yield tag("ol", *map(_frame, thread.frames), class_="stack")
    for worker in at_work(rank):
        yield tag("p", f"worker of its DataLoader (pid {worker.pid})", class_="dim")
        yield tag("ol", *map(_frame, worker.frames), class_="stack")


def _frame(frame: Frame) -> Markup:
    place = tag("span", f"{frame.file}:{frame.line}", class_="place")
    return tag("li", tag("code", frame.function), " ", place, class_="own" if frame.own else None)
