"""Tests of the history: what a real run records in the user's folder, also under faults."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.core import events
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.core.output.streams import TailBuffer
from ddplaunch.features.runs import history_recorder, ps
from ddplaunch.features.runs.history_recorder import HistoryRecorder
from ddplaunch.observe.diagnosis.inspection import Frame, Inspection, ProcessCondition, RankInspection, Thread
from ddplaunch.observe.history import history_store, run_record
from ddplaunch.observe.history.history_store import MAX_RUNS
from ddplaunch.observe.history.run_record import RunState
from tests.conftest import run_command, write_program
from tests.core.output.sample_records import record
from tests.features.runs.recorded_events import plan
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import FORKED, LIGHT

FAILS = """
    import os, sys, time
    print("rank", os.environ["RANK"], "speaks", flush=True)
    spoke = "spoke." + os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1":
        while not os.path.exists(spoke):
            time.sleep(0.01)
        raise ValueError("too bad")
    open(spoke, "w").close()
    time.sleep(600)
"""


def only():
    """The record of the only run."""
    (found,) = history_store.read_all_records()
    return found


def test_a_run_that_fails_after_a_restart(run_ddplaunch, tmp_path, state):
    write_program(tmp_path, "fails.py", FAILS)
    words = ("--nproc", "2", "--max-restarts", "1", "--token", "secret", *LIGHT)
    assert run_ddplaunch("run", *words, "fails.py", "--lr", "1").returncode == 1
    kept = only()
    assert (kept.fate, kept.code, kept.world_size, kept.nnodes) == (RunState.FAILED, 1, 2, 1)
    assert kept.target.endswith("fails.py --lr 1")
    assert kept.argv == ("ddplaunch", "run", *words[:5], "…", *LIGHT, "fails.py", "--lr", "1")
    assert kept.cwd == str(tmp_path)
    assert [attempt.number for attempt in kept.attempts] == [0, 1]
    for attempt in kept.attempts:
        assert attempt.why == "rank 1 failed with ValueError: too bad (exit code 1)"
        assert kept.began <= attempt.began <= attempt.ended <= kept.ended
        first, second = attempt.ranks
        assert (first.code, second.code) == (-signal.SIGTERM, 1)
        assert all(1 << 20 < each.peak_memory < 1 << 30 and 0 <= each.cpu < 60 for each in attempt.ranks)
        assert all(attempt.began <= each.started <= each.ended <= attempt.ended for each in attempt.ranks)
        assert sum(line == "rank 1 speaks" for line in attempt.verdict.first.tail) <= 1, "not of the attempt before"
    assert "too bad" in (kept.verdict.first.traceback or "")
    folder = Path(history_store.run_dir(kept.run))
    outputs = [f"rank-{rank}.attempt-1.{kind}" for rank in (0, 1) for kind in ("log", "times")]
    assert sorted(os.listdir(folder)) == ["node-0.jsonl", "node-0.provenance.json", *outputs]
    assert (folder / "rank-0.attempt-1.log").read_text() == "rank 0 speaks\n"
    assert (folder / "rank-1.attempt-1.log").read_text().startswith("rank 1 speaks\nTraceback")
    assert "secret" not in (folder / "node-0.jsonl").read_text()
    for path in [state / "ddplaunch", *(state / "ddplaunch").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), "only this user may read it"


def test_with_a_log_folder_no_output_is_kept_twice(run_ddplaunch, tmp_path, state):
    write_program(tmp_path, "fails.py", FAILS)
    run_ddplaunch("run", "--nproc", "2", "--log-dir", "logs", "--run-id", "mine", *LIGHT, "fails.py")
    assert only().log_dir == str(tmp_path / "logs" / "mine")
    assert sorted(os.listdir(history_store.run_dir("mine"))) == ["node-0.jsonl", "node-0.provenance.json"]


def test_no_history_records_nothing(run_ddplaunch, tmp_path, state):
    write_program(tmp_path, "fails.py", FAILS)
    run_ddplaunch("run", "--no-history", "--nproc", "2", *LIGHT, "fails.py")
    assert not state.exists()


def test_a_run_id_that_was_there_before(run_ddplaunch, tmp_path, state):
    write_program(tmp_path, "ends.py", "")
    for _ in range(2):
        run_ddplaunch("run", "--run-id", "mine", *FORKED, "ends.py")
    assert sorted(history_store.list_runs()) == ["mine.1", "mine.2"]
    assert {each.run_id for each in history_store.read_all_records()} == {"mine"}


def test_ctrl_c_is_not_a_failure(start_ddplaunch, tmp_path, state):
    write_program(tmp_path, "waits.py", "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, "waits.py")
    job.wait_for("up", 2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert (only().fate, only().signal, only().attempts[0].why) == (RunState.STOPPED, 2, "stopped by SIGINT")


def in_the_way(kind: str, state: Path) -> None:
    folder = state / "ddplaunch"
    if kind == "file":
        state.write_text("")
    elif kind == "link":
        (state / "elsewhere").mkdir(parents=True)
        folder.symlink_to(state / "elsewhere")
    elif kind == "inner link":
        folder.mkdir(parents=True, mode=0o700)
        (state / "elsewhere").mkdir()
        (folder / "runs").symlink_to(state / "elsewhere")
    else:
        folder.mkdir(parents=True)
        os.chown(folder, 65534, 65534)


@pytest.mark.parametrize("kind", ["file", "link", "inner link", "foreign"])
def test_a_run_goes_on_if_the_history_folder_cannot_be_used(run_ddplaunch, tmp_path, state, kind):
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    in_the_way(kind, state)
    write_program(tmp_path, "fails.py", FAILS)
    done = run_ddplaunch("run", "--nproc", "2", *LIGHT, "fails.py")
    assert done.returncode == 1
    assert done.stderr.count("the record of this run in the history is incomplete: ") == 1
    assert history_store.list_runs() == []
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_missing_home_is_not_created(run_ddplaunch, tmp_path):
    write_program(tmp_path, "ends.py", "")
    home = tmp_path / "none"
    done = run_ddplaunch("run", *FORKED, "ends.py", env={"HOME": str(home), "XDG_STATE_HOME": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert not home.exists()


def mounted(options: str, path: Path, fill: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command where ``path`` is a file system of its own."""
    path.mkdir()
    script = f"mount -t tmpfs -o {options} none '{path}' && {fill} exec \"$@\""
    return run_command(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "ddplaunch", *words],
        path.parent,
        {"XDG_STATE_HOME": str(path)},
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_and_one_that_cannot_be_written(tmp_path):
    write_program(tmp_path, "fails.py", FAILS)
    words = ["run", "--nproc", "2", *LIGHT, "fails.py"]
    full = mounted("size=4k", tmp_path / "full", f"head -c 4096 /dev/zero > '{tmp_path}/full/x';", words)
    assert full.returncode == 1
    assert full.stderr.count("history is incomplete: No space left on device") == 1
    fixed = mounted("ro", tmp_path / "fixed", "", words)
    assert (fixed.returncode, fixed.stderr.count("history")) == (1, 0)


