"""Tests of what is kept of a stalled job: real ranks on gloo, a fake RAS service, and dumps in NCCL's form."""

import json
import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import wait_until, write_program
from tests.features.nccl.fake_ras import serve
from tests.features.nccl.replies import make_json
from tests.scaled_timeouts import scaled_timeout

pytestmark = pytest.mark.slow

PROGRAM = """
import os, pickle, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
open(f"pid-{rank}", "w").write(str(os.getpid()))
c10d = torch._C._distributed_c10d

def as_nccl(*arguments):
    dump = pickle.loads(c10d._dump_fr_trace(True, False, False))
    dump["pg_config"] = {"0": {**dump["pg_config"][""], "name": "0", "desc": "default_pg"}}
    for entry in dump["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo", "nccl")
    return pickle.dumps(dump)

if "nccl" in sys.argv:
    c10d._dump_nccl_trace = as_nccl
    c10d._dump_nccl_trace_json = lambda *each: c10d._dump_fr_trace_json(*each).replace(b"gloo:", b"nccl:")
dist.all_reduce(torch.ones(6))
if rank == 1:
    print("loading", flush=True)
    time.sleep(600)
dist.all_reduce(torch.ones(6))
"""

STOP = ("--stall-timeout", "2", "--grace", "5")


def pids(folder):
    return {rank: int((folder / f"pid-{rank}").read_text()) for rank in range(3)}


@pytest.mark.ci
def test_a_stopped_job(run_ddplaunch, tmp_path):
    """Dumps, stacks and the report of the RAS service are in the log folder; what it says is compared with ours."""
    program = write_program(tmp_path, "hang.py", PROGRAM)

    def reply():
        return make_json({rank: (pid, 1 if rank == 1 else 2) for rank, pid in pids(tmp_path).items()})

    with serve(reply) as (address, _):
        words = (*STOP, "--log-dir", "logs", "--run-id", "x", "--nproc", "3", program)
        done = run_ddplaunch("run", *words, env={"NCCL_RAS_ADDR": address})
    assert done.returncode == 124, done.stderr
    sentence = "NCCL's RAS service agrees: rank 1 has launched 1 AllReduce, others 2"
    assert done.stderr.splitlines()[-2:] == [f"ddplaunch: {sentence}", "ddplaunch: log folder: logs/x"], done.stderr
    folder = tmp_path / "logs" / "x" / "stall"
    assert sorted(path.name for path in folder.iterdir()) == [
        "nccl-ras.json", "rank_0.json", "rank_1.json", "rank_2.json", "stacks.txt",
    ]  # fmt: skip
    recorded = [json.loads((folder / f"rank_{rank}.json").read_text())["entries"] for rank in range(3)]
    assert [len(entries) for entries in recorded] == [2, 1, 2]
    text = (folder / "stacks.txt").read_text()
    assert re.search(r"^ranks 0, 2 wait in all_reduce #2 .*; rank 1 has not entered it", text)
    assert text.endswith(f"{sentence}\n")


@pytest.mark.ci
def test_a_reported_job_with_dumps_of_nccl(start_ddplaunch, tmp_path, monkeypatch):
    """The job goes on; the history has what was kept, which torch's own analyzer reads."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program = write_program(tmp_path, "hang.py", PROGRAM)
    job = start_ddplaunch("run", *STOP, "--on-stall", "report", "--run-id", "y", "--nproc", "3", program, "nccl")
    folder = tmp_path / "state" / "ddplaunch" / "runs" / "y" / "stall"
    wait_until((folder / "stacks.txt").exists, "the evidence of the stall", timeout=60)
    job.signal(signal.SIGINT)
    job.wait()
    kept = f"ddplaunch: kept in {folder}: dumps of the flight recorder of 3 ranks, stacks.txt"
    assert job.stderr().splitlines()[-1] == kept, job.stderr()
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1", "rank_2", "stacks.txt"]
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    found = subprocess.run(analyzer, capture_output=True, text=True, timeout=scaled_timeout(60))
    assert "all_reduce" in found.stdout + found.stderr, found


@pytest.mark.ci
def test_nothing_is_kept_without_a_folder(run_ddplaunch, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program = write_program(tmp_path, "hang.py", PROGRAM)
    done = run_ddplaunch("run", *STOP, "--no-history", "--nproc", "3", program)
    assert done.returncode == 124, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("ddplaunch: ")]
    assert not [line for line in ours if "kept" in line]  # a rank's traceback has the name of this test's folder
    assert not (tmp_path / "state").exists()
