"""Renders the failure report: the first failure in full; secondary failures are grouped and counted."""

from __future__ import annotations

import re

import click

from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.stack_frames import parse_traceback
from ddplaunch.base.text import format_count, format_ranks
from ddplaunch.core.failures import FailureReport, RankFailure, first_line

_MAX_OTHERS = 3
_ADDRESS = r"\[[0-9a-fA-F.:%]+\]:\d+"  # of a peer: messages of gloo that differ only in it are equal
_MAX_LINE = 400  # characters: five lines of a terminal


_ARGPARSE_ERROR = r"\S+: error: .+"  # the last line of a program that does not know an option


def render_verdict(verdict: FailureReport, nnodes: int, *, was_shown: bool = False) -> str:
    """Render the report as text with ANSI styles (click.echo removes them if they are not wanted).

    ``was_shown``: the output of the first failure stands above, so an error of argparse is not repeated.
    """
    first = verdict.first
    where = f" (on {first.host})" if nnodes > 1 and first.host else ""
    lines = [click.style(f"ddplaunch: {verdict.blame or first.headline + where}", fg="red", bold=True)]
    if verdict.blame and first.is_secondary:
        lines.append(f"  then {first.headline}{where}")
    lines += [f"  {line}" for line in (first.hint or "").splitlines()]
    if verdict.world_size == 1:
        pass  # the rank has just printed all this itself, straight to the terminal
    elif first.traceback:
        lines += [f"  {_truncate(line)}" for line in first.traceback.rstrip("\n").split("\n")]
    elif first.message and first.pid and not verdict.blame:
        lines.append(f"  {_truncate(first.message)}")
    elif first.tail and not (was_shown and first.exit_code == 2 and re.fullmatch(_ARGPARSE_ERROR, first.tail[-1])):
        lines.append(click.style("  its last lines:", dim=True))
        lines += [f"  | {line}" for line in first.tail]
    if verdict.alike:
        lines.append(f"  {format_ranks(verdict.alike)} failed in the same way")
    equal: dict[str, list[RankFailure]] = {}
    for other in verdict.others:
        equal.setdefault(re.sub(_ADDRESS, "", _one_line_failure(other)), []).append(other)
    groups = [*equal.values()]
    for group in groups[:_MAX_OTHERS]:
        call = _distributed_call(group[0]) if first.abort_reason else ""
        lines.append(f"  then {format_ranks(each.rank for each in group)} {_one_line_failure(group[0])}{call}")
    if more := sum(map(len, groups[_MAX_OTHERS:])):
        lines.append(f"  and {format_count(more, 'more rank')} failed")
    if verdict.stopped:
        lines.append(f"  {verdict.stopped} other rank{'s were' if verdict.stopped > 1 else ' was'} stopped")
    return "\n".join(lines) + "\n"


def _truncate(line: str) -> str:
    """Truncate a line, so that it does not hide the rest of the report; failure.json has the whole line."""
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}… ({len(line) - _MAX_LINE} characters more)"


def _distributed_call(failure: RankFailure) -> str:
    """Format the torch.distributed call in which a rank failed: ", in all_reduce at train.py:31"; "" if unknown."""
    frames = parse_traceback(failure.traceback or "", current_folder())
    inside = [frame.function for frame in frames if frame.file.endswith("torch/distributed/distributed_c10d.py")]
    line = next((frame for frame in frames if frame.own), None)
    return f", in {inside[-1]} at {line.file}:{line.line}" if inside and line else ""


def _one_line_failure(failure: RankFailure) -> str:
    if not failure.message:
        return failure.reason
    return f"failed: {first_line(failure.message)}"
