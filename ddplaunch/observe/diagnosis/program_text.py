"""Describes what the programs beside the ranks do, for ``ddplaunch stacks``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.text import format_elapsed
from ddplaunch.core.failures import describe_exit
from ddplaunch.observe.diagnosis.inspection import Inspection, ProgramInspection

IDLE_PERCENT = 1.0  # of a GPU, below which it is called idle
MIN_SILENCE_S = 1.0  # worth a word


def describe_programs(inspection: Inspection) -> Iterator[str]:
    """Yield lines of text on each program that runs beside the ranks."""
    hosts = {each.host for each in inspection.ranks} | {each.host for each in inspection.programs}
    for each in inspection.programs:
        yield _describe_program(each, inspection.moment, each.host if len(hosts - {""}) > 1 else "")
        if each.last_line and each.state != "waiting":
            yield f"  last line: {sanitize_line(each.last_line)}"


def _describe_program(program: ProgramInspection, moment: float, host: str) -> str:
    """Describe a program: "vllm: ready for 2m41s, 0 % CPU, its GPUs idle, silent for 2m40s (pid 7, GPUs 0-3)"."""
    facts = [f"{program.state} for {format_elapsed(max(0.0, moment - program.since))}"]
    if program.code is not None:
        facts.append(describe_exit(program.code))
    if program.busy is not None:
        facts.append(f"{program.busy * 100:.0f} % CPU")
    if program.gpu_busy is not None:
        whose = "its GPUs" if {*"-,"} & {*program.gpus} else "its GPU"
        facts.append(f"{whose} idle" if program.gpu_busy < IDLE_PERCENT else f"{whose} {program.gpu_busy:.0f} % busy")
    if program.quiet is not None and program.quiet >= MIN_SILENCE_S:
        facts.append(f"silent for {format_elapsed(program.quiet)}")
    pid = f"pid {program.pid}" if program.is_running else ""
    where = ", ".join(filter(None, (host and f"on {host}", pid, program.place if program.is_running else "")))
    return sanitize_line(f"{program.program}: {', '.join(facts)}{where and f' ({where})'}", 300)


def programs_with_usage(
    inspection: Inspection, earlier: Inspection, gpu_busy: Mapping[str, float]
) -> tuple[ProgramInspection, ...]:
    """Return the programs of an inspection, with their CPU usage since ``earlier`` and the load of their GPUs."""
    seconds = inspection.moment - earlier.moment
    before = {(each.host, each.program, each.pid): each.cpu for each in earlier.programs if each.is_running}

    def add_usage_of(program: ProgramInspection) -> ProgramInspection:
        used = before.get((program.host, program.program, program.pid))
        known = program.is_running and used is not None and seconds > 0
        busy = max(0.0, program.cpu - (used or 0.0)) / seconds if known else None
        return replace(program, busy=busy, gpu_busy=gpu_busy.get(program.program))

    return tuple(map(add_usage_of, inspection.programs))
