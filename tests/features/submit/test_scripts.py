"""Tests of the batch scripts of all schedulers: compared with golden files, and valid for bash; where the logs are.

The smallest job of each scheduler has a golden script; other jobs have what differs from it.
``python -m tests.features.submit.test_scripts`` writes the golden files again, to be read in the diff.
"""

import difflib
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.features.submit.batch_job import BatchJob, JobCode, RequeueOptions, SetupCommand
from ddplaunch.features.submit.gridengine import GridEngine
from ddplaunch.features.submit.lsf import Lsf
from ddplaunch.features.submit.pbs import Pbs
from ddplaunch.features.submit.slurm import Slurm
from ddplaunch.system.code_version import CodeVersion

GOLDEN = Path(__file__).parent / "golden"

WRITERS = {"sge": GridEngine(), "pbs": Pbs(), "lsf": Lsf()}
"""By the first word of a job's name, which is the name of its scheduler's smallest job; all others are Slurm's."""

SMALLEST = BatchJob(command=["train.py"], interpreter="/opt/venv/bin/python", chdir="/data/wine", job_name="train.py")

EVERYTHING = replace(
    SMALLEST,
    command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", 'it\'s a "test"', "$HOME"],
    chdir="/data/my wine",
    job_name="wine",
    nodes=2,
    cpus_per_task=64,
    time="1-02:03:04",
    partition="gpu",
    setup=[SetupCommand("/data/my wine/env.sh", is_file=True), SetupCommand("module load cuda/12")],
)
NODES = replace(EVERYTHING, gpus_per_node="8", account="wine-2026", exclusive=True)

AGAIN = RequeueOptions(3, "USR1", 90, 30)

JOBS = {
    "smallest": SMALLEST,
    "two_nodes": replace(
        SMALLEST,
        command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", "it's a test", "$HOME"], nodes=2,
        gpus_per_node="8", cpus_per_task=64, time="4:00:00", partition="general",
    ),
    "everything": replace(
        SMALLEST, command=["--nproc", "4", "-m", "wine.train"], chdir="/data/my wine", job_name='a "job"',
        output="logs/%A_%a.out", nodes=16, gpus_per_node="a100:8", cpus_per_task=64, mem="200G", time="1-12",
        partition="big,small", account="vision", qos="high", constraint="[rack1|rack2]", nodelist="gpu[01-16]",
        array="0-7%2", extra_options=["--hint=nomultithread", "--prefer='back \\ slash # 2'"],
        setup=[SetupCommand("/data/my wine/env.sh", is_file=True), SetupCommand("export A=1; module load cuda/12")],
    ),
    "as_sbatch": replace(
        SMALLEST, nodes=2, error="logs/%j.err", gpus_per_task="h100:8", gres="gpu:h100:8,nvme:1", mem_per_gpu="50G",
        exclude="gpu[07-08]", exclusive=True, reservation="week 3", dependency="afterok:4711?afterany:4712_3",
        mail_type="END,FAIL", mail_user="me@example.org", comment="wine # 2",
        srun_args=["--cpu-bind=none", "--export 'A=1 2'"],
        setup=[SetupCommand("export SCRATCH=/scratch/$SLURM_JOB_ID; mkdir $SCRATCH")],
        teardown=[SetupCommand('rm -rf "$SCRATCH"; '), SetupCommand("/data/my wine/done.sh", is_file=True)],
    ),
    "requeue_on": replace(SMALLEST, nodes=2, requeue=RequeueOptions(3, "USR2", 90, 30, (1, 69))),
    "requeue": replace(SMALLEST, nodes=2, requeue=RequeueOptions(3, "USR2", 90, 30)),
    "spares": replace(SMALLEST, nodes=3, spares=1),
    "container": replace(
        SMALLEST, interpreter="python", container_image="nvcr.io#nvidia/pytorch:25.01-py3",
        container_mounts=["/data/sets:/sets:ro", "/scratch:/scratch"],
    ),
    "code": replace(SMALLEST, code=JobCode(
        "/data/wine/.ddplaunch/code/5f3a9c1be0d24411", "/data/wine/.ddplaunch/code/5f3a9c1be0d24411/exp 1",
        CodeVersion("5f3a9c", "/data/wine", "1a2b", True),
    )),
    "sge": replace(SMALLEST, pe="mpi"),
    "pbs": SMALLEST,
    "lsf": SMALLEST,
    "sge_everything": replace(
        EVERYTHING, output="logs/$JOB_ID.out", cpus_per_task=4, time="4:00:00", partition="gpu.q", pe="mpi",
        extra_options=["-l gpu=8", "-P 'my project'"],
    ),
    "pbs_everything": replace(
        NODES, output="logs/wine.out", mem="200G", extra_options=["-P 'my project'", "-W depend=afterok:4711"]
    ),
    "lsf_everything": replace(
        NODES, output="logs/%J.out", extra_options=["-R 'rusage[mem=200G]'", "-w 'done(4711) && done(4712)'"]
    ),
    "sge_again": replace(SMALLEST, pe="mpi", nodes=3, spares=1, array="1-9:2%2", time="4:00:00", requeue=AGAIN),
    "pbs_again": replace(SMALLEST, nodes=3, spares=1, array="0-7%2"),
    "lsf_again": replace(SMALLEST, nodes=3, spares=1, array="1,5%2", time="4:00:00", requeue=AGAIN,
                         extra_options=["-app ours"]),
}  # fmt: skip


