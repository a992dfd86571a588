"""Tests of goodput, folded from events in any order, and of real runs that are killed or stall."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.core import events
from ddplaunch.core.events import (
    AttemptsOmitted,
    AttemptStarted,
    AttemptSwept,
    CheckpointFound,
    RankExited,
    RankStarted,
    Restarting,
)
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.features.checkpoint.node import find_newest_checkpoint
from ddplaunch.features.runs.goodput import format_goodput, total_breakdown
from ddplaunch.features.runs.history_recorder import HistoryRecorder, scheduler_job_id
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.blamed_hosts import find_blamed_hosts
from ddplaunch.observe.history.run_record import AttemptRecord, RunRecord, RunState
from ddplaunch.observe.history.sample_file import sample_file_name
from ddplaunch.observe.history.time_breakdown import TimeAccounting, TimeBreakdown, TimeCategory
from ddplaunch.observe.samples.sample import NodeSample, RankSample
from tests.conftest import wait_until, write_program
from tests.constant_override import launcher_with_constant
from tests.features.runs.recorded_events import plan
from tests.start_modes import LIGHT

RUN = "stalls"

RANKS = ((0, "n0"), (1, "n1"))
AGAIN = Restarting(1, 0.0, "again", None)


Happened = tuple[events.Event | AttemptStarted | AttemptsOmitted, float]


def account(began: float, nnodes: int, happened: list[Happened]) -> TimeBreakdown:
    kept = TimeAccounting(began, nnodes)
    for event, moment in happened:
        kept.on_event(event, moment)
    return kept.breakdown()


def begun(attempt: int = 0) -> AttemptStarted:
    return AttemptStarted(attempt, 0, 1, 2, RANKS)


def started(first: float, second: float, attempt: int = 0) -> list[Happened]:
    return [(RankStarted(0, 100, attempt), first), (RankStarted(1, 101, attempt), second)]


def exited(rank: int, code: int, attempt: int = 0) -> RankExited:
    return RankExited(rank, 100 + rank, code, attempt)


def ended(code: int = 0) -> events.JobEnded:
    return events.JobEnded(code, None)


UP = [(begun(), 0.0), *started(1.0, 1.0)]
WELL = [(exited(0, 0), 100.0), (exited(1, 0), 100.0), (AttemptSwept((), ()), 100.0), (ended(), 100.0)]


LATE = [(begun(), 2.0), *started(5.0, 6.0)]

SPENT: dict[str, tuple[list[Happened], TimeBreakdown]] = {
    "nothing": ([], TimeBreakdown()),
    "ends before it starts": ([(ended(1), 7.0)], TimeBreakdown(imports=7.0)),
    "no collectives": ([*LATE, *WELL], TimeBreakdown(imports=6.0, steady=94.0)),
    "the first collective, reported later": (
        [*LATE, (events.FirstCollective(16.0), 21.0), *WELL],
        TimeBreakdown(imports=6.0, first_collective=10.0, steady=84.0)),
    "a stall": (
        [*LATE, (events.JobStalled(30.0), 50.0), (events.StallEnded(), 55.0), (events.StallEnded(), 56.0),
         (events.FirstCollective(16.0), 60.0), *WELL],
        TimeBreakdown(imports=6.0, first_collective=10.0, steady=59.0, stalled=25.0)),
    "a stall that ends it": (
        [*UP, (events.JobStalled(30.0), 50.0), (exited(1, -15), 60.0), (ended(1), 70.0)],
        TimeBreakdown(imports=1.0, steady=29.0, stalled=30.0, stopping=10.0)),
    "a straggler": (
        [*UP, (events.FirstCollective(2.0), 2.0), (exited(0, 0), 80.0), *WELL],
        TimeBreakdown(imports=1.0, first_collective=1.0, steady=78.0, straggler=20.0)),
    "ranks that know nothing of one another": (
        [*UP, (exited(0, 0), 80.0), *WELL], TimeBreakdown(imports=1.0, steady=99.0)),
    "a restart": (
        [*UP, (exited(1, 1), 20.0), (AttemptSwept((), ()), 22.0), (AGAIN, 23.0), (begun(1), 25.0),
         *started(26.0, 27.0, 1), (exited(0, 9, 1), 40.0), (ended(9), 41.0)],
        TimeBreakdown(imports=1.0, steady=32.0, stopping=4.0, restarting=4.0, restarts=1)),
    "work after a checkpoint, and none in the second attempt": (
        [*UP, (exited(1, 1), 20.0), (CheckpointFound("c", 15.0), 21.0), (AGAIN, 21.0), (begun(1), 21.0),
         *started(21.0, 21.0, 1), (CheckpointFound("c", 15.0), 30.0), (ended(9), 30.0)],
        TimeBreakdown(imports=1.0, steady=14.0, stopping=1.0, discarded=14.0, restarts=1)),
    "no checkpoint": (
        [*UP, (exited(1, 1), 9.0), (CheckpointFound(None, None), 9.0), (ended(1), 9.0)],
        TimeBreakdown(imports=1.0, discarded=8.0)),
    "Ctrl-C": (
        [*UP, (events.SignalReceived(2), 9.0), (exited(0, -2), 9.0), (ended(130), 12.0)],
        TimeBreakdown(imports=1.0, steady=8.0, stopping=3.0)),
    "attempts that were left out": (
        [(AGAIN, 5.0), (AttemptsOmitted(7), 60.0), (begun(9), 50.0), *started(51.0, 51.0, 9), (ended(), 60.0)],
        TimeBreakdown(imports=5.0, restarting=46.0, steady=9.0, restarts=8)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPENT)
def test_time_is_counted_by_category(name):
    happened, spent = SPENT[name]
    assert account(0.0, 1, happened) == spent


def test_nodes_are_waited_for_only_where_there_are_several():
    assert account(0.0, 2, [(begun(), 9.0), (ended(), 10.0)]) == TimeBreakdown(waiting=9.0, imports=1.0)


def test_the_parts_add_up_to_the_wall_time_whatever_happens():
    """Events may come in any order, with earlier moments, and by clocks that are set back."""
    kinds = [
        begun(), begun(1), AGAIN, AttemptsOmitted(3), RankStarted(0, 1, 0), RankStarted(1, 1, 0), exited(0, 0),
        exited(1, 1), exited(0, 1, 1), AttemptSwept((), ()), events.SignalReceived(2), events.JobPreempted(),
        events.StallEnded(), events.RankStartFailed(0, 11, 0), events.NoteAdded("x"), events.NodeLost("n1"), ended(0),
        ended(1),
    ]  # fmt: skip
    chance = random.Random(30)
    parts = set()
    for _ in range(200):
        kept, now, latest, over = TimeAccounting(100.0, chance.choice([1, 2])), 100.0, 100.0, False
        up = [begun(), RankStarted(0, 1, 0), RankStarted(1, 1, 0)] if chance.random() < 0.5 else []
        for number in range(chance.randrange(40)):
            now += chance.choice([0.0, 0.5, 3.0, 1000.0, -2.0])
            then = now - chance.choice([-5.0, 0.0, 1.0, 2000.0])
            moved = [events.JobStalled(then), events.FirstCollective(then), CheckpointFound("c", then)]
            event = up[number] if number < len(up) else chance.choice([*kinds, *moved, *moved])
            kept.on_event(event, now)
            latest = latest if over or isinstance(event, AttemptsOmitted) else max(latest, now)
            over |= isinstance(event, events.JobEnded)
            spent = kept.breakdown()
            assert abs(spent.wall_s - (latest - 100.0)) < 1e-6, (event, spent)
            assert all(getattr(spent, part.value) >= 0 for part in TimeCategory)
            parts |= {part for part in TimeCategory if getattr(spent, part.value)}
    assert parts == {*TimeCategory} - {TimeCategory.QUEUED}


def test_frequent_queries_of_the_breakdown_use_no_memory():
    """``ddplaunch top`` queries it once a second, for days."""
    kept = TimeAccounting(0.0, 1)
    for event, moment in UP:
        kept.on_event(event, moment)
    spent = [kept.breakdown(float(now)) for now in range(1, 1000)]
    assert spent[-1] == TimeBreakdown(imports=1.0, steady=998.0)
    assert len(kept._periods) == 2


def test_the_goodput_line_names_the_largest_losses():
    spent = TimeBreakdown(
        steady=11520.0, restarting=660.0, stalled=360.0, first_collective=130.0, stopping=9.0, restarts=2
    )
    assert format_goodput(spent) == (
        "goodput 90 %: 3 h 12 min of 3 h 31 min; "
        "lost: 11 min in 2 restarts, 6 min stalled, 2 min 10 s until the first collective"
    )
    assert format_goodput(TimeBreakdown(steady=5.0)) == "goodput 100 %: 5.0 s of 5.0 s"
    assert format_goodput(TimeBreakdown()) is None


def test_a_run_whose_launcher_was_killed_counts_until_it_was_last_seen(state, run_in_fork):
    """The history has its events, and the samples show how long it ran."""
    now = time.time()
    kept = HistoryRecorder(plan(RUN), lambda rank: b"", lambda: None, pytest.fail)
    happened = (RankStarted(0, 100, 0), RankStarted(1, 101, 0), events.JobStalled(now, ""), events.StallEnded())
    for event in (events.AttemptPlanned(plan(RUN), 0), *happened):
        kept.observe(event)
    folder = Path(history_store.run_dir(RUN))
    head, *lines = map(json.loads, (folder / "node-0.jsonl").read_text().splitlines())
    assert [each["event"] for each in lines] == [
        "attempt_started",
        "rank_started",
        "rank_started",
        "job_stalled",
        "stall_ended",
    ]
    ago = [200.0, 190.0, 190.0, 100.0, 60.0]
    moved = [{**each, "time": now - before, "since": now - 110} for each, before in zip(lines, ago, strict=True)]
    gone = [{**head, "began": now - 210, "born": 1}, *moved]
    (folder / "node-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in gone))
    (folder / sample_file_name(0)).write_text(NodeSample(now - 9, 15.0, 0, (RankSample(0, *6 * (1.0,)),)).to_json())
    (found,) = history_store.read_all_records()
    assert (found.fate, [round(end - begin) for begin, end in found.stalls]) == (RunState.LOST, [50])
    assert run_in_fork("report", RUN).stdout.startswith(
        "goodput 65 %: 2 min 11 s of 3 min 21 s; lost: 50 s stalled, 20 s starting (until it was last seen)\n"
    )


SAVES = """
    import os, sys, time
    from pathlib import Path
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    folder = Path("ckpt", "step-1")
    if rank == "0" and attempt == "0":
        folder.mkdir(parents=True)
        (folder / "part").write_text("x")
        now = time.time()
        os.utime(folder / "part", (now, now))
    print("up", attempt, os.getpid(), flush=True)
    while not os.path.exists("go." + attempt):
        time.sleep(0.01)
    print("goes", flush=True)
    if attempt == "0":
        time.sleep(600)
