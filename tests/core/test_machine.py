"""What all machines have in common: tables that drive them, and what the report of a bug has of their events."""

from __future__ import annotations

import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.base import errors
from ddplaunch.base.errors import add_note, format_trace
from ddplaunch.base.frames import ProtocolError
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.job.job_attempt import JOB_TRANSITIONS, JobPhase
from ddplaunch.core.job.node_table import NODE_TRANSITIONS, NodePhase, NodeStep
from ddplaunch.core.machine import (
    MAX_EVENT_CHARS,
    MAX_RECENT_EVENTS,
    DeadlineDue,
    InvalidStep,
    Machine,
    MachineEvent,
    MessageReceived,
    describe_event,
    next_phase,
)
from ddplaunch.core.node.node_attempt import ATTEMPT_TRANSITIONS, AttemptPhase
from tests.conftest import write_program
from tests.constant_override import write_launcher
from tests.core.job.job_steps import Job


@pytest.mark.parametrize(
    ("table", "end"),
    [
        (ATTEMPT_TRANSITIONS, AttemptPhase.ENDED),
        (JOB_TRANSITIONS, JobPhase.ENDED),
        (NODE_TRANSITIONS, NodePhase.DRAINED),
    ],
    ids=["attempt", "job", "node"],
)
def test_every_phase_has_its_steps_and_leads_to_the_end(table: Any, end: Enum) -> None:
    assert set(table) == set(type(end))
    if end is not NodePhase.DRAINED:
        assert table[end] == {}
    for phase in table:
        reached: set[Enum] = set()
        todo = {phase}
        while todo:
            reached |= todo
            todo = {after for each in todo for after in table[each].values()} - reached
        assert end in reached


def test_a_step_that_the_table_does_not_have() -> None:
    assert next_phase(NODE_TRANSITIONS, NodePhase.IDLE, NodeStep.START) is NodePhase.RUNNING
    with pytest.raises(InvalidStep, match=r"^NodeStep.REPORT in NodePhase.IDLE$"):
        next_phase(NODE_TRANSITIONS, NodePhase.IDLE, NodeStep.REPORT)


class Happened(MachineEvent, frozen=True):
    number: int
    text: str = "a secret"


class Raising(Machine):
    """A machine that raises on event number -1, and calls number -2 the fault of a peer."""

    def _handle(self, event: MachineEvent, now: Now) -> None:
        if isinstance(event, Happened) and event.number < 0:
            raise KeyError(event.number) if event.number == -1 else ProtocolError("wrong")

    def wake_at(self) -> float | None:
        return None


def test_an_error_carries_the_latest_events() -> None:
    machine = Raising()
    for number in range(100):
        machine.on(Happened(number), Now(number, 1e9))
        machine.on(DeadlineDue(), Now(number, 1e9))
    with pytest.raises(KeyError) as raised:
        machine.on(Happened(-1), Now(100, 1e9))
    (note,) = getattr(raised.value, "__notes__", ())
    first, *events = note.splitlines()
    assert first == "the latest events of Raising:"
    assert len(events) == MAX_RECENT_EVENTS
    assert events[0] == "    -49.000 s  Happened(number=51)"
    assert events[-1] == "      0.000 s  Happened(number=-1)"


def test_a_protocol_error_is_no_bug() -> None:
    with pytest.raises(ProtocolError) as raised:
        Raising().on(Happened(-2), Now(0, 0))
    assert not hasattr(raised.value, "__notes__")


def test_an_event_is_described_without_its_texts() -> None:
    """They may have a token, or a value of the environment."""
    failure = RankFailure(1, 1, "n0", 7, 3, 1, None, "KeyError: s3cret", "s3cret", 1e9, "s3cret")
    message = messages.FailureReported(3, failure, 1e9)
    text = describe_event(MessageReceived(2, message))
    assert text.startswith("MessageReceived(node_rank=2, FailureReported(attempt=3, RankFailure(rank=1, ")
    assert "s3cret" not in text
    assert len(text) <= MAX_EVENT_CHARS
    hello = Job().hello(1, nonce="s3cret", proof="s3cret", target="train.py --key s3cret")
    assert describe_event(hello).startswith("NodeHello(NodeSpec(node_rank=1), ")
    assert "s3cret" not in describe_event(hello)


@pytest.mark.parametrize("version", [(3, 10), sys.version_info[:2]])
def test_a_traceback_shows_the_notes(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.11 Python does not print them."""
    error = ValueError("boom")
    if version < sys.version_info[:2]:
        monkeypatch.setattr(errors.sys, "version_info", (*version, 0))
        monkeypatch.setattr(errors.traceback, "format_exception", lambda *parts: ["ValueError: boom\n"])
    add_note(error, "first")
    add_note(error, "second")
    assert format_trace(error) == "ValueError: boom\nfirst\nsecond\n"


BROKEN = """
    from ddplaunch.core.job.job_attempt import JOB_TRANSITIONS, JobPhase
    JOB_TRANSITIONS[JobPhase.RUNNING].clear()
"""


def test_the_report_of_a_bug_has_the_latest_events(start_ddplaunch, tmp_path):
    write_program(tmp_path, "fails.py", "raise SystemExit('s3cret')")
    broken = write_launcher(tmp_path, BROKEN)
    words = ("--nproc", "1", "--start", "exec", "--token", "s3cret", "fails.py")
    job = start_ddplaunch("run", *words, executable=broken, env={"MY_KEY": "s3cret"})
    assert job.wait() == 70
    assert "Error: bug in ddplaunch: InvalidStep: JobStep.STOP in JobPhase.RUNNING" in job.stderr()
    path = Path(re.search(r"the details are in (\S+)", job.stderr())[1])
    details = path.read_text()
    os.unlink(path)
    assert "the latest events of JobMachine:\n" in details
    assert "MessageReceived(node_rank=0, FailureReported(attempt=0, RankFailure(" in details
    assert "s3cret" not in details
