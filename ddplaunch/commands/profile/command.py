"""``ddplaunch profile``: takes a profile of a running job, writes its files and says where time goes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import click

from ddplaunch.cli.on_host import HostCommand
from ddplaunch.cli.run_command import RunName
from ddplaunch.commands.profile.files import speedscope, trace
from ddplaunch.commands.profile.hot import Spot, paced, spots, unlike
from ddplaunch.commands.profile.torch_trace import Event
from ddplaunch.console import colour_wanted, py_spy
from ddplaunch.console.table import table
from ddplaunch.diagnosis.profile import LONGEST, STARTING, RankProfile
from ddplaunch.diagnosis.standing import text
from ddplaunch.errors import LaunchError, UsageError, host_name, shown
from ddplaunch.files import create
from ddplaunch.job import client
from ddplaunch.job.requests.profile import ProfileJob
from ddplaunch.job.requests.status import AskStatus
from ddplaunch.job.runs import running
from ddplaunch.job.status import RankState
from ddplaunch.output.run_log import numbered
from ddplaunch.plan.numbers import parse_cpulist
from ddplaunch.queue.meant import job_meant, one_of, run_of
from ddplaunch.queue.meant import running as runs_there
from ddplaunch.queue.step import relay
from ddplaunch.words import counted, ranks

LINES = 10
TORCH = 5  # seconds, of its profiler, which writes some megabytes in each
LEAST = 0.005  # share of all time from which on a line is shown
OVER = "the job ended meanwhile"
PATIENCE = 20.0  # seconds, beyond those of the profile, for the job to answer


@click.command(cls=HostCommand)
@click.argument("run", metavar="[RUN]", required=False, type=RunName(running=True))
@click.option(
    "--seconds", type=float, metavar="N", help=f"How long: 10, up to {LONGEST}; with --torch 2, up to {TORCH}."
)
@click.option("--torch", is_flag=True, help="Have torch's own profiler run too, in the trace and in a file a rank.")
@click.option("--py-spy", "spied", metavar="RANKS", help="Have py-spy record these ranks too, C and C++ as well: 0,3.")
@click.option("--output", metavar="FOLDER", default=".", help="Where to write the files, instead of here.")
def profile(run: str | None, seconds: float | None, torch: bool, spied: str | None, output: str) -> int:
    """Show where the ranks of a running job spend their time, and write files for Perfetto and speedscope.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the only job that runs.

    50 times a second each rank of all nodes notes the line that its main thread is at; time in native code counts for
    the line that called it. The job goes on meanwhile, and computes the same.
    """
    seconds, longest = (2.0 if torch else 10.0) if seconds is None else seconds, TORCH if torch else LONGEST
    if not 0.1 <= seconds <= longest:
        raise UsageError(f"--seconds {seconds:g}: expected 0.1 to {longest}{' with --torch' if torch else ''}")
    if not os.access(output, os.W_OK):
        what = f"--output {shown(output)}: there is no such folder, or it cannot be written to"
        raise UsageError(what, "name another, or leave it out")
    if queued := job_meant(run):
        seen = runs_there(queued, one_of(queued, run or "", "profile"))
        words = ["profile", run_of(queued, seen), "--seconds", f"{seconds:g}", "--output", os.path.abspath(output)]
        words += [*(["--torch"] if torch else []), *(["--py-spy", spied] if spied else [])]
        return relay(queued, seen, words)
    tool = py_spy.find("--py-spy") if spied else ""
    job = running(run)
    pids = _pids(job.path, spied) if spied else {}
    names = numbered(f"profile-{job.run_id}-{time.strftime('%H%M%S')}")
    title = next(each for each in names if not os.path.exists(os.path.join(output, f"{each}.trace.json")))
    click.echo(f"taking a profile of {shown(job.run_id)} for {seconds:g} s …", err=True)
    recording = py_spy.Recording(tool, pids, seconds, os.path.join(output, title))
    try:
        profiles, notes = _taken(job.path, seconds, torch)
        of_py_spy, more = recording.wait()
    finally:
        recording.end()
    if all(each.why_not == STARTING for each in profiles) and OVER not in notes:
        raise LaunchError("the ranks are still starting", "type it again once they run; `ddplaunch top` shows that")
    known = [each for each in profiles if not each.why_not]
    if not known:
        raise LaunchError("no rank could be profiled", "\n".join(notes[:2]) or None)
    notes += [*more, *(_without_torch(known) if torch else [])]
    of_torch = {each.rank: _moved(each, os.path.join(output, title)) for each in known if each.torch and _is_here(each)}
    paths = [
        _write(os.path.join(output, f"{title}.trace.json"), _as_array(trace(known, of_torch))),
        _write(os.path.join(output, f"{title}.speedscope.json"), [json.dumps(speedscope(known, title))]),
    ]
    found = spots(known)
    sentences, late = paced(known)
    differ = [
        f"rank {each.rank} differs: {_share(each.share)} of its time is in {text(each.line)},"
        f" of the others' {_share(each.others)}"
        for each in unlike(found, late)
    ]
    colour = None if colour_wanted() else False
    for line in (*(click.style(shown(each, 2000), bold=True) for each in (*differ, *sentences)), *_page(found, notes)):
        click.echo(line, color=colour)
    click.echo(f"\nPerfetto or chrome://tracing: {paths[0]}\nspeedscope: {paths[1]}")
    if of_torch:
        click.echo(f"torch's profiler: in it, and in {os.path.join(output, title)}.rank-*.torch.json")
    for path in of_py_spy:
        click.echo(f"py-spy, for speedscope: {path}")
    for each in known:
        if each.torch and not _is_here(each):
            click.echo(f"torch's profiler: {shown(each.torch)} on {shown(each.host)}, until the job ends")
    return 0


def _pids(path: str, typed: str) -> dict[int, int]:
    """The processes of these ranks; UsageError where one of them does not run here."""
    here = {each.rank: each.pid for each in client.ask(path, AskStatus()).ranks if each.state is RankState.RUNNING}
    try:
        asked = parse_cpulist(typed)
    except ValueError:
        raise UsageError(f"--py-spy {shown(typed, 60)}: expected ranks", "--py-spy 0,3 or --py-spy 0-3") from None
    if missing := [each for each in asked if each not in here]:
        what = f"--py-spy {shown(typed, 60)}: not on this machine: {ranks(missing)}"
        raise UsageError(what, f"here: {ranks(here)}" if here else None)
    return {each: here[each] for each in asked}


def _taken(path: str, seconds: float, torch: bool) -> tuple[list[RankProfile], list[str]]:
    """The profiles of all ranks, in order, and what is to be said of those that are not known."""
    profiles: list[RankProfile] = []
    notes: list[str] = []
    over = False
    for message in client.stream(path, ProfileJob(seconds, torch), seconds + PATIENCE):
        if message.refused:
            raise LaunchError(message.refused, "try again in a minute")
        profiles += filter(None, [message.profile])
        notes += [f"{shown(node)} did not answer" for node in message.silent]
        over |= message.over
    reasons: dict[str, list[int]] = {}
    for each in profiles:
        reasons.setdefault(each.why_not, []).append(each.rank)
    notes += [f"no profile of {ranks(numbers)}: {shown(why)}" for why, numbers in reasons.items() if why]
    if not over:
        notes.append(OVER)
    return sorted(profiles, key=lambda each: each.rank), notes


def _without_torch(profiles: Iterable[RankProfile]) -> list[str]:
    without = [each.rank for each in profiles if not each.torch]
    why = "no torch there, a profiler of the program's own, or too long a call"
    return [f"no profile by torch of {ranks(without)}: {why}"] if without else []


def _is_here(profile: RankProfile) -> bool:
    return profile.host in ("", host_name())


def _moved(profile: RankProfile, title: str) -> str:
    """Where the file of torch's profiler is now."""
    path = f"{title}.rank-{profile.rank}.torch.json"
    try:
        shutil.move(profile.torch, path)
    except OSError as error:
        raise LaunchError(f"{shown(path)}: {(error.strerror or '').lower()}") from None
    return path