def test_a_run_is_recorded_to_its_end_if_its_output_does_not_fit_on_the_disk(state, monkeypatch):
    def save_outputs(recorder: HistoryRecorder, limit: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HistoryRecorder, "_save_outputs", save_outputs)
    notes: list[str] = []
    recorder = HistoryRecorder(plan(), lambda rank: b"", lambda: None, notes.append)
    for event in (
        *(events.AttemptPlanned(plan(), 0), events.RankExited(1, 101, 1, 0), events.Restarting(1, 0.0, "again", None)),
        *(events.AttemptPlanned(plan(), 1), events.JobEnded(0, None)),
    ):
        recorder.observe(event)
    assert (only().fate, [each.number for each in only().attempts]) == (RunState.DONE, [0, 1])
    assert notes == ["the record of this run in the history is incomplete: No space left on device"]


def test_the_reason_of_an_incomplete_record_is_the_first_error(state, monkeypatch):
    keep(node=1)

    def write_header(recorder: HistoryRecorder) -> dict[str, object]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HistoryRecorder, "_build_header", write_header)
    with pytest.raises(pytest.fail.Exception, match="incomplete: No space left on device"):
        keep()
    assert [each.node_rank for each in history_store.read_node_records("r")] == [1]


def test_a_run_that_is_removed_while_runs_are_listed(state, monkeypatch):
    for name in ("a", "b", "c"):
        keep(run_id=name)
    scan = os.scandir

    @contextmanager
    def scandir(path):
        with scan(path) as entries:
            found = [*entries]
        os.rename(history_store.run_dir("b"), state / "removed")
        yield found

    monkeypatch.setattr(os, "scandir", scandir)
    assert sorted(history_store.list_runs()) == ["a", "c"]


def test_the_nodes_of_a_job_on_one_file_system(state):
    for node in range(4):
        keep(f"node-{node}", node=node)
    assert history_store.list_runs() == ["r"]
    assert [each.node_rank for each in history_store.read_node_records("r")] == [0, 1, 2, 3]
    assert history_store.read_run_record("r").node_rank == 0


LOST, RUNNING, FAILED = RunState.LOST, RunState.RUNNING, RunState.FAILED


