"""Computes for the report what the programs beside the ranks have used, from the samples of the run."""

from __future__ import annotations

import os
from collections.abc import Iterable

from msgspec.structs import replace

from ddplaunch.core.control_socket.job_status import ProgramStatus
from ddplaunch.observe.history import history_store, sample_file
from ddplaunch.observe.history.run_record import RunRecord
from ddplaunch.observe.samples.sample import NodeSample


def with_program_usage(record: RunRecord) -> RunRecord:
    """Return the record with the usage of its programs, from the samples in the history."""
    if not record.programs:
        return record
    path = os.path.join(history_store.run_dir(record.run), sample_file.sample_file_name(record.node_rank))
    return replace(record, programs=add_program_usage(record.programs, sample_file.read_samples(path)))


def add_program_usage(programs: tuple[ProgramStatus, ...], samples: Iterable[NodeSample]) -> tuple[ProgramStatus, ...]:
    """Return the programs with their peak memory, and for how long each was silent in the end.

    The record has these values only of programs that ended before the job, and only of their largest process.
    """
    peaks, quiet = dict[str, int](), dict[str, float | None]()
    for each in (each for sample in samples for each in sample.programs):
        peaks[each.program] = max(peaks.get(each.program, 0), int(each.memory or 0))
        quiet[each.program] = each.quiet

    def complete(program: ProgramStatus) -> ProgramStatus:
        peak = max(program.peak_memory, peaks.get(program.program, 0))
        last = quiet.get(program.program) if program.quiet is None else program.quiet
        return replace(program, peak_memory=peak, quiet=last)

    return tuple(map(complete, programs))
