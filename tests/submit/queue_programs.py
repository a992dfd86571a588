"""Stand-ins for the programs of PBS and LSF, which cannot be had here: they answer as the manuals' examples do.

``install`` puts them into a folder for PATH. A submitted job really runs, in a session of its own, on "hosts" that are
addresses of this machine; pbsdsh and blaunch really start what they are told to, with as little as the real ones hand
on: pbsdsh the variables that qsub had and the home folder, no input; blaunch its input, and words joined for a shell.
A job in the queue "full" waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HOSTS = ("127.0.0.1", "127.0.0.2")


def install(folder: Path, *programs: str) -> dict[str, str]:
    """Write programs into a folder; return the variables of a shell that finds them there."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for name in programs:
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


class Job:
    """A job's files: its script and variables, its process, and its exit status once it has ended."""

    def __init__(self, folder: Path, number: str) -> None:
        self.folder = folder / "jobs" / number
        self.number = number

    @property
    def variables(self) -> dict[str, str]:
        kept = json.loads((self.folder / "variables").read_text())
        assert isinstance(kept, dict)
        return kept

    @property
    def status(self) -> int | None:
        path = self.folder / "status"
        return int(path.read_text()) if path.exists() else None

    @property
    def waits(self) -> bool:
        return not (self.folder / "script").exists()

    @property
    def killed(self) -> bool:
        return (self.folder / "killed").exists()

    def begin(self, script: str, variables: dict[str, str], cwd: Path, log: Path | None) -> None:
        """Run the script in the background, to its end."""
        if re.search(r"(?m)^#\w+ -q full$", script):
            return
        (self.folder / "variables").write_text(json.dumps(variables))
        (self.folder / "script").write_text(script)
        if os.fork():
            return
        os.setsid()
        with open(log or os.devnull, "ab") as out, open(os.devnull, "rb") as nothing:
            running = subprocess.Popen(
                ["/bin/bash", str(self.folder / "script")],
                cwd=cwd,
                env=variables,
                stdin=nothing,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            for inherited in (0, 1, 2):
                os.dup2(nothing.fileno(), inherited)
            (self.folder / "pid").write_text(str(running.pid))
            code = running.wait()
        (self.folder / "next").write_text(str(256 - code if code < 0 else code))
        (self.folder / "next").rename(self.folder / "status")
        os._exit(0)

    def kill(self, number: int) -> None:
        """Signal the script and what it has started in its session; a job that waits never begins."""
        (self.folder / "killed").touch()
        if self.waits:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((self.folder / "pid").read_text()), number)


def _directives(script: str, mark: str) -> dict[str, str]:
    return dict(re.findall(rf"(?m)^{mark} (-\S+) ?(.*)$", script))


def _new(folder: Path, suffix: str = "") -> Job:
    job = Job(folder, f"{os.getpid()}{suffix}")  # no other job has it, in whatever folder, so no other port either
    job.folder.mkdir()
    return job