@pytest.mark.parametrize(
    ("of_first", "of_second", "fates"),
    [
        ({}, {}, (RUNNING, RUNNING)),
        ({}, {"attempts": 1}, (RUNNING, RUNNING)),  # it has not written its second attempt yet
        ({"lost": ("n1",)}, {}, (RUNNING, RUNNING)),  # it has joined again
        ({"lost": ("n1",)}, {"attempts": 1}, (RUNNING, LOST)),
        ({"lost": ("n1",)}, {"attempts": 0}, (RUNNING, LOST)),
        ({"lost": ("n1",)}, {"attempts": 1, "code": 1, "ended": 60}, (RUNNING, FAILED)),
        ({"code": 1, "ended": 60}, {}, (FAILED, LOST)),
        ({"code": 1, "ended": 0}, {}, (FAILED, RUNNING)),  # it is about to write its end
        ({"fate": LOST}, {}, (LOST, LOST)),
        ({}, {"code": 69, "ended": 60}, (LOST, FAILED)),
        ({}, {"code": 69, "ended": 0}, (RUNNING, FAILED)),
        ({}, {"code": 1, "ended": 60}, (RUNNING, FAILED)),
        ({"attempts": 0, "lost": ("n1",)}, {"attempts": 0}, (RUNNING, RUNNING)),
        ({"node_rank": 2, "fate": LOST}, {}, (LOST, RUNNING)),  # the record of node 0 is elsewhere
    ],
)
def test_nodes_that_the_records_of_others_show_as_lost(of_first, of_second, fates):
    """Each is on another machine, where its launcher cannot be looked up."""

    def node(number: int, attempts: int = 2, ended: int | None = None, **changes: object) -> run_record.RunRecord:
        moment = None if ended is None else time.time() - ended
        fate = RUNNING if ended is None else FAILED
        known = {"node_rank": number, "host": f"n{number}", "fate": fate, "code": None, "ended": moment, **changes}
        return replace(record(2, attempts), **known)

    assert history_store.mark_lost_nodes([]) == []
    assert (
        tuple(each.fate for each in history_store.mark_lost_nodes([node(0, **of_first), node(1, **of_second)])) == fates
    )


def keep(what: str = "", node: int = 0, run_id: str = "r", code: int = 0, printed: bytes = b"") -> HistoryRecorder:
    """Keep a run as its observer does."""
    kept = HistoryRecorder(replace(plan(run_id), node_rank=node), lambda rank: printed, lambda: None, pytest.fail)
    ranks = tuple(replace(rank, node_rank=node) for rank in plan().ranks)
    nodes = tuple(replace(plan().nodes[0], node_rank=each) for each in range(node + 1))
    planned = replace(plan(run_id), node_rank=node, ranks=ranks, nodes=nodes)
    for event in (
        events.AttemptPlanned(planned, 0),
        events.RankStarted(0, 100, 0),
        events.RankStarted(1, 101, 0),
        events.NoteAdded(what),
        events.RankExited(0, 100, 0, 0, 1 << 20, 1.5, 0.25),
        events.RankExited(1, 101, code, 0),
        events.AttemptSwept((), ()),
        events.JobEnded(code, None),
    ):
        kept.observe(event)
    return kept


def test_the_number_of_kept_runs_is_limited(state, monkeypatch):
    monkeypatch.setattr(history_store, "MAX_RUNS", 12)
    for number in range(30):
        keep(run_id=f"r{number}")
        os.utime(history_store.run_dir(f"r{number}"), (number, number))
    assert len(history_store.list_runs()) <= 12 <= MAX_RUNS
    assert history_store.list_runs()[0] == "r29"
    assert "r0" not in history_store.list_runs()


def test_removing_runs_delays_no_end_for_long(state, monkeypatch):
    """Surplus runs are removed a few at a time, the oldest first."""
    for number in range(20):
        keep(run_id=f"r{number}")
        os.utime(history_store.run_dir(f"r{number}"), (number, number))
    monkeypatch.setattr(history_store, "MAX_RUNS", 12)
    monkeypatch.setattr(history_store, "CLEANUP_TIMEOUT_S", 0)
    moments = iter([0.0, -1.0, -1.0, 1.0])
    monkeypatch.setattr(history_store.time, "monotonic", lambda: next(moments))
    history_store.prune()
    assert history_store.list_runs() == [f"r{number}" for number in reversed(range(2, 20))]