"""


@pytest.mark.slow
def test_the_goodput_of_a_run_with_a_killed_rank(start_ddplaunch, tmp_path, state):
    """The work after the checkpoint is lost, as a clock of the test shows too, and all categories add up."""
    folder = tmp_path / "a folder [1]"
    folder.mkdir()
    began = time.time()
    words = ("--nproc", "2", "--max-restarts", "1", "--checkpoint", "ckpt/*", *LIGHT)
    launcher = launcher_with_constant(tmp_path, "features.checkpoint.node.MIN_AGE_S", 0.3)
    program = write_program(folder, "saves.py", SAVES)
    job = start_ddplaunch("run", *words, program, cwd=folder, executable=launcher)
    job.wait_for("up 0", 2)
    saved = os.stat(folder / "ckpt" / "step-1" / "part").st_mtime
    wait_until(lambda: time.time() > saved + 0.5, "a checkpoint that is whole")
    killed = time.time()
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.wait_for("up 1", 2)
    up = time.time()
    (folder / "go.1").touch()
    assert job.wait() == 0
    took = time.time() - began
    (found,) = history_store.read_all_records()
    spent = found.spent
    assert spent.wall_s == pytest.approx(found.ended - found.began, abs=1e-3)
    assert spent.wall_s <= took
    assert spent.restarts == 1
    assert abs(spent.discarded - (killed - saved)) < 1, spent
    assert 0 < spent.stopping + spent.restarting <= up - killed + 0.1
    assert spent.steady <= took - spent.discarded
    assert (spent.queued, spent.waiting, spent.stalled, spent.straggler, spent.first_collective) == (0, 0, 0, 0, 0)


def saved(path: Path, ago: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    moment = time.time() - ago
    os.utime(path, (moment, moment))
    return path


def test_the_newest_checkpoint_that_is_whole(tmp_path):
    pattern = f"{tmp_path}/ckpt/*"
    assert find_newest_checkpoint(pattern, [1]) == CheckpointFound(None, None)
    saved(tmp_path / "ckpt" / "old.pt", 100)
    whole = saved(tmp_path / "ckpt" / "step-2" / "inner" / "shard", 50)
    (tmp_path / "ckpt" / "empty").mkdir()
    saved(tmp_path / "ckpt" / "half" / "done", 90)
    half = saved(tmp_path / "ckpt" / "half" / "being-written", -30)  # by the clock of a file server
    found = find_newest_checkpoint(pattern, [0, -9])
    assert found == CheckpointFound(f"{tmp_path}/ckpt/step-2", whole.stat().st_mtime)
    assert find_newest_checkpoint(pattern, [0, 0]) == CheckpointFound(f"{tmp_path}/ckpt/half", half.stat().st_mtime)


def test_a_look_that_takes_too_long_says_nothing(monkeypatch):
    """A search that takes too long reports no checkpoint: the pattern matches a whole file system."""
    monkeypatch.setattr("ddplaunch.features.checkpoint.node.SEARCH_TIMEOUT_S", 0.05)
    hung = threading.Event()
    monkeypatch.setattr("ddplaunch.features.checkpoint.node.iglob", lambda *words, **how: [hung.wait(60)][1:])
    assert find_newest_checkpoint("**/*", [1]) is None
    hung.set()


def run(name: str, began: float, spent: TimeBreakdown, **more: object) -> RunRecord:
    return replace(RunRecord(name, name, "t", (), "n0", "/", 1, began), spent=spent, **more)


def test_time_between_the_runs_of_a_job_is_queued():
    runs = [run("a", 50.0, TimeBreakdown(steady=10.0)), run("b", 100.0, TimeBreakdown(imports=1.0, steady=9.0))]
    assert total_breakdown(runs) == TimeBreakdown(queued=40.0, imports=1.0, steady=19.0)
    assert total_breakdown(runs, 20.0) == TimeBreakdown(queued=70.0, imports=1.0, steady=19.0)
    assert total_breakdown(runs, 20.0).wall_s == 110.0 - 20.0


def failed(host: str, moment: float, code: int | None = None, number: int | None = None, message: str | None = None):
    first = RankFailure(3, 1, host, 7, 0, code, number, message, None, moment, None)
    return AttemptRecord(0, 0.0, verdict=FailureReport(first, (), (), 0, 8))


def test_hosts_are_blamed_for_failures_that_the_program_did_not_cause():
    killed = failed("n3", 5.0, number=9), failed("n3", 6.0, number=7)
    stalled = failed("n3", 4.0, 124, message="the job stalled")
    raised = failed("n1", 7.0, 1, message="ValueError: x")
    waited = failed("n2", 7.0, 1, message="RuntimeError: Connection closed by peer")
    runs = [
        run("a", 0.0, TimeBreakdown(), attempts=killed, lost=("n4",)),
        run("b", 9.0, TimeBreakdown(), attempts=(stalled,), ended=10.0),
        run("c", 9.0, TimeBreakdown(), attempts=(raised,)),
        run("d", 9.0, TimeBreakdown(), attempts=(waited,)),
    ]
    found = find_blamed_hosts(runs)
    assert [(each.host, each.times) for each in found] == [("n3", 3), ("n4", 1)]
    assert (found[0].last, found[0].why) == (6.0, "rank 3 was ended by SIGBUS (bus error: memory that a file backs could not be provided)")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "4711"}, "4711"),
        ({"PBS_JOBID": "1234.pbs01"}, "1234"),
        ({"PBS_JOBID": "1234[7].pbs01"}, "1234_7"),
        ({"LSB_JOBID": "77", "LSB_JOBINDEX": "0"}, "77"),
        ({"LSB_JOBID": "77", "LSB_JOBINDEX": "3"}, "77_3"),
        ({"JOB_ID": "8", "SGE_TASK_ID": "undefined"}, "8"),
        ({"JOB_ID": "8", "SGE_TASK_ID": "2"}, "8_2"),
        ({"JOB_ID": "of something else"}, None),
    ],
)
def test_the_number_of_the_job_that_a_run_is_in(environ, job):
    assert scheduler_job_id(environ) == job
