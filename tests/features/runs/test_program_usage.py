"""Tests of what the samples say of programs beside the ranks."""

from ddplaunch.core.control_socket.job_status import ProgramStatus, apply_event_to_programs
from ddplaunch.core.events import ProgramExited, ProgramPlanned, ProgramStarted
from ddplaunch.features.runs.program_usage import add_program_usage
from ddplaunch.observe.diagnosis.inspection import ProgramInspection
from ddplaunch.observe.history.sample_file import parse_samples
from ddplaunch.observe.samples.node import CounterSnapshot, compute_sample
from ddplaunch.observe.samples.sample import NodeSample, ProgramSample, average
from tests.features.runs.recorded_events import plan

VLLM = ProgramStatus("vllm", "service", "0-3", "127.0.0.1:8000", 1.0)


def sample(time: float, *programs: ProgramSample) -> NodeSample:
    return NodeSample(time, 15.0, 0, (), (), programs)


def test_a_sample_of_a_program_and_its_line():
    def seen(clock: float, **what) -> CounterSnapshot:
        programs = (
            ProgramInspection("vllm", "service", "", "", 1.0, "ready", 7, **what),
            ProgramInspection("tb", "sidecar", "", "", 1.0, "ended", 8, 4),
        )
        return CounterSnapshot(plan(), clock, clock, programs=programs)

    found = compute_sample(seen(10.0, cpu=5.0), seen(14.0, cpu=7.0, memory=1000, quiet=3.0), 0)
    assert found.programs == (ProgramSample("vllm", 0.5, 1000.0, 3.0),)
    assert parse_samples(found.to_json().encode()) == [found]
    assert "programs" not in sample(15.0).to_json(), "as without programs"


def test_samples_of_programs_become_one():
    first = sample(15.0, ProgramSample("vllm", 1.0, 900.0, 15.0), ProgramSample("tb", None, 5.0, 2.0))
    last = sample(30.0, ProgramSample("vllm", 0.0, 100.0, 0.5))
    merged = average([first, last])
    assert merged is not None
    assert merged.programs == (ProgramSample("tb", None, 5.0, 2.0), ProgramSample("vllm", 0.5, 900.0, 0.5))


def test_the_record_gets_peak_and_silence():
    samples = [
        sample(15.0, ProgramSample("vllm", 1.0, 900.0, 2.0)),
        sample(30.0, ProgramSample("vllm", 1.0, 800.0, 9.0)),
    ]
    (running,) = add_program_usage((VLLM,), samples)
    assert (running.peak_memory, running.quiet) == (900, 9.0)
    (unknown,) = add_program_usage((VLLM,), [])
    assert unknown == VLLM
    known = apply_event_to_programs((VLLM,), ProgramStarted("vllm", 7, 0), 2.0)
    known = apply_event_to_programs(known, ProgramExited("vllm", 3, 0, 2000, 1.5), 3.0)
    (ended,) = add_program_usage(known, samples)
    assert (ended.peak_memory, ended.quiet) == (2000, 1.5)
    again = apply_event_to_programs(known, ProgramExited("vllm", 3, 1, 500, 0.5), 9.0)
    assert (again[0].peak_memory, again[0].quiet) == (2000, 0.5), "the most of all starts, the last silence"
    assert apply_event_to_programs(again, ProgramPlanned("vllm", "service", "", ""), 10.0)[0].peak_memory == 0