def test_the_size_of_the_history_is_limited(state, monkeypatch):
    monkeypatch.setattr(history_store, "MAX_BYTES", 100_000)
    for number in range(9):
        keep(run_id=f"r{number}", code=1, printed=b"x" * 20_000)
        os.utime(history_store.run_dir(f"r{number}"), (number, number))
    assert sum(history_store.run_size(name) for name in history_store.list_runs()) <= 100_000 + 50_000
    assert history_store.list_runs()[0] == "r8"


def test_a_job_that_restarts_for_ever_is_kept_small(state, monkeypatch):
    monkeypatch.setattr(history_recorder, "MAX_BYTES", 10_000)
    kept = HistoryRecorder(plan(), lambda rank: b"", lambda: None, pytest.fail)
    first = RankFailure(1, 1, "here", 100, 0, 1, None, "ValueError: x", None, 1.0, None)
    failed = FailureReport(first, (), (), 1, 2)
    for attempt in range(200):
        kept.observe(events.AttemptPlanned(plan(), attempt))
        kept.observe(events.RankExited(1, 100, 1, attempt))
        if attempt < 199:
            kept.observe(events.Restarting(attempt + 1, 0.0, "again", failed))
    kept.observe(events.JobEnded(1, failed))
    found = only()
    assert history_store.run_size("r") < 20_000
    assert found.attempts[0].number == 0
    assert found.attempts[-1].number == 199
    assert len(found.attempts) + found.left_out == 200


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[" * 100_000,
        b"null",
        b'{"event": "rank_exited"}',
        b'{"event": "rank_exited", "time": "x", "rank": 0, "pid": 1, "code": 0, "attempt": 0}',
        b'{"event": "rank_exited", "time": 1e999, "rank": 0, "pid": 1, "code": 0, "attempt": 0}',
        b'{"event": "rank_started", "time": 1.0, "rank": -7, "pid": 1, "attempt": 0}',
        b'{"event": "attempt_started", "time": 1.0, "attempt": 0, "node_rank": 0, "nnodes": 1, "world_size": 1,'
        b' "ranks": 3}',
        b'{"event": "job_ended", "time": 1.0, "code": 0, "verdict": {"first": {}}}',
        b'{"event": "ranks_inspected", "time": 1.0, "inspection": {"ranks": [1]}}',
        b"\xff\xfe",
        b"\0" * 1000,
    ],
)
def test_a_line_that_makes_no_sense_is_passed_over(state, line):
    keep()
    path = Path(history_store.run_dir("r")) / "node-0.jsonl"
    lines = path.read_bytes().split(b"\n")
    whole = run_record.parse_record(b"\n".join(lines), "r")
    found = run_record.parse_record(b"\n".join([*lines[:3], line, *lines[3:]]), "r")
    assert found is not None
    assert [each for each in found.notes if not run_record.is_skipped_lines_note(each)] == [*whole.notes]
    assert replace(found, notes=whole.notes) == whole
    assert run_record.parse_record(b"\n".join([line, *lines]), "r") is None or line == b"null"
    assert run_record.parse_record(b"\n".join(lines)[: -len(lines[-2]) // 2], "r") is not None


def test_a_record_with_the_former_names_of_events_is_read(state):
    keep()
    path = Path(history_store.run_dir("r")) / "node-0.jsonl"
    data, former = path.read_bytes(), events._FORMER_NAMES
    older = data
    for name, now in former.items():
        older = older.replace(f'"event": "{now}"'.encode(), f'"event": "{name}"'.encode())
    assert b'"event": "begun"' in older
    assert run_record.parse_record(older, "r") == run_record.parse_record(data, "r")
    assert {events.find_event_type(name) for name in former} <= {*events.EVENT_TYPES.values()}


def test_very_many_attempts_take_no_longer_than_few_each():
    """The time is linear in the lines of the file."""
    head = {"run_id": "r", "target": "t", "argv": [], "host": "h", "cwd": "/", "pid": 1, "began": 1.0}
    begun = {
        "event": "attempt_started",
        "attempt": 0,
        "node_rank": 0,
        "nnodes": 1,
        "world_size": 1,
        "ranks": [[0, "h"]],
    }
    happened = [json.dumps({"time": 2.0, **each}) for each in (begun, {"event": "note_added", "text": "x"})] * 20_000
    began = time.process_time()
    found = run_record.parse_record("\n".join([json.dumps(head), *happened]).encode(), "r")
    assert (len(found.attempts), len(found.notes)) == (20_000, 20_000)
    assert time.process_time() - began < scaled_timeout(2.5)


def test_control_characters_in_a_record_are_removed(state):
    keep("\x1b]0;title\x07\x1b[2J")
    assert "\x1b" not in only().notes[0]
    path = Path(history_store.run_dir("r")) / "node-0.jsonl"
    head, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(head), "cwd": "\x1b[2J\nError:", "code": 99999}) + "\n" + rest)
    assert history_store.read_run_record("r") is None
    path.write_text(json.dumps({**json.loads(head), "cwd": "\x1b[2J\nError:"}) + "\n" + rest)
    assert "\x1b" not in only().cwd
    assert "\n" not in only().cwd


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")


