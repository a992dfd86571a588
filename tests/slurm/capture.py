"""Captures the environments of jobs in a real Slurm: ``python -m tests.slurm.capture`` writes ``samples/``.

A sample is a shell-like text of ``NAME=value`` lines, of one process: ``batch.txt`` of a batch script,
``one-task-a-node.1.txt`` of task 1 of a step. What differs from run to run (``_VARYING``) is replaced, and listed here.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from tests.slurm.cluster import Slurm
from tests.virtual_hosts.network import Network

SAMPLES = Path(__file__).parent / "samples"
NODES, GPUS = 3, 4

_VARYING = {
    r"SLURM_(?:JOB_?ID|ARRAY_JOB_ID)": "1234",
    r"SLURM_TASK_PID": "100",
    r"SLURM_(?:SRUN_COMM|STEP_LAUNCHER)_PORT": "40000",
    r"SLURM_SUBMIT_DIR": "/home/user",
}

_SCRIPTS: dict[str, tuple[list[str], list[tuple[str, list[str]]]]] = {
    "batch": (["-N2", "--ntasks-per-node=2", "--cpus-per-task=2", "--gpus-per-node=2"], [("two-tasks-a-node", [])]),
    "batch-one-task-a-node": (["-N2", "--ntasks-per-node=1", "--gpus-per-node=4"], [("one-task-a-node", [])]),
    "batch-of-three-nodes": (
        ["-N3", "--ntasks-per-node=1", "--gpus-per-node=4"],
        [("fewer-nodes-than-the-job", ["-N2", "-n2"])],
    ),
    "batch-without-gpus": (["-N2"], [("without-gpus", [])]),
    "array": (["-N1", "--array=7"], []),
}
"""Batch scripts: their names, the words for sbatch, and their steps with the words for srun."""

_STEPS = {
    "srun-gpus-per-task": ["-N1", "-n2", "--gpus-per-task=1"],
    "srun-uneven": ["-N2", "-n3", "--gpus-per-node=4"],
    "srun-one-task-a-node": ["-N2", "--ntasks-per-node=1", "--gpus-per-node=4"],
}
"""Steps that make their own allocation."""


def capture(slurm: Slurm) -> dict[str, str]:
    """Run all of them on a cluster with ``NODES`` nodes of ``GPUS`` GPUs; the text of each sample by its name."""
    for batch, (words, steps) in _SCRIPTS.items():
        lines = [_keep(batch)]
        for name, step_words in steps:
            lines.append(shlex.join(["srun", *step_words, "sh", "-c", _keep(f"{name}.$SLURM_PROCID")]))
        slurm.wait_until_idle()  # so that each gets the first nodes and GPUs
        job = slurm.sbatch(*words, script="\n".join(lines))
        assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    for name, words in _STEPS.items():
        slurm.wait_until_idle()
        slurm.run("srun", *words, "sh", "-c", _keep(f"{name}.$SLURM_PROCID"))
    return {file.name: _settled(file.read_text()) for file in sorted(slurm.folder.glob("*.txt"))}


def _keep(name: str) -> str:
    return f"env | grep -E '^(SLURM|CUDA_VISIBLE_DEVICES)' | LC_ALL=C sort >{name}.txt"


def _settled(text: str) -> str:
    for name, value in _VARYING.items():
        text = re.sub(rf"(?m)^({name})=.*$", rf"\g<1>={value}", text)
    return re.sub(r"(?m)^SLURM_JOB_NAME=script-.*$", "SLURM_JOB_NAME=train.sh", text)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(NODES + 1) as network,
        Slurm(network, Path(folder), gpus=GPUS) as slurm,
    ):
        texts = capture(slurm)
    for name, text in texts.items():
        (SAMPLES / name).write_text(text)


if __name__ == "__main__":
    main()
