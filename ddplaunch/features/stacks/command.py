"""``ddplaunch stacks``: prints which ranks of a running job wait for which, and the stack of each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

import click
import psutil

from ddplaunch.base.errors import host_name
from ddplaunch.base.text import format_elapsed
from ddplaunch.base.types import as_dict
from ddplaunch.cli import client
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.job_argument import JobCommand, RunName
from ddplaunch.cli.locate import find_batch_job, find_running
from ddplaunch.core.control_socket.job_status import ProgramStatus
from ddplaunch.core.failures import describe_exit
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, RankInspection
from ddplaunch.observe.diagnosis.stack_groups import group_ranks
from ddplaunch.observe.request import InspectJobRequest
from ddplaunch.observe.stacks_text import render_stacks, stacks_to_json
from ddplaunch.system.processes import py_spy

CPU_INTERVAL_S = 0.2  # over which the CPU time of a program is measured


@click.command(cls=JobCommand)
@click.argument("run", required=False, type=RunName(running=True))
@click.option("--native", is_flag=True, help="Add C and C++ frames for each group, with py-spy.")
@click.option("--locals", "with_locals", is_flag=True, help="Add local variables for each group, with py-spy.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def stacks(run: str | None, native: bool, with_locals: bool, as_json: bool) -> int:
    """Show the stacks of all ranks of a running job and which ranks wait for which.

    RUN is the name of the run, the beginning of it, or the PID of its launcher. It may be omitted if only one job
    runs. The job is not disturbed. Ranks with equal stacks are grouped. With the number of a submitted job, node 0 is
    queried through Slurm (`srun --overlap`) or Grid Engine.
    """
    more = [word for word, wanted in (("--native", native), ("--locals", with_locals)) if wanted]
    if batch_job := find_batch_job(run, "stacks"):
        return batch_job.run_command("stacks", [*more, *(["--json"] if as_json else [])])
    tool = py_spy.find_py_spy(more[0]) if more else ""
    found = client.send_request(find_running(run).path, InspectJobRequest(Detail.WAITS))
    inspection = found.inspection
    ranks = [*_local_examples(inspection)] if more else []
    dumps = {rank.rank: py_spy.dump_stacks(tool, rank.pid, more) for rank in ranks}
    if as_json:
        fields = stacks_to_json(inspection)
        if more:
            fields["py_spy"] = {str(rank): text for rank, text in dumps.items()}
        fields["programs"] = [as_dict(each) for each in found.status.programs]
        click.echo(json.dumps(fields))
        return 0
    colour = None if is_colour_allowed() else False
    click.echo(render_stacks(inspection), nl=False, color=colour)
    for each in found.status.programs:
        click.echo(_describe_program(each))
    for rank, text in dumps.items():
        click.echo(f"\n{click.style(f'rank {rank}, by py-spy:', bold=True)}\n{text}", nl=False, color=colour)
    return 0


def _describe_program(program: ProgramStatus) -> str:
    """Describe what a program beside the ranks does: "vllm: ready for 2m41s, 97 % CPU (pid 7, GPUs 0-3)"."""
    text = f"{program.program}: {program.state} for {format_elapsed(time.time() - program.since)}"
    if program.code is not None:
        return f"{text}, {describe_exit(program.code)}"
    with suppress(psutil.Error):
        processes = [process := psutil.Process(program.pid), *process.children(recursive=True)] if program.pid else []
        for each in processes:
            each.cpu_percent()
        time.sleep(CPU_INTERVAL_S if processes else 0)
        text += f", {sum(each.cpu_percent() for each in processes):.0f} % CPU" * bool(processes)
    where = ", ".join(filter(None, (f"pid {program.pid}" if program.pid else "", program.place)))
    return f"{text} ({where})" if where else text


def _local_examples(inspection: Inspection) -> Iterator[RankInspection]:
    """Yield one rank of each stack group that runs on this machine."""
    by_number = inspection.by_number
    for group in group_ranks(inspection):
        here = (by_number[number] for number in group.ranks if by_number[number].host in ("", host_name()))
        yield from [rank for rank in here if rank.pid][:1]
