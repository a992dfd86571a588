"""Tests of ``ddplaunch run`` under a real srun, without options for nodes, addresses or ports."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.core.signals import DUPLICATE_WINDOW_S
from ddplaunch.features.slurm_step.node import CHECK_INTERVAL_S
from tests.conftest import PROGRAMS, ddplaunch_command, write_program
from tests.fake_nvml import DRIVER_NOT_LOADED, FakeNvml
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT
from tests.tools.slurm.configuration import FOLDER
from tests.tools.virtual_hosts.host import finish

pytestmark = pytest.mark.ci

SHOWS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
print("sum", int(total), *(os.environ[name] for name in names.split()), flush=True)
dist.destroy_process_group()
"""

SHOWS_WITHOUT_TORCH = f"""
import os
total = os.environ["WORLD_SIZE"]
{SHOWS[SHOWS.index("names = ") : SHOWS.index("dist.destroy")]}"""
"""The same without torch, of ranks that need not meet."""


def lines(out: str) -> list[str]:
    """What ranks printed, without their prefixes, in the order of ranks."""
    return [line.partition("] ")[2] for line in sorted(out.splitlines()) if "] sum" in line]


PLACES = {
    "a task a node": (
        ["-N2", "-n2", "--ntasks-per-node=1"],
        ["--nproc", "2"],
        ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"],
    ),
    "a task a rank": (
        ["-N2", "-n4", "--ntasks-per-node=2"],
        [],
        ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"],
    ),
    "uneven tasks": (["-N2", "-n3"], [], ["sum 3 0 0 3 2 0 2", "sum 3 1 1 3 2 0 2", "sum 3 2 0 3 1 1 2"]),
    "one task": (["-N1", "-n1"], ["--nproc", "2"], ["sum 2 0 0 2 2 0 1", "sum 2 1 1 2 2 0 1"]),
}
"""Words for srun and ours, and what ranks then print."""


def test_a_terminal_of_srun_is_interactive_with_pty_alone(standing_slurm, tmp_path):
    write_program(tmp_path, "train.py", "import os\nprint('seen', os.environ.get('DDPLAUNCH_TERMINAL'))\n")
    cluster = standing_slurm
    ours = ddplaunch_command("run", "--no-merge", "--nproc", "2", *LIGHT, "train.py")
    steps = [cluster.srun("-N1", "-n1", "-u", *ours), cluster.srun("-N1", "-n1", "--pty", *ours, terminal=True)]
    quiet, seen = (step.communicate(timeout=scaled_timeout(60))[0] for step in steps)
    assert [step.returncode for step in steps] == [0, 0]
    assert sorted(quiet.split()) == ["None", "None", "[0]", "[1]", "seen", "seen"]
    assert "\x1b[36m[0]\x1b[0m seen 1" in seen


def test_ranks_find_their_places(standing_slurm, tmp_path):
    """Several jobs run at the same time on the same nodes, two of them equal; they do not connect to each other."""
    write_program(tmp_path, "train.py", SHOWS)
    cluster = standing_slurm
    jobs = [*PLACES.items(), ("uneven tasks", PLACES["uneven tasks"])]
    steps = [cluster.srun(*options, *ddplaunch_command("run", *ours, "train.py")) for _, (options, ours, _) in jobs]
    for step, (name, (_, _, shown)) in zip(steps, jobs, strict=True):
        out, err = finish(step)
        assert lines(out) == shown, name
        assert not re.search(r"\(00:0[0-4]\)", err), "the first seconds of the wait for each other are no news"
    assert not [pid for host in cluster.network.hosts for pid in host.find("train.py")]


def test_the_components_of_a_heterogeneous_job_are_one_world(standing_slurm, tmp_path):
    write_program(tmp_path, "train.py", SHOWS)
    ours = ddplaunch_command("run", "--nproc", "2", "train.py")
    step = standing_slurm.srun("-N1", "-n1", *ours, ":", "-N1", "-n1", *ours)
    out, err = finish(step)
    assert lines(out) == PLACES["a task a node"][2]
    assert "heterogeneous" not in err


def test_a_rank_that_fails_ends_the_step_and_is_reported(standing_slurm):
    ours = ddplaunch_command("run", PROGRAMS / "fails.py", "exit", "1")
    step = standing_slurm.srun("-N2", "-n2", "--ntasks-per-node=1", *ours)
    _, err = finish(step, 7)
    assert err.count("ddplaunch: rank 1 exited with code 7") == 1, "reported by node 0 for all"