@pytest.mark.parametrize("kind", ["fifo", "link", "huge", pytest.param("another user's", marks=AS_ROOT)])
def test_a_record_that_is_not_a_regular_file_of_the_user_is_ignored(state, kind):
    keep()
    path = Path(history_store.run_dir("r")) / "node-0.jsonl"
    content = path.read_bytes()
    path.rename(path.with_name("aside"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "another user's":
        path.write_bytes(content)
        os.chown(path, 65534, 65534)
    elif kind == "link":
        (state / "there").write_bytes(content)
        path.symlink_to(state / "there")
    else:
        with path.open("wb") as file:
            file.truncate(run_record.MAX_BYTES + 1)
    assert history_store.read_run_record("r") is None


@AS_ROOT
def test_a_folder_of_another_user_is_ignored(state):
    keep()
    os.chown(history_store.run_dir("r"), 65534, 65534)
    assert history_store.list_runs() == []


def test_an_inspection_is_kept(state):
    frame = Frame("load", "data.py", 31, own=True)
    ranks = (RankInspection(1, "here", 7, ProcessCondition.STOPPED, threads=(Thread((frame,)),)),)
    found = Inspection(5.0, ranks, 2)
    kept = HistoryRecorder(plan(), lambda rank: b"", lambda: None, pytest.fail)
    for event in (events.AttemptPlanned(plan(), 0), events.RanksInspected(found), events.JobEnded(1, None)):
        kept.observe(event)
    assert only().inspections == (found,)


def test_a_run_that_a_signal_on_another_node_stopped(state):
    kept = HistoryRecorder(plan(), lambda rank: b"", lambda: None, pytest.fail)
    for event in (events.AttemptPlanned(plan(), 0), events.JobEnded(143, None)):
        kept.observe(event)
    assert (only().fate, only().signal, only().attempts[0].why) == (RunState.STOPPED, 15, "stopped by SIGTERM")


@pytest.mark.parametrize("pieces", [[1], [3, 3, 3], [8], [20], [1] * 30, [7, 2, 5, 100, 1]])
def test_a_tail_holds_the_last_bytes(pieces):
    tail, whole = TailBuffer(8), b""
    for number, count in enumerate(pieces):
        data = bytes((number + each) % 256 for each in range(count))
        tail.add(data)
        whole += data
        for length in (0, 1, 5, 8, 9):
            assert tail.last(length) == whole[-min(length, 8) :][: min(length, 8)] if length else True
        assert tail.total == len(whole)
    assert tail.last(0) == b""


@pytest.mark.usefixtures("state")
def test_lines_that_cannot_be_read_are_noted(run_in_fork):
    keep()
    path = Path(history_store.run_dir("r")) / "node-0.jsonl"
    path.write_bytes(
        path.read_bytes().replace(b'"event": "job_ended", "code": 0', b'"event": "job_ended", "code": "no"')
    )
    done = run_in_fork("ps", "--all")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        0,
        "lines of a record cannot be read, and are left out: r",
    )
    assert "1 line of its record could not be read" in run_record.read_record(str(path), "r").notes


def test_few_of_many_records_are_read(state, monkeypatch):
    """Two thousand would take seconds: what is over is known from the folders."""
    for number in range(20):
        keep(run_id=f"r{number}")
    path = Path(history_store.run_dir("r3"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o1700
    path.chmod(0o700)  # as of a run whose launcher was killed, or of another node than the first
    read = []
    monkeypatch.setattr(history_store, "read_run_record", lambda name: read.append(name) or record(1))
    now = time.time()
    assert [*ps.read_records(history_store.list_runs(), now, everything=False)] == read
    assert "r3" in read
    assert len(read) == 6
    read.clear()
    ps.read_records(history_store.list_runs(), now + 2 * 86400, everything=False)  # they are too old to be listed
    assert read == ["r3"]
    read.clear()
    ps.read_records(history_store.list_runs(), now, everything=True)
    assert len(read) == 20
    read.clear()
    assert len([*history_store.read_unfinished_records()]) == len(read) == 1


def test_the_end_of_another_node_does_not_end_the_run(state):
    keep(node=1)
    assert [each.is_over for each in history_store.list_folders()] == [False]
    keep()
    assert [each.is_over for each in history_store.list_folders()] == [True]
    assert history_store.remove_run("r")
