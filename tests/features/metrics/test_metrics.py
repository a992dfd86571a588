"""Tests of the file of --metrics, as Prometheus' textfile collector reads it."""

import os
import re

import pytest

from ddplaunch.core import events
from ddplaunch.core.control_socket.job_status import JobState, RankState, RankStatus, Status
from ddplaunch.features.metrics.prometheus_file import PrometheusFile
from ddplaunch.observe.samples.node import CounterSnapshot
from ddplaunch.system.devices.gpu_usage import GpuUsage
from ddplaunch.system.devices.process_usage import ProcessUsage
from tests.conftest import assert_refused, write_program
from tests.features.runs.recorded_events import plan

RANKS = (RankStatus(0, os.getpid(), RankState.RUNNING), RankStatus(1, 11, RankState.EXITED))
STATUS = Status("a", "t.py", 1, 0, 2, 900.0, 901.0, 0, JobState.RUNNING, RANKS)


def series(text):
    """As Prometheus reads it: each series and its value; every metric has its HELP and TYPE before it, once."""
    found, declared = {}, []
    for line in text.splitlines():
        if line.startswith("# "):
            declared.append(tuple(line.split()[1:3]))
            continue
        match = re.fullmatch(r'([a-z_]+)\{(\w+="[^"]*"(?:,\w+="[^"]*")*)\} (\S+)', line)
        assert match, line
        assert declared[-2:] == [("HELP", match[1]), ("TYPE", match[1])]
        found[match[1], match[2]] = float(match[3])
    assert len(declared) == len(set(declared))
    return found


def test_metrics_of_ranks_are_removed_at_the_end(tmp_path):
    notes = []
    path = tmp_path / "job.prom"
    file = PrometheusFile(str(path), lambda: STATUS, notes.append)
    file.observe(events.JobStalled(990.0, "no progress"))
    used, gpu = ProcessUsage(3.5, 2 << 20, 77, 88), GpuUsage(1, 50, 9 << 30, None, (), 310.5, True)
    file.on_sample(CounterSnapshot(plan(), 0.0, 0.0, {0: 9}, {0: used}, {0: {"0": 5, "1": 6}}, gpus=(gpu,)), None)
    found = series(path.read_text())
    run = 'run_id="a",node_rank="0"'
    for name in ("up", "stalls_total", "ranks_running"):
        assert found[f"ddplaunch_{name}", run] == 1
    assert {name: value for (name, labels), value in found.items() if ',rank="0"' in labels} == {
        "ddplaunch_rank_cpu_seconds_total": 3.5,
        "ddplaunch_rank_memory_bytes": 2 << 20,
        "ddplaunch_rank_read_bytes_total": 77,
        "ddplaunch_rank_written_bytes_total": 88,
        "ddplaunch_rank_collectives_total": 11,
    }
    assert {name: value for (name, labels), value in found.items() if 'gpu="1"' in labels} == {
        "ddplaunch_gpu_busy_ratio": 0.5,
        "ddplaunch_gpu_memory_bytes": 9 << 30,
        "ddplaunch_gpu_power_watts": 310.5,
        "ddplaunch_gpu_slowed": 1,
    }
    assert ("ddplaunch_rank_memory_bytes", f'{run},rank="1"') not in found
    file.observe(events.JobEnded(1, None))
    found = series(path.read_text())
    assert found["ddplaunch_exit_code", run] == 1
    assert found["ddplaunch_up", run] == 0
    assert not any("rank_" in name or "gpu_" in name for name, _ in found)
    assert os.listdir(tmp_path) == ["job.prom"]
    assert notes == []


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path):
    notes: list[str] = []
    path = tmp_path / "job.prom"
    path.mkdir()
    file = PrometheusFile(str(path), lambda: STATUS, notes.append)
    for code in (0, 1):
        file.observe(events.JobEnded(code, None))
    assert notes == [f"cannot write --metrics {path}: Is a directory; the job continues"]
    assert os.listdir(tmp_path) == ["job.prom"]


@pytest.mark.slow
def test_a_run_writes_the_file(run_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "print(open('job.prom').read())")
    job = run_ddplaunch("run", "--no-history", "--run-id", "a", "--metrics", "job.prom", "t.py")
    assert (job.returncode, job.stderr) == (0, "")
    assert series(job.stdout.strip())["ddplaunch_up", 'run_id="a",node_rank="0"'] == 1
    assert series((tmp_path / "job.prom").read_text())["ddplaunch_up", 'run_id="a",node_rank="0"'] == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("job.txt", "expected a file that ends in .prom"),
        ("", "has an empty value"),
        ("none/job.prom", "there is no folder none"),
        ("dir.prom", "is a folder, not a file"),
    ],
)
def test_refused_values_of_metrics(run_in_fork, tmp_path, path, expected):
    write_program(tmp_path, "t.py", "")
    (tmp_path / "dir.prom").mkdir()
    assert_refused(run_in_fork("run", "--metrics", path, "t.py"), expected)
