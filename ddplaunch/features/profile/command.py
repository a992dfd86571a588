"""``ddplaunch profile``: profiles a running job, writes files for viewers, and prints the lines with the most time."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import click

from ddplaunch.base.errors import LaunchError, UsageError, host_name, sanitize_line
from ddplaunch.base.safe_files import current_folder, open_for_writing
from ddplaunch.base.text import format_count, format_ranks
from ddplaunch.cli import client
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.lookup.batch_jobs import find_running_batch_job
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.run_index import find_running
from ddplaunch.cli.text_table import format_table
from ddplaunch.core.control_socket.job_status import RankState
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.core.output.run_log import candidate_names
from ddplaunch.features.profile.hot_spots import HotSpot, describe_late_ranks, find_hot_spots, find_outliers
from ddplaunch.features.profile.profile_files import perfetto_trace, speedscope_file
from ddplaunch.features.profile.rank_profile import MAX_PROFILE_S, STARTING, RankProfile
from ddplaunch.features.profile.request import ProfileJobRequest
from ddplaunch.features.profile.rpc import ProfileRequest
from ddplaunch.features.profile.torch_trace import Event
from ddplaunch.observe.diagnosis.rank_position import format_location
from ddplaunch.system.plan.numbers import parse_cpulist
from ddplaunch.system.processes import py_spy
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler

MAX_LINES = 10
TORCH_PROFILE_S = 5  # the longest with torch's profiler, which writes some megabytes each second
TMP = "/tmp"  # where the files are written on nodes that do not have this machine's folders
MIN_SHARE = 0.005  # of all time, from which on a line is shown
JOB_ENDED_NOTE = "the job ended meanwhile"
REPLY_MARGIN_S = 20.0  # for the job's replies, beyond the time of the profile


@click.command(cls=JobCommand)
@click.argument("run", metavar="[RUN]", required=False, type=RunName(running=True))
@click.option(
    "--seconds",
    type=float,
    metavar="N",
    help=f"Duration in seconds, up to {MAX_PROFILE_S}, with --torch {TORCH_PROFILE_S}.  [default: 10; with --torch 2]",
)
@click.option("--torch", is_flag=True, help="Also run torch.profiler: in the trace, and one file per rank.")
@click.option(
    "--py-spy", "spied", metavar="RANKS", help="Also record these ranks with py-spy (C and C++ frames), like 0,3."
)
@click.option("--output", metavar="FOLDER", default=".", help="Folder for the files.  [default: the current folder]")
def profile(run: str | None, seconds: float | None, torch: bool, spied: str | None, output: str) -> int:
    """Profile the ranks of a run and write files for Perfetto and speedscope.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the only run in progress.

    Samples the current line of each rank's main thread 50 times a second, on all nodes. Time in native code counts
    for the Python line that called it. The job continues, with unchanged results.
    """
    seconds = (2.0 if torch else 10.0) if seconds is None else seconds
    longest = TORCH_PROFILE_S if torch else MAX_PROFILE_S
    if not 0.1 <= seconds <= longest:
        raise UsageError(f"--seconds {seconds:g}: expected 0.1 to {longest}{' with --torch' if torch else ''}")
    if not (os.path.isdir(output) and os.access(output, os.W_OK | os.X_OK)):
        what = f"--output {sanitize_line(output)}: there is no such folder, or it cannot be written to"
        raise UsageError(what, "name another, or leave it out")
    if batch_job := find_running_batch_job(run, "profile"):
        copy_hint = get_scheduler(batch_job.job).file_copy_hint(batch_job.state)
        folder = TMP if copy_hint else os.path.normpath(os.path.join(current_folder(), output))
        words = ["--seconds", f"{seconds:g}", "--output", folder]
        words += [*(["--torch"] if torch else []), *(["--py-spy", spied] if spied else [])]
        code = batch_job.run_command("profile", words)
        if copy_hint and not code:
            click.echo(f"to copy a file from there: {copy_hint}", err=True)
        return code
    tool = py_spy.find_py_spy("--py-spy") if spied else ""
    job = find_running(run)
    pids = _find_pids(job.path, spied) if spied else {}
    names = candidate_names(f"profile-{job.run_id}-{time.strftime('%H%M%S')}")
    title = next(each for each in names if not os.path.exists(os.path.join(output, f"{each}.trace.json")))
    click.echo(f"taking a profile of {sanitize_line(job.run_id)} for {seconds:g} s …", err=True)
    recording = py_spy.PySpyRecording(tool, pids, seconds, os.path.join(output, title))
    try:
        profiles, notes = _collect_profiles(job.path, seconds, torch)
        of_py_spy, more = recording.wait()
    finally:
        recording.stop()
    known = _taken_profiles(profiles, notes)
    notes += [*more, *(_missing_torch_notes(known) if torch else [])]
    local = [each for each in known if each.torch and _is_local(each)]
    of_torch = {each.rank: _move_torch_trace(each, os.path.join(output, title)) for each in local}
    paths = [
        _write(os.path.join(output, f"{title}.trace.json"), _format_trace_file(perfetto_trace(known, of_torch))),
        _write(os.path.join(output, f"{title}.speedscope.json"), [json.dumps(speedscope_file(known, title))]),
    ]
    spots = find_hot_spots(known)
    sentences, late = describe_late_ranks(known)
    differ = [
        f"rank {each.rank} differs: {_format_share(each.share)} of its time is in {format_location(each.line)}"
        f" (other ranks: {_format_share(each.others)})"
        for each in find_outliers(spots, late)
    ]
    colour = None if is_colour_allowed() else False
    bold = [click.style(sanitize_line(each, 2000), bold=True) for each in (*differ, *sentences)]
    for line in (*bold, *_format_hot_spots(spots, notes)):
        click.echo(line, color=colour)
    click.echo(f"\nPerfetto or chrome://tracing: {paths[0]}\nspeedscope: {paths[1]}")
    if of_torch:
        click.echo(f"torch.profiler: in the trace, and in {os.path.join(output, title)}.rank-*.torch.json")
    for path in of_py_spy:
        click.echo(f"py-spy, for speedscope: {path}")
    _print_remote_traces(known)
    return 0


def _taken_profiles(profiles: Sequence[RankProfile], notes: Sequence[str]) -> list[RankProfile]:
    """Return the profiles that were taken; raise LaunchError if there are none."""
    if all(each.missing_reason == STARTING for each in profiles) and JOB_ENDED_NOTE not in notes:
        raise LaunchError("the ranks have not started yet", "try again in a few seconds")
    known = [each for each in profiles if not each.missing_reason]
    if not known:
        raise LaunchError("no rank could be profiled", "\n".join(notes[:2]) or None)
    return known


def _print_remote_traces(profiles: Iterable[RankProfile]) -> None:
    """Print where the files of torch's profiler on other hosts are."""
    for each in profiles:
        if each.torch and not _is_local(each):
            where = f"{sanitize_line(each.torch)} on {sanitize_line(each.host)}"
            click.echo(f"torch.profiler: {where}, deleted when the job ends")


