"""Tests of the sentences about programs beside the ranks."""

import pytest

from ddplaunch.observe.diagnosis.inspection import Inspection, ProgramInspection
from ddplaunch.observe.diagnosis.program_text import describe_programs, programs_with_usage
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits


def program(**what) -> ProgramInspection:
    known = {"kind": "service", "gpus": "", "address": "", "since": 100.0, "state": "ready", "pid": 7, "host": "a"}
    return ProgramInspection("vllm", **{**known, **what})


def text(*programs: ProgramInspection) -> list[str]:
    return [*describe_programs(Inspection(260.0, (), 2, programs=programs))]


HANGING = {"gpus": "0-3", "address": "10.0.0.7:8000", "busy": 0.0, "gpu_busy": 0.4, "quiet": 160.0}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (HANGING, "vllm: ready for 2m40s, 0 % CPU, its GPUs idle, silent for 2m40s (pid 7, GPUs 0-3, 10.0.0.7:8000)"),
        ({"gpus": "5", "gpu_busy": 97.0, "quiet": 0.2}, "vllm: ready for 2m40s, its GPU 97 % busy (pid 7, GPUs 5)"),
        ({"state": "starting", "busy": 1.93}, "vllm: starting for 2m40s, 193 % CPU (pid 7)"),
        ({"state": "waiting", "pid": 0}, "vllm: waiting for 2m40s"),
        ({"state": "ended", "code": -9}, "vllm: ended for 2m40s, was ended by SIGKILL (killed from outside)"),
    ],
)
def test_what_a_program_does(what, said):
    assert text(program(**what)) == [said]


def test_the_last_line_and_the_host():
    assert text(program(last_line="INFO\x1b[2J done"), program(host="b"))[:2] == [
        "vllm: ready for 2m40s (on a, pid 7)",
        "  last line: INFO\\x1b[2J done",
    ]


def test_ranks_that_wait_for_a_program_before_they_start():
    loading, judge = program(state="starting"), program(state="waiting", pid=0)
    told = describe_waits(Inspection(260.0, (), 0, programs=(loading, program(), judge)))
    assert told == ("no rank has started: vllm, vllm are not ready",)
    assert describe_waits(Inspection(260.0, (), 0, programs=(loading,))) == ("no rank has started: vllm is not ready",)


def test_the_cpus_between_two_inspections():
    before = Inspection(10.0, (), 2, programs=(program(cpu=5.0), program(host="b", pid=8)))
    now = Inspection(12.0, (), 2, programs=(program(cpu=8.0), program(host="b", pid=9, cpu=1.0)))
    assert [(each.busy, each.gpu_busy) for each in programs_with_usage(now, before, {"vllm": 7.0})] == [
        (1.5, 7.0),
        (None, 7.0),
    ]
