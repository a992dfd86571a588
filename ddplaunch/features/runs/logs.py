"""``ddplaunch logs``: prints the output of a run's ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from datetime import time as clock
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Thread

import click

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.base.text import closest_match, format_rank_range, join_names
from ddplaunch.base.tty import is_interactive
from ddplaunch.cli import client
from ddplaunch.cli.client import JobEnded
from ddplaunch.cli.lookup.batch_jobs import (
    find_batch_job,
    find_recorded_run,
    find_running_batch_job,
    job_state,
    no_record_error,
    require_running,
    resolve_job_id,
)
from ddplaunch.cli.lookup.default_run import default_run
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.run_index import FoundRun, describe_elsewhere, find_run
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.core.output.line_merger import LineMerger, MergedLines
from ddplaunch.core.output.run_log import attempt_suffix
from ddplaunch.core.prefix import DEFAULT_PREFIX, add_prefix, format_for_ranks
from ddplaunch.features.runs import rank_logs as kept
from ddplaunch.features.runs.output_request import ProgramOutputRequest
from ddplaunch.features.runs.rank_logs import OutputPart
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunState
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.schedulers.log_follower import LogFollower, print_line
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from ddplaunch.system.schedulers.submitted_jobs import save_end_if_known

MAX_LINE = 1 << 20  # bytes; a longer line is split
LOOKAHEAD_LINES = 1000  # of each rank, searched for lines that are equal to another rank's next one


@click.command(cls=JobCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.option("--rank", "typed", metavar="LIST", help="Show only these ranks: 3, or 0,3.")
@click.option("--program", metavar="NAME", help="Show the output of this program beside the ranks.")
@click.option("--tail", metavar="N", type=click.IntRange(1), help="Show only the last N lines of each rank.")
@click.option("--since", metavar="TIME", help="Show only output since 10m (ago), 14:30, or 2026-11-26 14:30.")
@click.option("--failed", is_flag=True, help="Show only ranks that failed.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run ends.")
@click.option(
    "--merge/--no-merge",
    default=None,
    help="Merge equal lines of several ranks, as [0-7] LINE.  [default: in a terminal only]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, with rank and line.")
def logs(
    run: str | None,
    typed: str | None,
    program: str | None,
    tail: int | None,
    since: str | None,
    failed: bool,
    follow: bool,
    merge: bool | None,
    as_json: bool,
) -> int:
    """Show the output of a run.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the newest run of this
    folder.

    With --log-dir this is the whole output of the last attempt, otherwise the last 256 KiB of each rank. Each line
    begins with its rank, unless you select one rank. --since covers all attempts, with a resolution of one second.

    With the number of a submitted job, show the job's log. With --rank or --program, the nodes are queried through
    Slurm (`srun --overlap`), Grid Engine or Kubernetes (`kubectl exec`).
    """
    part = OutputPart(tail or 0, None if since is None else parse_moment(since, time.time()))
    if tail and since is not None:
        raise UsageError("--tail and --since contradict each other", "leave one of them out")
    if program is not None:
        given = {"--rank": typed, "--since": since, "--failed": failed, "--json": as_json}
        if other := next((name for name, value in given.items() if value), None):
            raise UsageError(f"{other} does not work with --program", "leave one of them out")
        if batch_job := find_running_batch_job(run, "logs"):
            options = ["--program", program, *_output_options(follow, tail)]
            return batch_job.run_command("logs", options, everywhere=True)
        target_run = find_run(default_run(follow=follow) if run is None else run)
        for data in _program_output(target_run, program, tail or 0, follow=follow):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return 0
    if (queued := find_batch_job(run)) and run:
        options = [*(["--rank", typed] if typed is not None else []), *(["--failed"] if failed else [])]
        options += [*(["--since", since] if since is not None else []), *(["--json"] if as_json else [])]
        options += [] if merge is None else ["--merge" if merge else "--no-merge"]
        result = _logs_of_job(queued, run, options, follow, tail or 0)
        if isinstance(result, int):
            return result
        run = result
    target_run = find_run(default_run(follow=follow) if run is None else run)
    ranks = _chosen_ranks(target_run, typed, failed)
    pieces = _output_chunks(target_run, ranks, follow, part)
    if as_json or len(ranks) == 1 or not (is_interactive(1) if merge is None else merge):
        output = format_stream(chain.from_iterable(pieces), prefix=len(ranks) != 1, as_json=as_json)
    else:
        output = add_rank_prefix(merge_live(chain.from_iterable(pieces)) if follow else align_equal_lines(pieces))
    stdout, is_empty = sys.stdout.buffer, True
    for text in output:
        stdout.write(text)
        stdout.flush()
        is_empty = False
    if since is not None and is_empty:
        click.echo(f"the ranks of {target_run.run} on this machine have printed nothing since then", err=True)
    return 0


def _output_options(follow: bool, tail: int | None) -> list[str]:
    return [*(["--follow"] if follow else []), *(["--tail", str(tail)] if tail else [])]


def _program_output(run: FoundRun, program: str, tail: int, *, follow: bool) -> Iterator[bytes]:
    """Yield the output of a program beside the ranks: the log of its last start, or what is in memory."""
    record, log_dir = run.record, run.record.log_dir if run.record else None
    known = [each.program for each in record.programs] if record else []
    if record and log_dir and program in known and not (run.running and follow):
        names = [
            f"{program}{suffix}.log" for suffix in ("", *(attempt_suffix(each.number) for each in record.attempts))
        ]
        paths = [os.path.join(log_dir, name) for name in names]
        if path := next((path for path in reversed(paths) if os.path.exists(path)), None):
            with open(path, "rb") as file:
                yield kept.read_last_lines(file, tail) if tail else file.read()
            return
    if run.running:
        known = []
        for reply in client.stream_replies(run.running.path, ProgramOutputRequest(program, tail, follow)):
            known = [*reply.known]
            yield reply.data
        if program in known:
            return
    if program in known:
        raise LaunchError(f"no output of {program} is kept", "ddplaunch run --log-dir DIR keeps all that it prints")
    near = closest_match(program, known)
    hint = f"did you mean {near}?" if near else f"its programs: {join_names(known) or 'none'}"
    raise UsageError(f"{run.run} has no program {sanitize_line(program, 60)}", hint)


def _logs_of_job(job: SubmittedJob, word: str, options: Sequence[str], follow: bool, tail: int) -> str | int:
    """Print the output of a submitted job, and return an exit code; or return the name of its run, if recorded here."""
    which = resolve_job_id(job, word, "logs")
    if options:
        seen = job_state(job, which)
        if seen.code is None:
            options = [*options, *_output_options(follow, tail)]
            return require_running(job, which).run_command("logs", options, everywhere=True)
        if name := find_recorded_run(job, seen):
            return name
        what = f"job {which.text} has ended, and the output of its ranks is not on this machine"
        raise LaunchError(what, f"ddplaunch logs {which.text} prints its log")
    files, scheduler, has_ended = job.log_paths(which.index), get_scheduler(job), False
    if not (files[0] and os.path.exists(files[0])):  # the scheduler is queried only if there is no log
        seen = job_state(job, which, scheduler)
        files, has_ended = (seen.log_path, seen.stderr_path), seen.code is not None
        if seen.is_pending and not follow:
            print_line(f"job {which.text} {seen.description}")
    last_bytes = _last_lines_size(files[0], tail) if tail else None
    ended = job.get_end(which.index) is not None
    if follow and ended and scheduler.can_requeue:
        ended = job_state(job, which).code is not None
    with closing(LogFollower(which, scheduler, files, last_bytes, tail)) as follower:
        if has_ended and follower.reads_files and not os.path.exists(files[0] or ""):
            raise no_record_error(which, seen)
        if follow and not ended:
            follower.run()
            save_end_if_known(job, which, follower.last_seen)
        else:
            follower.copy_logs()
    return 0


def _last_lines_size(path: str | None, lines: int) -> int:
    """Return the size of the last lines of a log."""
    try:
        with open(path or "", "rb") as file:
            return len(kept.read_last_lines(file, lines))
    except OSError:  # the log does not exist yet
        return 0


def _chosen_ranks(run: FoundRun, typed: str | None, failed: bool) -> list[int]:
    """Return the ranks of --rank or --failed; none means all ranks."""
    if failed and typed is not None:
        raise UsageError("--rank and --failed contradict each other", "leave one of them out")
    if failed:
        ranks = kept.failed_ranks(run.record) if run.record else []
        if not ranks:
            raise UsageError(f"no rank of {run.run} has failed", f"ddplaunch logs {run.run}")
        return ranks
    if typed is None:
        return []
    numbers = [parse_int(word) for word in typed.split(",")]
    chosen = [number for number in numbers if number is not None]
    if len(chosen) != len(numbers):
        what = f"--rank {sanitize_line(typed, 60)}: expected ranks like 3 or 0,3"
        raise UsageError(what, "without it, all ranks are shown")
    size = run.record.world_size if run.record else None
    if size is not None and (beyond := [number for number in chosen if not 0 <= number < size]):
        raise UsageError(f"--rank {beyond[0]}: {run.run} has {format_rank_range(0, size - 1)}", f"--rank {size - 1}")
    return chosen


def _output_chunks(
    run: FoundRun, ranks: Sequence[int], follow: bool, part: OutputPart
) -> list[Iterator[tuple[int, bytes]]]:
    """Return streams of (rank, data): one for each rank, or a single one to ``follow``."""
    job, record = run.running, run.record
    in_files = bool(record and record.log_dir)
    if job and not in_files:
        pieces = kept.read_live_output(job.path, ranks, part, follow=follow)
        pieces = _explain_if_empty(run, pieces) if part.since is None else pieces
        pieces = _stored_if_ended(run, pieces, ranks, part)
        return [pieces] if follow else [iter([piece]) for piece in pieces]
    if job and follow:
        return [kept.follow_files(run.run, job.path, ranks, part)]
    files = kept.rank_log_files(run.run)
    here = [rank for rank in ranks or files if rank in files]
    if not here and record and record.fate is RunState.DONE and record.world_size > 1 and not record.log_dir:
        click.echo(f"these ranks of {run.run} have printed nothing on this machine", err=True)
    elif not here:
        raise LaunchError(*_why_no_output(run))
    return [kept.read_stored_output(files, [rank], part) for rank in here]


def _stored_if_ended(
    run: FoundRun, pieces: Iterator[tuple[int, bytes]], ranks: Sequence[int], part: OutputPart
) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of live output; if the job has ended since it was found, yield its stored output."""
    try:
        yield from pieces
    except JobEnded:
        if (record := history_store.read_run_record(run.run)) is None:
            raise
        yield from chain.from_iterable(_output_chunks(FoundRun(run.run, None, record), ranks, False, part))


