"""Tests of what a program's output says about whether it is ready, without processes."""

from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.deadlines import Now
from ddplaunch.core.messages import CheckPassed
from ddplaunch.core.node.node_events import ProcessSpawned
from ddplaunch.features.programs import program_events as ev
from ddplaunch.features.programs.messages import ProgramIsReady
from ddplaunch.features.programs.node import ProgramRunner
from ddplaunch.features.programs.program_commands import Life
from ddplaunch.features.programs.spec import Programs, ProgramSpec


class Started:
    """A job with a program that has just started; ``sent`` and ``notes`` are what follows from what it prints."""

    def __init__(self, ready):
        self.sent, self.notes, self._output, loop = [], [], b"", EventLoop()
        context = SimpleNamespace(
            plan=SimpleNamespace(node_rank=0, run_id="x", target=SimpleNamespace(text="train.py", args=())),
            config=SimpleNamespace(zygote=SimpleNamespace(preempt_signal=None), screen=SimpleNamespace(quiet_s=0.0)),
            job_config=SimpleNamespace(max_nodes=1),
            job=SimpleNamespace(emit=lambda event: None, send=self.sent.append),
            node=SimpleNamespace(streams=SimpleNamespace(tail=lambda name, size: self._output[-size:])),
            tree=SimpleNamespace(environ={}, add_rank_session=lambda pid: None),
            screen=SimpleNamespace(show_note=self.notes.append, show_footer=lambda text: None),
            loop=loop,
        )
        spec = ProgramSpec("vllm", ("vllm", "{port}"), ready=ready, after=())
        target = ProgramSpec("train.py", (), "main", is_target=True)
        self._runner = ProgramRunner(context, (), Programs((spec,), target), {})
        for event in (ev.AttemptBegins(0), ev.GuardStarted(Life.ATTEMPT)):
            self._runner._machine.on(event, Now(0, 0))
        self._runner.on_zygote_event(Life.ATTEMPT, ProcessSpawned(0, 1))
        if not loop.is_idle:
            loop.run_once()  # looks for the line in what was printed before: nothing

    def print(self, text):
        self._output += text
        self._runner._on_output(0)


def test_a_program_is_ready_once_it_has_printed_its_line():
    program = Started("line:is up")
    program.print(b"loads\nis ")
    assert (program.sent, program.notes) == ([], [])
    program.print(b"up\n")
    program.print(b"serves\n")
    assert program.sent == [ProgramIsReady(0, "vllm"), CheckPassed(0)], "the ranks may start"
    assert [note.partition(" after ")[0] for note in program.notes] == ["vllm is ready"]


@pytest.mark.parametrize("ready", ["tcp", "http:/health", "file:ready"])
def test_its_output_says_nothing_about_other_conditions(ready):
    program = Started(ready)
    program.print(b"/health is not ready yet\n")
    assert (program.sent, program.notes) == ([], [])