def with_gpus(fake_nvml: FakeNvml, *words: str | Path, **ailments: int) -> list[str]:
    """Our command line on a machine that has two."""
    environ = fake_nvml.environ(2, **ailments)
    fakes = [f"{name}={value}" for name, value in environ.items() if name.startswith(("FAKE_", "LD_LIBRARY"))]
    return ["env", *fakes, *ddplaunch_command(*words)]


def test_gpus_that_slurm_gives(slurm, tmp_path, fake_nvml):
    """They must work; a task may have one of its own."""
    cluster = slurm(1, gpus=2)
    show = ["sh", "-c", "echo $SLURM_LOCALID ${CUDA_VISIBLE_DEVICES-none}"]
    for words, expected in {
        "--gpus-per-node=2": ["0 0,1", "1 0,1"],
        "--gpus-per-task=1": ["0 0", "1 1"],
        "--gpus-per-node=1": ["0 0", "1 0"],
        "--exclusive": ["0 none", "1 none"],
    }.items():
        assert sorted(cluster.run("srun", "-n2", words, *show).splitlines()) == expected

    write_program(tmp_path, "show.py", "import os; print(os.environ['RANK'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n")
    ours = ("run", "--start", "exec", "show.py")
    step = cluster.srun("-n2", "--gpus-per-task=1", *with_gpus(fake_nvml, *ours))
    out, err = finish(step)
    assert sorted(line.split()[1] for line in out.splitlines()) == ["0", "1"]
    broken = with_gpus(fake_nvml, *ours, init_error=DRIVER_NOT_LOADED)
    for options, code, shown in (["--gpus-per-node=2"], 2, ""), ([], 0, "0 None"):
        step = cluster.srun("-n1", *options, *broken)
        out, err = step.communicate(timeout=scaled_timeout(100))
        assert (step.returncode, out.strip().rpartition("] ")[2]) == (code, shown), err
        assert ("SLURM_GPUS_ON_NODE=2, but no GPU" in err) == bool(options)


def test_a_script_on_two_nodes_and_its_steps(standing_slurm, tmp_path):
    """Without srun the job uses one machine and notes that; parallel and overlapping steps stay separate."""
    write_program(tmp_path, "train.py", SHOWS)
    write_program(tmp_path, "shows.py", SHOWS_WITHOUT_TORCH)
    cluster = standing_slurm
    alone, each = (
        shlex.join(ddplaunch_command("run", *words)) for words in (["--nproc", "2", *LIGHT, "shows.py"], ["train.py"])
    )
    script = f"""
        {alone}; echo direct $?
        srun -N1 -n1 {alone} & srun -N1 -n1 {alone} & wait; echo beside
        srun -N2 -n2 --overlap {each} & srun -N2 -n2 --overlap {each} & wait; echo overlapping
    """
    job = cluster.sbatch("-N2", "--ntasks-per-node=1", "-c2", script=script)
    assert cluster.wait(job, timeout=200) == "COMPLETED", cluster.output(job)
    direct, _, rest = cluster.output(job).partition("direct 0\n")
    beside, _, overlapping = rest.partition("beside\n")
    assert f"slurm job {job} runs on one of its 2 hosts" in direct
    assert lines(direct) == ["sum 2 0 0 2 2 0 1", "sum 2 1 1 2 2 0 1"]
    assert lines(beside) == ["sum 2 0 0 2 2 0 1"] * 2 + ["sum 2 1 1 2 2 0 1"] * 2
    assert lines(overlapping) == ["sum 2 0 0 2 1 0 2"] * 2 + ["sum 2 1 0 2 1 1 2"] * 2


def test_a_job_that_a_rank_starts_is_its_own(standing_slurm, tmp_path):
    write_program(tmp_path, "shows.py", SHOWS_WITHOUT_TORCH)
    inner = ddplaunch_command("run", "--nproc", "2", *LIGHT, "shows.py")
    write_program(tmp_path, "outer.py", f"import subprocess; subprocess.run({inner})")
    step = standing_slurm.srun("-N2", "-n2", "--ntasks-per-node=1", *ddplaunch_command("run", *LIGHT, "outer.py"))
    out, _ = finish(step)
    assert [out.count(f"sum {shown}") for shown in ("2 0 0 2 2 0 1", "2 1 1 2 2 0 1")] == [2, 2]


