"""Tests that an observer, request or sidecar that raises is reported once, and the job continues; order of events."""

from __future__ import annotations

from functools import partial

import pytest

from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.core.control_socket import socket_dir
from ddplaunch.core.control_socket.status_request import StatusQuery, StopJobRequest
from ddplaunch.core.events import AttemptSwept, Event, NoteAdded, Observers
from ddplaunch.core.isolation import Isolation
from ddplaunch.features.runs.output_request import TailOutputRequest
from ddplaunch.observe.request import InspectJobRequest
from tests.conftest import wait_until, write_program
from tests.constant_override import write_launcher
from tests.start_modes import LIGHT

BROKEN = {
    "features.runs.history_recorder.HistoryRecorder.observe": "an observer",
    "features.notify.feature.Notify.make_node_side": "a hook",
    "features.preload.feature.Preload.plan_zygote": "a plan",
    "features.runs.output_request.TailOutputRequest.handle": "a request",
    "observe.request.JobInspection": "an answer that comes later",
    "observe.node.rank_inspector.RankInspector._poll": "an inspection",
    "observe.node.stall_detector.StallDetector._on_rank_activity": "a clock",
    "observe.node.straggler_monitor.StragglerMonitor.start_timers": "a monitor",
    "features.programs.node.ProgramRunner.on_zygote_event": "a sidecar",
    "features.memory.node.MemorySide.explain_failure": "a hint",
}
"""Functions of the package that raise, and the text of each error."""

BROKEN_SIDES = {
    "features.debug.debug_server.DebugServer._on_idle_timeout": "no callback",
    "features.notify.node.NotifyObserver._on_reply": "no reply",
    "features.programs.node.ProgramRunner.observe": "no end",
}


def write_broken_launcher(folder, broken, only_on="object"):
    """Write a launcher in which these functions raise, those that observe events on events of one class only."""
    return write_launcher(
        folder,
        f"""
        from pkgutil import resolve_name
        from ddplaunch.core.events import *

        def replace(path, what):
            def fail(*arguments):
                if not path.endswith(".observe") or isinstance(arguments[1], {only_on}):
                    raise RuntimeError(what)

            owner, _, name = path.rpartition(".")
            setattr(resolve_name(f"ddplaunch.{{owner}}"), name, fail)

        for path, what in {broken!r}.items():
            replace(path, what)
        """,
    )


@pytest.mark.slow
def test_a_feature_that_raises_is_reported_once_and_left_out(start_ddplaunch, tmp_path):
    launcher = write_broken_launcher(tmp_path, BROKEN)
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
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, "--sidecar", "sleep 600", script, executable=launcher)
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
        ("the feature programs failed", 1),
        ("the feature memory failed", 1),
    ):
        assert output.count(f"bug in ddplaunch: {what} and is left out, the job continues:") == times
    assert output.count("Traceback (most recent call last)") == 11
    assert "RuntimeError: an answer that comes later" in output
    assert "rank 0 exited with code 3" in output or "rank 1 exited with code 3" in output
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_side_that_raises_holds_up_neither_the_ranks_nor_the_launcher(start_ddplaunch, tmp_path):
    """Ranks at a breakpoint, which pause time limits, go on; the launcher does not wait for sidecars and notifiers."""
    launcher = write_broken_launcher(tmp_path, BROKEN_SIDES, only_on="RankExited")
    script = write_program(tmp_path, "stops.py", "import time\nbreakpoint()\nprint('goes on')\ntime.sleep(600)")
    options = ("--debug", "--debug-timeout", "1", "--timeout", "3", "--grace", "0")
    programs = ("--sidecar", "sleep 600", "--notify", "true")
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, *options, *programs, script, executable=launcher)
    assert job.wait() == 124
    output = job.stderr()
    for side in ("debug", "programs", "notify"):
        assert output.count(f"bug in ddplaunch: the feature {side} failed and is left out, the job continues") == 1
    assert job.stdout().count("goes on") == 2
    assert "--timeout (3.0s) expired" in output
    job.assert_nothing_left()


def test_a_bug_of_the_core_in_a_request_ends_the_job(start_ddplaunch, tmp_path):
    """If only the request were left out, the job would go on, half stopped."""
    launcher = write_broken_launcher(tmp_path, {"core.agent.process_tree.ProcessTree.sweep": "no sweep"})
    program = ("--no-python", "sh", "-c", "echo ready; exec sleep 600")
    job = start_ddplaunch("run", "--nproc", "1", *program, executable=launcher)
    job.wait_for("ready")
    (path,) = (each for each in socket_dir.list_sockets() if each.endswith(f".{job.process.pid}"))
    client.send_request(path, StopJobRequest(now=True))
    assert job.wait() == 70
    assert "bug in ddplaunch: RuntimeError: no sweep" in job.stderr()
    assert "the job continues" not in job.stderr()
    wait_until(lambda: not job.left(), "the end of the rank")


def test_a_part_that_raises_is_cleaned_up_once():
    reports: list[str] = []
    for cleanups in ([], None):
        part = Isolation("the part", reports.append)
        part.on_error = None if cleanups is None else partial(cleanups.append, 1)
        assert [part.call(int, text) for text in ("1", "no number", "2")] == [1, None, None]
        assert cleanups in ([1], None)
    assert [report.splitlines()[-1] for report in reports] == [
        "ValueError: invalid literal for int() with base 10: 'no number'"
    ] * 2


def test_all_observers_get_events_in_one_order():
    """Events that an observer emits while another one is delivered come after it."""
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