def writer(name: str) -> GridEngine | Pbs | Lsf | Slurm:
    return WRITERS.get(name.partition("_")[0], Slurm())


def script(name: str) -> str:
    return writer(name).render_script(JOBS[name])


def smallest(name: str) -> str:
    """Return the name of the smallest job of the same scheduler."""
    scheduler = name.partition("_")[0]
    return scheduler if scheduler in WRITERS else "smallest"


def golden_file(name: str) -> Path:
    return GOLDEN / (f"{name}.sh" if name == smallest(name) else f"{name}.diff")


def golden_text(name: str) -> str:
    """Return the script of a smallest job, or how a script differs from that: a unified diff without line numbers."""
    lines = script(name).splitlines()
    if name != smallest(name):
        _, _, *lines = difflib.unified_diff(script(smallest(name)).splitlines(), lines, n=1, lineterm="")
    return "".join(f"{'@@' if line.startswith('@@ ') else line}\n" for line in lines)


@pytest.mark.parametrize("name", JOBS)
def test_scripts_equal_the_golden_files(name):
    assert golden_text(name) == golden_file(name).read_text()
    subprocess.run(["bash", "-n"], input=script(name), text=True, check=True)


@pytest.mark.parametrize(
    ("scheduler", "text", "name"),
    [
        ("sge", "-x y.py", "j-x y.py"), ("pbs", "-x y.py", "j-x_y.py"), ("lsf", "-x y.py", "j-x_y.py"),
        ("sge", "3d:main", "j3d_main"), ("lsf", "été", "_t_"),
    ],
)  # fmt: skip
def test_a_job_name_is_valid_for_its_scheduler(scheduler, text, name):
    assert WRITERS[scheduler].job_name(text) == name


def test_no_golden_file_is_left_over():
    assert {*GOLDEN.iterdir()} == {golden_file(name) for name in JOBS}


@pytest.mark.parametrize(
    ("name", "number", "log"),
    [
        ("sge", "4711", "/data/wine/sge-4711.out"),
        ("sge_everything", "4711", "/data/my wine/logs/4711.out"),
        ("pbs", "4711.pbs01", "/data/wine/train.py.o4711"),
        ("pbs_everything", "4711.pbs01", "/data/my wine/logs/wine.out"),
        ("lsf", "4711", "/data/wine/lsf-4711.out"),
        ("lsf_everything", "4711", "/data/my wine/logs/4711.out"),
        ("sge_again", "4711", "/data/wine/sge-4711.%a.out"),
        ("pbs_again", "4711.pbs01", "/data/wine/train.py.o4711.%a"),
        ("lsf_again", "4711", "/data/wine/lsf-4711_%a.out"),
        ("smallest", "12", "/data/wine/slurm-12.out"),
        ("everything", "12", "/data/my wine/logs/12_%a.out"),
    ],
)
def test_the_path_of_the_log(name, number, log):
    assert writer(name).log_path(JOBS[name], number) == log


def test_patterns_of_sbatch_in_the_path_of_a_log():
    for output, path in (("logs/%x-%5j.txt", "/data/wine/logs/train.py-00012.txt"), ("%j-%N", "/data/wine/%j-%N")):
        array = "0-3" if "%N" in output else None
        assert Slurm().log_path(replace(SMALLEST, output=output, array=array), "12") == path


@pytest.mark.parametrize("name", ["sge", "pbs", "lsf", "smallest"])
@pytest.mark.parametrize("text", ["a\nb", "a\rb"])
def test_a_value_cannot_become_a_line(name, text):
    with pytest.raises(UsageError, match="one line"):
        writer(name).render_script(replace(JOBS[name], partition=text))


if __name__ == "__main__":
    for each in JOBS:
        golden_file(each).write_text(golden_text(each))