CATCHES = """
import os, signal, time

got = []
for number in (signal.SIGUSR1, signal.SIGCONT):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not os.path.exists("leave"):
    while got:
        print("got", got.pop(), flush=True)
    time.sleep(0.02)
"""


def test_a_signal_for_the_ranks_comes_once(standing_slurm, tmp_path):
    """Slurm signals each process of a step here, ranks and launchers, on all nodes."""
    write_program(tmp_path, "train.py", CATCHES)
    cluster = standing_slurm
    ways = {"a task a node": (1, ("--nproc", "2", *LIGHT)), "a task a rank": (2, LIGHT)}
    jobs = {}
    for name, (tasks, words) in ways.items():
        counts = ("-N2", f"--ntasks-per-node={tasks}", "-c2")
        jobs[name] = cluster.sbatch(*counts, script=f"srun {shlex.join(ddplaunch_command('run', *words, 'train.py'))}")
    for number in (signal.SIGUSR1, signal.SIGCONT):
        for job in jobs.values():
            cluster.wait_for(job, "ready", 4)
            cluster.cancel(job, f"--signal={number.name}")
        for job in jobs.values():
            cluster.wait_for(job, f"got {number:d}", 4)
    time.sleep(DUPLICATE_WINDOW_S + 1)  # the thing tested is that nothing more comes
    write_program(tmp_path, "leave", "")
    for name, job in jobs.items():
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
        assert cluster.output(job).count("got") == 2 * 4, name


TYPED = {
    "typed": "--node-rank $SLURM_NODEID --master-addr n1 --master-port 29610",
    "c10d": "--rdzv-backend c10d --rdzv-endpoint n1:29612",
}


def test_a_node_that_cannot_start_is_not_waited_for(standing_slurm, tmp_path):
    """The other case is a node that is only late."""
    cluster = standing_slurm
    write_program(tmp_path, "train.py", "print('here')\n")
    ours = ddplaunch_command("run", *LIGHT, "train.py")
    only_here = f"{FOLDER}/python"
    make = f"printf '#!/bin/sh\\nexec {sys.executable} \"$@\"' >{only_here}; chmod +x {only_here}"
    cluster.nodes[0].run("sh", "-c", make)
    script = f"test $SLURM_NODEID = 0 || sleep {3 * CHECK_INTERVAL_S:g}; exec {shlex.join(ours)}"
    steps = {
        "a node": cluster.srun("-N2", "-n2", "--ntasks-per-node=1", only_here, *ours[1:]),
        "two tasks": cluster.srun("-N2", "-n4", "--ntasks-per-node=2", only_here, *ours[1:]),
        "node 0": cluster.srun(
            "-N2", "-n2", "--ntasks-per-node=1", "sh", "-c", f"test -e {only_here} || exec {shlex.join(ours)}; exit 127"
        ),
        "late": cluster.srun("-N2", "-n2", "--ntasks-per-node=1", "bash", "-c", script),
    }
    here = shlex.join([only_here, *ours[1 : ours.index("run")], "run"])  # the options come before the target
    rest = shlex.join([*LIGHT, "train.py"])
    for name, how in TYPED.items():
        typed = f"exec {here} --nnodes 2 {how} {rest}"
        steps[name] = cluster.srun("-N2", "-n2", "--ntasks-per-node=1", "sh", "-c", typed)
    ended = {name: step.communicate(timeout=scaled_timeout(60)) for name, step in steps.items()}
    assert ended["late"][0].count("here") == 2, ended["late"][1]
    assert "Slurm reports that node 1 (n2) has ended\n" in ended["a node"][1]
    assert "Slurm reports that tasks 2, 3 have ended\n" in ended["two tasks"][1]
    assert "Slurm reports that node 0 (n1) has ended\n" in ended["node 0"][1]
    assert "Slurm reports that node 1 (n2) has ended\n" in ended["typed"][1]
    assert "Slurm reports that task 1 has ended\n" in ended["c10d"][1]
    assert [steps[name].returncode for name in steps] == [2, 2, 127, 0, 127, 127]
