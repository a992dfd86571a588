"""Collects the inputs of the page besides the records: samples, plan, last output, live state of a running job."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError, host_name
from ddplaunch.cli import client
from ddplaunch.cli.lookup.run_index import FoundRun
from ddplaunch.core.control_socket.job_status import RankState, RankStatus
from ddplaunch.features.runs import rank_logs
from ddplaunch.features.runs.html_report.output_section import MAX_BYTES_PER_RANK
from ddplaunch.features.runs.html_report.page_run import PageInputs
from ddplaunch.features.runs.time_tracker import BreakdownReply, BreakdownRequest
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.history import history_store, sample_file
from ddplaunch.observe.history.run_record import RankRecord, RunRecord
from ddplaunch.observe.request import InspectJobRequest, JobInspection
from ddplaunch.observe.samples.sample import average

REPLY_TIMEOUT_S = 5.0  # for the job's launcher: it may be suspended


def collect_inputs(
    run: FoundRun, shares: Sequence[RunRecord], *, live: bool = False, effective: str = ""
) -> PageInputs:
    """Collect the inputs from the history, the log folder and, while the run goes on, its launcher.

    ``effective``: the line on goodput.
    """
    folder = history_store.run_dir(run.run)
    of_nodes = [os.path.join(folder, sample_file.sample_file_name(each.node_rank)) for each in shares]
    plan = sample_file.read_plan(os.path.join(folder, sample_file.plan_file_name(shares[0].node_rank)))
    known = tuple(tuple(sample_file.read_samples(path)) for path in of_nodes)
    failed = rank_logs.failed_ranks(shares[0]) if shares[0].code else []
    printed, attempt = _last_output(run)
    return PageInputs(known, printed, failed, plan, live, effective, attempt)


def _last_output(run: FoundRun) -> tuple[dict[int, bytes], int | None]:
    """Return the last output of each rank, and its attempt; none if nothing was stored, as after success."""
    if run.running:
        output: dict[int, bytes] = {}
        with suppress(LaunchError):
            for rank, data in rank_logs.read_live_output(run.running.path, (), rank_logs.OutputPart(), follow=False):
                output[rank] = (output.get(rank, b"") + data)[-MAX_BYTES_PER_RANK:]
        if output:
            return output, None
    files = {rank: paths[-1] for rank, paths in rank_logs.rank_log_files(run.run).items()}
    last = max(map(rank_logs.get_attempt_number, files.values()), default=None)
    return {rank: tail for rank, path in files.items() if (tail := _read_tail(path))}, last


def _read_tail(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES_PER_RANK))
            return file.read(MAX_BYTES_PER_RANK)
    except OSError:
        return b""


def with_live_state(run: FoundRun, shares: Sequence[RunRecord], known: PageInputs) -> list[RunRecord]:
    """Return the records, with the state and usage of this machine's ranks until now if the run is running.

    The history has these only at the end of an attempt.
    """
    if run.running is None:
        return [*shares]
    try:
        seen = client.send_request(run.running.path, InspectJobRequest(Detail.WAITS), REPLY_TIMEOUT_S)
        times = client.send_request(run.running.path, BreakdownRequest(), REPLY_TIMEOUT_S)
    except LaunchError:  # it has just ended, or is suspended
        return [*shares]
    here = seen.status.pid, host_name()  # on another machine, the launcher of another node may have the same pid
    return [_record_from_live(each, seen, times, known) if (each.pid, each.host) == here else each for each in shares]


def _record_from_live(record: RunRecord, seen: JobInspection, times: BreakdownReply, known: PageInputs) -> RunRecord:
    attempts, number = record.attempts, seen.status.attempt
    if attempts and attempts[-1].number == number:
        statuses = {each.rank: each for each in seen.status.ranks}
        used: dict[int, tuple[int, float]] = {}
        for node in known.readings:
            if all_ := average(each for each in node if each.attempt == number):
                used |= {row.rank: (int(row.memory or 0), all_.seconds * (row.cpus or 0)) for row in all_.ranks}
        last = attempts[-1]
        ranks = (_rank_from_live(each, statuses.get(each.rank), *used.get(each.rank, (0, 0.0))) for each in last.ranks)
        attempts = (*attempts[:-1], replace(last, ranks=tuple(ranks)))
    seen_now = (*record.inspections, seen.inspection)
    return replace(record, attempts=attempts, inspections=seen_now, spent=times.spent, stalls=times.stalls)


def _rank_from_live(rank: RankRecord, status: RankStatus | None, memory: int, cpu: float) -> RankRecord:
    if status is None or not status.pid:
        return rank
    ended = time.time() if status.state is RankState.EXITED else None
    return replace(rank, ended=ended, code=status.code, peak_memory=memory, cpu=cpu)