def parse_moment(text: str, now: float) -> float:
    """Parse a time in the past: "10m" before now, "14:30" in the last 24 hours, "2026-11-26 14:30"."""
    ago = parse_seconds(text)
    if ago is not None and ago >= 0:
        return now - ago
    with suppress(ValueError):
        time_of_day = clock.fromisoformat(text)
        moment = datetime.combine(datetime.fromtimestamp(now, time_of_day.tzinfo), time_of_day)
        return (moment if moment.timestamp() <= now else moment - timedelta(days=1)).timestamp()
    with suppress(ValueError, OverflowError):
        if (moment := datetime.fromisoformat(text)).timestamp() <= now:
            return max(0.0, moment.timestamp())
    what = f"--since {sanitize_line(text, 60)}: expected a time in the past, like 10m, 14:30 or 2026-11-26 14:30"
    raise UsageError(what, "ddplaunch logs --since 10m")


def _explain_if_empty(run: FoundRun, pieces: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of output unchanged; if there are none, print why."""
    if first := next(pieces, None):
        yield from chain([first], pieces)
    elif run.record and run.record.world_size == 1:
        click.echo("the only rank of a job prints straight to its terminal; --log-dir keeps a copy", err=True)
    else:
        click.echo(f"the ranks of {run.run} on this machine have printed nothing", err=True)


def _why_no_output(run: FoundRun) -> tuple[str, str]:
    """Return why there is no output, and a hint."""
    record, hint = run.record, "ddplaunch run --log-dir DIR keeps all that ranks print"
    if record and record.log_dir:
        return f"{sanitize_line(record.log_dir)} has no output of such a rank", "the folder may have been removed"
    if record and record.world_size == 1:
        return f"the only rank of {run.run} printed straight to its terminal", hint
    if record and (hosts := history_store.hosts_elsewhere([record])):
        return describe_elsewhere(run.run, hosts)
    if record and record.fate is RunState.LOST:
        return f"the launcher of {run.run} was killed, and the output in its memory is lost", hint
    return f"no output of {run.run} is kept here", hint


def format_stream(pieces: Iterable[tuple[int, bytes]], *, prefix: bool, as_json: bool) -> Iterator[bytes]:
    """Format pieces of output for stdout; with ``prefix`` or JSON, only complete lines at a time."""
    if not prefix and not as_json:
        yield from (data for _, data in pieces)
        return
    for rank, lines in regroup_by_line(pieces):
        if as_json:
            objects = ({"rank": rank, "line": line.decode(errors="replace")} for line in lines[:-1].split(b"\n"))
            yield b"".join(json.dumps(each).encode() + b"\n" for each in objects)
        else:
            yield add_prefix(b"[%d] " % rank, lines)


def regroup_by_line(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Regroup pieces so that each one ends with a line."""
    unfinished: dict[int, bytes] = {}  # the last line of a rank, if it has no end yet
    for rank, data in pieces:
        lines, newline, rest = (unfinished.pop(rank, b"") + data).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if rest:
            unfinished[rank] = rest
        if newline:
            yield rank, lines + newline
    for rank, rest in unfinished.items():
        yield rank, rest + b"\n"


def align_equal_lines(sources: Iterable[Iterator[tuple[int, bytes]]]) -> Iterator[MergedLines]:
    """Merge the equal lines of stored outputs: rank after rank, each line with the equal lines of other ranks."""
    equal = LineMerger(math.inf, ranks_unknown=True)
    reading: dict[int, Iterator[tuple[int, bytes]]] = {}
    for lines in map(regroup_by_line, sources):
        if first := next(lines, None):
            reading[first[0]] = chain([first], lines)
    for rank in [*reading]:
        while True:
            for source, lines in [*reading.items()]:
                while equal.held_count(source) < LOOKAHEAD_LINES:
                    if (piece := next(lines, None)) is None:
                        del reading[source]
                        break
                    equal.add(source, 1, piece[1], 0.0)
            if not equal.held_count(rank):
                break
            for _ in range(min(equal.held_count(rank), LOOKAHEAD_LINES // 2)):
                equal.emit_first_line(rank)
            yield from equal.take_output()


def merge_live(pieces: Iterable[tuple[int, bytes]]) -> Iterator[MergedLines]:
    """Merge the equal lines that ranks print at the same time, as they come."""
    equal, arrived = LineMerger(ranks_unknown=True), SimpleQueue[tuple[int, int, bytes] | BaseException | None]()

    def read_pieces() -> None:
        try:
            for rank, lines in regroup_by_line(pieces):
                arrived.put((rank, 1, lines))
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    Thread(target=read_pieces, daemon=True).start()
    while True:
        due = equal.next_flush_time
        try:
            arrival = arrived.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except Empty:
            arrival = 0, 1, b""  # flush the oldest line
        if isinstance(arrival, BaseException):
            raise arrival
        if arrival is None:
            break
        equal.add(*arrival, time.monotonic())
        yield from equal.take_output()
    equal.flush_until(math.inf)
    yield from equal.take_output()


def add_rank_prefix(found: Iterable[MergedLines]) -> Iterator[bytes]:
    """Prefix each line with the ranks that printed it."""
    width = 0
    for ranks, _, lines in found:
        prefix = format_for_ranks(DEFAULT_PREFIX, ranks)
        width = max(width, len(prefix) if len(prefix) < 10 else 0)
        yield add_prefix(f"{prefix:<{width}} ".encode(), lines)