def _page(found: Sequence[Spot], notes: Iterable[str]) -> Iterator[str]:
    yield from (click.style(f"note: {note}", fg="yellow") for note in notes)
    told = [each for each in found if each.mean >= LEAST][:LINES]
    rows = []
    for each in told:
        low, high = min(each.shares.values()), max(each.shares.values())
        spread = f"{100 * low:.0f} to {_share(high)}" if len(each.shares) > 1 else ""
        rows.append((_share(each.mean), spread, shown(text(each.line), 200), shown(each.calls, 80)))
    yield ""
    yield from table(("TIME", "OF RANKS", "WHERE", "CALLS"), rows)
    if (rest := found[len(told) :]) and sum(each.mean for each in rest) >= LEAST:
        yield f"{_share(sum(each.mean for each in rest))} in {counted(len(rest), 'line')} more"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _as_array(events: Iterable[Event]) -> Iterator[str]:
    """The trace event format, an event a line."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, each in enumerate(events):
        yield f"{',' if number else ''}{json.dumps(each)}\n"
    yield "]}\n"


def _write(path: str, parts: Iterable[str]) -> str:
    try:
        with open(create(path, os.O_EXCL), "w", encoding="utf-8") as file:
            file.writelines(parts)
    except OSError as error:
        raise LaunchError(f"{shown(path)}: {(error.strerror or '').lower()}") from None
    return path
