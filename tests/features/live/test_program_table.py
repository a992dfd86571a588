"""Tests of the programs beside the ranks in the live view, drawn from made-up data."""

import time

import pytest
from msgspec.structs import replace

from ddplaunch.features.live.frame import render_full_screen
from ddplaunch.features.live.program_table import MAX_PROGRAM_ROWS, render_programs
from ddplaunch.features.live.styled_rows import render_plain_text, row_width
from ddplaunch.features.live.view_state import ViewState, find_program_gpus
from ddplaunch.observe.diagnosis.inspection import ProgramInspection
from ddplaunch.system.devices.gpu_usage import GpuUsage
from tests.features.live.test_frame import GIB, later, rank, snapshot


def program(name: str = "vllm", **what) -> ProgramInspection:
    known = {"kind": "service", "gpus": "", "address": "", "since": time.time() - 65, "state": "ready", "pid": 7}
    return ProgramInspection(name, **{**known, **what})


def view(*programs: ProgramInspection, before: ProgramInspection | None = None, **what) -> ViewState:
    seen = snapshot(rank(0), rank(1), **what)
    now = later(seen, inspection=replace(seen.current.inspection, programs=programs))
    if before is None:
        return now
    earlier = replace(seen.current.inspection, moment=3749.0, programs=(before,))
    return replace(now, previous=replace(seen.current, inspection=earlier))


def test_a_row_for_each_program():
    gpus = tuple(GpuUsage(index, 10 * index, 4 * GIB, 80 * GIB) for index in range(4))
    server = program(gpus="2-3", cpu=11.0, memory=2 * GIB, quiet=3.0, last_line="INFO serving", host="here")
    failed = program("judge", state="ended", pid=8, code=7, last_line="out of memory")
    seen = view(server, failed, before=replace(server, cpu=10.0), program_gpus={"vllm": gpus[2:]})
    assert render_plain_text(render_programs(seen, 99)).splitlines() == [
        "program is          for CPU%  mem GPU% GPUmem silent last line",
        "vllm    ready     1m05s   50 2.0G   25   8.0G   3.0s INFO serving",
        "judge   ended (7) 1m05s                              out of memory",
    ]
    assert render_plain_text(render_programs(seen, 60)).splitlines()[1].endswith("3.0s")
    assert "vllm    ready " in render_plain_text(render_full_screen(seen, 80, 24))
    assert render_programs(view(), 80) == []


@pytest.mark.parametrize(
    ("state", "code", "style"),
    [("ready", None, "32"), ("starting", None, "33"), ("ended", 0, "33"), ("ended", 7, "1;31"), ("ended", -9, "1;31")],
)
def test_a_program_that_has_failed_is_red(state, code, style):
    _, (_, shown, _) = render_programs(view(program(state=state, code=code)), 80)
    assert shown.style == style


def test_the_gpus_of_a_program_are_those_with_its_indices(monkeypatch):
    monkeypatch.setattr("ddplaunch.features.live.view_state.host_name", lambda: "here")
    gpus = tuple(GpuUsage(index, 0, 0, 0) for index in range(8))
    programs = [program("a", gpus="0-1,6", host="here"), program("b", host="here"), program("c", gpus="2", host="n2")]
    programs.append(program("d", gpus="x-3,9999999999-0", host="here"))
    found = find_program_gpus(programs, gpus)
    assert {name: [gpu.gpu for gpu in own] for name, own in found.items()} == {"a": [0, 1, 6], "d": []}


def test_of_many_programs_those_that_are_not_ready_come_first():
    many = [program(f"p{number}", state="starting" if number == 30 else "ready") for number in range(50)]
    lines = render_plain_text(render_programs(view(*many), 80)).splitlines()
    assert lines[1].startswith("p30")
    assert (len(lines), lines[-1]) == (MAX_PROGRAM_ROWS + 2, "and 42 more programs")


@pytest.mark.parametrize("across", [1, 30, 80])
@pytest.mark.parametrize("down", [1, 5, 24])
def test_the_view_fits_a_terminal_of_any_size(across, down):
    rows = render_full_screen(
        view(*[program(f"p{number}", last_line="日本 " * 50) for number in range(9)]), across, down
    )
    assert len(rows) == down
    assert all(row_width(row) <= max(1, across - 1) for row in rows)
