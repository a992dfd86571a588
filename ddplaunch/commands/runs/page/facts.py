"""What the run was: its name and end at the top, its command and places below."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from ddplaunch import __version__
from ddplaunch.commands.runs.page.markup import Markup, tag
from ddplaunch.commands.runs.page.run import Run, moment
from ddplaunch.control.failure import signal_name
from ddplaunch.errors import shown
from ddplaunch.words import named, span

_GOOD = {"done": "well", "running": "running", "failed": "failed"}
_MAX_NOTES = 200


def header(run: Run) -> Markup:
    """The run's name, what became of it, and what it ran."""
    record = run.first
    fate = tag("span", record.fate.value, class_=f"fate {_GOOD.get(record.fate.value, 'stopped')}")
    code = f"exit code {record.code}, " if record.code is not None else ""
    size = f"{record.world_size} rank{'s' * (record.world_size != 1)}"
    nodes = f" on {record.nnodes} nodes" if record.nnodes > 1 else ""
    line = f"{code}{span(run.ended - run.began)}, {size}{nodes}, {moment(run.began)}"
    return tag("header", tag("h1", run.name, " ", fate), tag("p", tag("code", record.target)), tag("p", line))


def notes(run: Run) -> Markup | None:
    """What was said while the job ran, and who was slow."""
    found = list(dict.fromkeys(note for share in run.shares for note in share.notes))
    if not found:
        return None
    more = [tag("li", f"and {len(found) - _MAX_NOTES} more")] if len(found) > _MAX_NOTES else []
    return tag(
        "section", tag("h2", "Notes"), tag("ul", *(tag("li", note) for note in found[:_MAX_NOTES]), *more), id="notes"
    )


def section(run: Run) -> Markup:
    """The facts."""
    rows = (part for name, value in _facts(run) for part in (tag("dt", name), tag("dd", value)))
    return tag("section", tag("h2", "Run"), tag("dl", *rows), id="run")


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    record = run.first
    yield "run id", record.run_id
    yield "command", tag("code", shlex.join(record.argv))
    yield "folder", record.cwd
    hosts = dict.fromkeys(rank.rank.host for each in run.tries for rank in each.rows if rank.rank.host)
    yield "hosts", named(hosts) or record.host
    yield "launcher", f"process {record.pid} on {record.host}, node {record.node_rank} of {record.nnodes}"
    yield "began", moment(run.began)
    if record.ended is not None:
        yield "ended", moment(record.ended)
    if record.signal is not None:
        yield "signal", signal_name(record.signal)
    if record.log_dir:
        yield "log folder", shown(record.log_dir)
    if len(run.shares) < record.nnodes:
        yield "records", f"of {len(run.shares)} of {record.nnodes} nodes: the others keep their own"


def footer() -> Markup:
    """When and by what the page was written."""
    return tag("footer", f"Written by ddplaunch {__version__}, {moment(time.time())}")
