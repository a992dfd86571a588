"""Tests that an observer, a request or a sidecar that raises is reported once, and the job goes on; order of events."""

from __future__ import annotations

import sys

import pytest

from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.core.control_socket import socket_dir
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.core.events import AttemptSwept, Event, NoteAdded, Observers
from ddplaunch.features.inspect.request import InspectJobRequest
from ddplaunch.features.runs.output_request import TailOutputRequest
from tests.conftest import wait_until, write_program
from tests.start_modes import LIGHT

BROKEN = f"""
#!{sys.executable}
import sys
import ddplaunch.features.inspect.request as inspection, ddplaunch.features.runs.output_request as output
from ddplaunch.features.inspect.node.rank_inspector import RankInspector
from ddplaunch.features.sidecars.node import SidecarRunner
from ddplaunch.features.inspect.node.stall_detector import StallDetector
from ddplaunch.features.inspect.node.straggler_monitor import StragglerMonitor
from ddplaunch.features.memory.node import MemorySide
from ddplaunch.cli import main
from ddplaunch.features.notify.feature import Notify
from ddplaunch.features.preload.feature import Preload
from ddplaunch.features.runs.history_recorder import HistoryRecorder

def broken(what):
    def fail(*arguments):
        raise RuntimeError(what)
    return fail

HistoryRecorder.observe = broken("an observer")
Notify.make_node_side = broken("a hook")
Preload.plan_zygote = broken("a plan")
output.TailOutputRequest.handle = broken("a request")
inspection.JobInspection = broken("an answer that comes later")
RankInspector._poll_replies = broken("an inspection")
StallDetector._on_rank_activity = broken("a clock")
StragglerMonitor.start_timers = broken("a monitor")
SidecarRunner.on_spawned = broken("a sidecar")
MemorySide.explain_failure = broken("a hint")
del sys.argv[1:3]
main()
"""


@pytest.mark.slow
def test_a_feature_that_raises_is_reported_once_and_left_out(start_ddplaunch, tmp_path):
    program = write_program(tmp_path, "broken", BROKEN)
    program.chmod(0o755)
    script = write_program(
        tmp_path,
        "waits.py",
        """
        import os, sys, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        sys.exit(3)
        """,
    )
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, "--sidecar", "sleep 600", script, executable=program)
    job.wait_for("ready", 2)
    (path,) = (each for each in socket_dir.list_sockets() if each.endswith(f".{job.process.pid}"))
    for request in (TailOutputRequest(), InspectJobRequest(), TailOutputRequest()):
        with pytest.raises(JobNotResponding):
            client.send_request(path, request)
    assert client.send_request(path, StatusQuery()).world_size == 2
    wait_until(lambda: "a sidecar" in job.stderr(), "the report of the sidecars")
    wait_until(lambda: {*job.find("sleep 600")} <= {job.process.pid}, "the end of the sidecar")
    (tmp_path / "go").touch()
    assert job.wait() == 3
    output = job.stderr()
    for what, times in (
        ("the feature runs failed", 1),
        ("the feature notify failed", 1),
        ("the feature preload failed", 1),
        ("the answer to TailOutputRequest failed", 2),  # each request is one of its own
        ("the answer to InspectJobRequest failed", 1),
        ("the inspection of ranks failed", 1),
        ("stall detection failed", 1),
        ("the feature inspect failed", 1),
        ("the feature sidecars failed", 1),
        ("the feature memory failed", 1),
    ):
        assert output.count(f"bug in ddplaunch: {what} and is left out, the job goes on; please report it") == times
    assert output.count("Traceback (most recent call last)") == 11
    assert "RuntimeError: an answer that comes later" in output
    assert "rank 0 exited with code 3" in output or "rank 1 exited with code 3" in output
    job.assert_nothing_left()


BROKEN_SIDES = f"""
#!{sys.executable}
import sys
from ddplaunch.cli import main
from ddplaunch.core.events import RankExited
from ddplaunch.features.debug.debug_server import DebugServer
from ddplaunch.features.notify.node import NotifyObserver
from ddplaunch.features.sidecars.node import SidecarRunner

def fail(*arguments):
    raise RuntimeError("no callback")

def fail_at_the_end(side, event):
    if isinstance(event, RankExited):
        raise RuntimeError("no end")

DebugServer._on_idle_timeout = fail
NotifyObserver._on_reply = fail
SidecarRunner.observe = fail_at_the_end
del sys.argv[1:3]
main()
"""


@pytest.mark.slow
def test_a_side_that_raises_holds_up_neither_the_ranks_nor_the_launcher(start_ddplaunch, tmp_path):
    """Ranks at a breakpoint, which pause time limits, go on; the launcher does not wait for sidecars and notifiers."""
    program = write_program(tmp_path, "broken", BROKEN_SIDES)
    program.chmod(0o755)
    script = write_program(tmp_path, "stops.py", "import time\nbreakpoint()\nprint('goes on')\ntime.sleep(600)")
    options = ("--debug", "--debug-timeout", "1", "--timeout", "3", "--grace", "0")
    programs = ("--sidecar", "sleep 600", "--notify", "true")
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, *options, *programs, script, executable=program)
    assert job.wait() == 124
    output = job.stderr()
    for side in ("debug", "sidecars", "notify"):
        assert output.count(f"bug in ddplaunch: the feature {side} failed and is left out, the job goes on") == 1
    assert job.stdout().count("goes on") == 2
    assert "--timeout (3.0s) expired" in output
    job.assert_nothing_left()


def test_all_observers_get_events_in_one_order():
    """Also those that an observer emits while another event is delivered."""
    received: list[Event] = []

    class Emits:
        def observe(self, event: Event) -> None:
            if isinstance(event, AttemptSwept):
                observers.emit(NoteAdded("found"))

    class Records:
        def observe(self, event: Event) -> None:
            received.append(event)

    observers = Observers(Emits(), Records(), report=pytest.fail)
    observers.emit(AttemptSwept((), ()))
    assert received == [AttemptSwept((), ()), NoteAdded("found")]