def _find_pids(path: str, text: str) -> dict[int, int]:
    """Return the pids of the ranks of ``--py-spy``; raise UsageError if one of them does not run here."""
    known = client.send_request(path, StatusQuery()).ranks
    here = {each.rank: each.pid for each in known if each.state is RankState.RUNNING}
    try:
        ranks = parse_cpulist(text)
    except ValueError:
        what = f"--py-spy {sanitize_line(text, 60)}: expected ranks"
        raise UsageError(what, "--py-spy 0,3 or --py-spy 0-3") from None
    if missing := [each for each in ranks if each not in here]:
        what = f"--py-spy {sanitize_line(text, 60)}: not on this machine: {format_ranks(missing)}"
        raise UsageError(what, f"here: {format_ranks(here)}" if here else None)
    return {each: here[each] for each in ranks}


def _collect_profiles(path: str, seconds: float, torch: bool) -> tuple[list[RankProfile], list[str]]:
    """Request the profiles of all ranks; return them in order, and notes on those that are missing."""
    profiles: list[RankProfile] = []
    notes: list[str] = []
    is_complete = False
    for message in client.stream_replies(
        path, ProfileJobRequest(seconds, torch), ProfileRequest(seconds, torch).timeout_s
    ):
        if message.refusal:
            raise LaunchError(message.refusal, "try again in a minute")
        profiles += filter(None, [message.profile])
        notes += [f"{sanitize_line(node)} did not answer" for node in message.silent_nodes]
        is_complete |= message.is_last
    reasons: dict[str, list[int]] = {}
    for each in profiles:
        reasons.setdefault(each.missing_reason, []).append(each.rank)
    notes += [f"no profile of {format_ranks(numbers)}: {sanitize_line(why)}" for why, numbers in reasons.items() if why]
    if not is_complete:
        notes.append(JOB_ENDED_NOTE)
    return sorted(profiles, key=lambda each: each.rank), notes


def _missing_torch_notes(profiles: Iterable[RankProfile]) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for each in profiles:
        if not each.torch:
            reasons.setdefault(each.no_torch, []).append(each.rank)
    return [f"no torch.profiler data of {format_ranks(ranks)}: {sanitize_line(why)}" for why, ranks in reasons.items()]


def _is_local(profile: RankProfile) -> bool:
    return profile.host in ("", host_name())


def _move_torch_trace(profile: RankProfile, title: str) -> str:
    """Move the file of torch's profiler to the output folder; return its new path."""
    path = f"{title}.rank-{profile.rank}.torch.json"
    try:
        shutil.move(profile.torch, path)
    except OSError as error:
        raise LaunchError(f"{sanitize_line(path)}: {(error.strerror or '').lower()}") from None
    return path


def _format_hot_spots(spots: Sequence[HotSpot], notes: Iterable[str]) -> Iterator[str]:
    yield from (click.style(f"note: {note}", fg="yellow") for note in notes)
    shown = [each for each in spots if each.mean_share >= MIN_SHARE][:MAX_LINES]
    rows = []
    for spot in shown:
        low, high = min(spot.shares.values()), max(spot.shares.values())
        spread = f"{100 * low:.0f} to {_format_share(high)}" if len(spot.shares) > 1 else ""
        where = sanitize_line(format_location(spot.line), 200)
        rows.append((_format_share(spot.mean_share), spread, where, sanitize_line(spot.calls, 80)))
    yield ""
    yield from format_table(("TIME", "OF RANKS", "WHERE", "CALLS"), rows)
    if (rest := spots[len(shown) :]) and sum(each.mean_share for each in rest) >= MIN_SHARE:
        yield f"{_format_share(sum(each.mean_share for each in rest))} in {format_count(len(rest), 'line')} more"


def _format_share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _format_trace_file(events: Iterable[Event]) -> Iterator[str]:
    """Yield the lines of a file in the trace event format, one event in each."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, each in enumerate(events):
        yield f"{',' if number else ''}{json.dumps(each)}\n"
    yield "]}\n"


def _write(path: str, parts: Iterable[str]) -> str:
    try:
        with open(open_for_writing(path, os.O_EXCL), "w", encoding="utf-8") as file:
            file.writelines(parts)
    except OSError as error:
        raise LaunchError(f"{sanitize_line(path)}: {(error.strerror or '').lower()}") from None
    return path