def qsub(folder: Path, words: list[str]) -> int:
    """As that of PBS: the job begins in the home folder, with a file of hosts that has a line for each task."""
    script = sys.stdin.read()
    asked = _directives(script, "#PBS")
    if asked.get("-q") == "nowhere":
        print("qsub: Unknown queue", file=sys.stderr)
        return 170
    select = re.search(r"^#PBS -l select=(\d+):ncpus=(\d+):mpiprocs=1", script, re.MULTILINE)
    assert select is not None, script
    job = _new(folder, ".pbs01")
    hosts = HOSTS[: int(select[1])]
    (job.folder / "nodefile").write_text("".join(f"{host}\n" for host in hosts))
    of_pbs = {"PBS_JOBID": job.number, "PBS_ENVIRONMENT": "PBS_BATCH", "OMP_NUM_THREADS": select[2]}
    of_script = {"PBS_NODEFILE": str(job.folder / "nodefile"), "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
    name = f"{asked['-N']}.o{job.number.partition('.')[0]}"
    log = Path(asked["-o"]) if "-o" in asked else Path.cwd() / name
    assert asked["-k"] == "doe", "the log is written as it comes"
    job.begin(script, {**os.environ, **of_pbs, **of_script}, folder, log)
    print(job.number)
    return 0


def pbsdsh(folder: Path, words: list[str]) -> int:
    """Run a program on the host of this number; it says the exit status, and ends with 0."""
    assert words[0] == "-n", words
    assert words[2] == "--", words
    job = Job(folder, os.environ["PBS_JOBID"])
    variables = {**job.variables, "PBS_NODENUM": words[1], "PBS_TASKNUM": str(int(words[1]) + 1)}
    del variables["PBS_NODEFILE"]
    done = subprocess.run(words[3:], cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        print(f"pbsdsh: task 0x00000000 exit status {done.returncode}")
    return 0


def qstat(folder: Path, words: list[str]) -> int:
    """``qstat -x -f``: the fields of one job, long ones wrapped behind a tab."""
    assert words[:2] == ["-x", "-f"], words
    job = Job(folder, words[2])
    if not job.folder.exists():
        print(f"qstat: Unknown Job Id {words[2]}", file=sys.stderr)
        return 153
    state = "F" if job.status is not None or (job.waits and job.killed) else "Q" if job.waits else "R"
    print(f"Job Id: {job.number}\n    Job_Name = train.py\n    job_state = {state}")
    if job.waits:
        print("    comment = Not Running: Insufficient amount of resource: ncpus")
    if job.status is not None:
        print(f"    Exit_status = {job.status}")
    print("    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C.UTF-8,\n\tPBS_O_WORKDIR=/data/wine\n")
    return 0


def qdel(folder: Path, words: list[str]) -> int:
    Job(folder, words[0]).kill(signal.SIGTERM)
    return 0


def bsub(folder: Path, words: list[str]) -> int:
    """As that of LSF: the job begins in the current folder, with a file of hosts that has a line for each slot."""
    script = sys.stdin.read()
    asked = _directives(script, "#BSUB")
    if asked.get("-q") == "nowhere":
        print("nowhere: No such queue. Job not submitted.", file=sys.stderr)
        return 255
    slots = int(asked["-n"])
    on_each = re.fullmatch(r'"span\[ptile=(\d+)\]"', asked["-R"])
    assert on_each is not None, asked
    assert asked["-o"] == "/dev/null", "the script writes the log"
    job = _new(folder)
    hosts = [HOSTS[slot // int(on_each[1])] for slot in range(slots)]
    (job.folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    of_lsf = {"LSB_JOBID": job.number, "LSB_DJOB_HOSTFILE": str(job.folder / "hosts")}
    job.begin(script, {**os.environ, **of_lsf}, Path.cwd(), None)
    print(f"Job <{job.number}> is submitted to default queue <normal>.")
    return 0


def blaunch(folder: Path, words: list[str]) -> int:
    """Run a command on a host by a shell, with our input and the variables of the shell that submitted."""
    assert words[0] == "-z", words
    job = Job(folder, os.environ["LSB_JOBID"])
    assert words[1] in (job.folder / "hosts").read_text().split(), words
    variables = {name: value for name, value in job.variables.items() if not name.startswith("LSB_")}
    return subprocess.run(["/bin/sh", "-c", " ".join(words[2:])], cwd=folder, env=variables, check=False).returncode


def bjobs(folder: Path, words: list[str]) -> int:
    """``bjobs -noheader -o``: state, exit code and reason of one job."""
    assert words[:3] == ["-noheader", "-o", "stat exit_code exit_reason delimiter='|'"], words
    job = Job(folder, words[3])
    if not job.folder.exists():
        print(f"Job <{words[3]}> is not found", file=sys.stderr)
        return 255
    status = job.status
    if job.waits and not job.killed:
        print("PEND|-|-")
    elif status is None and not job.waits:
        print("RUN|-|-")
    elif status == 0:
        print("DONE|-|-")
    else:
        print(f"EXIT|{status or '-'}|{'TERM_OWNER: job killed by owner' if job.killed else '-'}")
    return 0


def bkill(folder: Path, words: list[str]) -> int:
    """Signal the job as LSF does at first: with SIGINT."""
    Job(folder, words[0]).kill(signal.SIGINT)
    print(f"Job <{words[0]}> is being terminated")
    return 0


PROGRAMS: dict[str, Callable[[Path, list[str]], int]] = {
    "qsub": qsub,
    "pbsdsh": pbsdsh,
    "qstat": qstat,
    "qdel": qdel,
    "bsub": bsub,
    "blaunch": blaunch,
    "bjobs": bjobs,
    "bkill": bkill,
}

PROGRAMS_OF = {"pbs": ("qsub", "qstat", "qdel", "pbsdsh"), "lsf": ("bsub", "bjobs", "bkill", "blaunch")}
"""Those of each scheduler: what submits, shows, deletes, and starts something on a host."""

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:]))
