"""``ddplaunch stacks``: prints which ranks of a running job wait for which, and the stack of each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import click
from msgspec.structs import replace

from ddplaunch.base.errors import host_name
from ddplaunch.cli import client
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.lookup.batch_jobs import find_running_batch_job
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.run_index import find_running
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, RankInspection
from ddplaunch.observe.diagnosis.program_text import programs_with_usage
from ddplaunch.observe.diagnosis.stack_groups import group_ranks
from ddplaunch.observe.request import InspectJobRequest
from ddplaunch.observe.stacks_text import render_stacks, stacks_to_json
from ddplaunch.system.devices.gpu_usage import read_gpu_usage
from ddplaunch.system.processes import py_spy

CPU_INTERVAL_S = 0.2  # over which the CPU time of a program is measured


@click.command(cls=JobCommand)
@click.argument("run", required=False, type=RunName(running=True))
@click.option("--native", is_flag=True, help="Add C and C++ frames for each group, with py-spy.")
@click.option("--locals", "with_locals", is_flag=True, help="Add local variables for each group, with py-spy.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def stacks(run: str | None, native: bool, with_locals: bool, as_json: bool) -> int:
    """Show the stacks of all ranks of a run and which ranks wait for which.

    RUN is the name of the run, the beginning of it, or the PID of its launcher. It may be omitted if only one is
    in progress. The job is not disturbed. Ranks with equal stacks are grouped. With the number of a submitted job,
    node 0 is queried through Slurm (`srun --overlap`) or Grid Engine.
    """
    more = [word for word, wanted in (("--native", native), ("--locals", with_locals)) if wanted]
    if batch_job := find_running_batch_job(run, "stacks"):
        return batch_job.run_command("stacks", [*more, *(["--json"] if as_json else [])])
    tool = py_spy.find_py_spy(more[0]) if more else ""
    inspection = _inspect(find_running(run).path)
    ranks = [*_local_group_examples(inspection)] if more else []
    dumps = {rank.rank: py_spy.dump_stacks(tool, rank.pid, more) for rank in ranks}
    if as_json:
        fields = stacks_to_json(inspection)
        if more:
            fields["py_spy"] = {str(rank): text for rank, text in dumps.items()}
        click.echo(json.dumps(fields))
        return 0
    colour = None if is_colour_allowed() else False
    click.echo(render_stacks(inspection), nl=False, color=colour)
    for rank, text in dumps.items():
        click.echo(f"\n{click.style(f'rank {rank}, by py-spy:', bold=True)}\n{text}", nl=False, color=colour)
    return 0


def _inspect(path: str) -> Inspection:
    """Inspect all ranks; if programs run beside them, a second time, to measure the CPU time of the programs."""
    inspection = client.send_request(path, InspectJobRequest(Detail.WAITS)).inspection
    if not any(each.is_running for each in inspection.programs):
        return inspection
    time.sleep(CPU_INTERVAL_S)
    later = client.send_request(path, InspectJobRequest(Detail.STATE)).inspection
    return replace(inspection, programs=programs_with_usage(later, inspection, _query_gpus(later)))


def _query_gpus(inspection: Inspection) -> dict[str, float]:
    """Return the load of the GPUs of each program on this machine, in percent; nothing if the driver hangs."""
    with_gpus = [each for each in inspection.programs if each.gpus and each.host == host_name()]
    gpus = read_gpu_usage() if with_gpus else ()
    loads = {}
    for each in with_gpus:
        if busy := [gpu.busy for gpu in gpus if gpu.busy is not None and each.has_gpu(gpu.gpu)]:
            loads[each.program] = sum(busy) / len(busy)
    return loads


def _local_group_examples(inspection: Inspection) -> Iterator[RankInspection]:
    """Yield one rank of each stack group that runs on this machine."""
    by_number = inspection.by_number
    for group in group_ranks(inspection):
        here = (by_number[number] for number in group.ranks if by_number[number].host in ("", host_name()))
        yield from [rank for rank in here if rank.pid][:1]
