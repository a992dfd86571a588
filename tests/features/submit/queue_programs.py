"""Stand-ins for the programs of PBS and LSF, which answer as the examples in the manuals do.

``install`` puts them into a folder for PATH. A submitted job really runs, in a session of its own, on "hosts" that are
addresses of this machine; pbsdsh and blaunch really start the given command, with as little as the real ones hand
on: pbsdsh the variables that qsub had and the home folder, no input; blaunch its input, and words joined for a shell.
A job in the queue "full" waits for ever.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    def begin(
        self, script: str, variables: dict[str, str], cwd: Path, log: Path | None, *, again: int | None = None
    ) -> None:
        """Run the script in the background, to its end; ``again``: the exit code after which it runs once more."""
        if re.search(r"(?m)^#\w+ -q full$", script):
            return
        (self.folder / "variables").write_text(json.dumps(variables))
        (self.folder / "script").write_text(script)
        if os.fork():
            return
        os.setsid()
        with open(log or os.devnull, "ab") as out, open(os.devnull, "rb") as nothing:
            for inherited in (0, 1, 2):
                os.dup2(nothing.fileno(), inherited)
            code = again
            while code == again:
                how: dict[str, Any] = {"cwd": cwd, "env": variables, "stdin": nothing, "stdout": out, "stderr": out}
                running = subprocess.Popen(["/bin/bash", self.folder / "script"], start_new_session=True, **how)
                (self.folder / "pid").write_text(str(running.pid))
                code = running.wait()
        assert code is not None
        (self.folder / "next").write_text(str(256 - code if code < 0 else code))
        (self.folder / "next").rename(self.folder / "status")
        os._exit(0)

    def kill(self, number: int) -> None:
        """Signal the script and what it has started in its session; a job that waits never begins."""
        (self.folder / "killed").touch()
        if not self.waits:
            self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to all processes that are still in the script's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((self.folder / "pid").read_text()), number)


def _directives(script: str, mark: str) -> dict[str, str]:
    return dict(re.findall(rf"(?m)^{mark} (-\S+) ?(.*)$", script))


def _new(folder: Path, number: str) -> Job:
    job = Job(folder, number)
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
    number = os.getpid()  # no other job has it, in whatever folder, so no other port either
    hosts = HOSTS[: int(select[1])]
    assert asked["-k"] == "doe", "the log is written as it comes"
    for index in _indices(asked.get("-J")):
        job = _new(folder, f"{number}{index and f'[{index}]'}.pbs01")
        (job.folder / "nodefile").write_text("".join(f"{host}\n" for host in hosts))
        of_pbs = {"PBS_JOBID": job.number, "PBS_ENVIRONMENT": "PBS_BATCH", "OMP_NUM_THREADS": select[2]}
        of_script = {"PBS_NODEFILE": str(job.folder / "nodefile"), "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
        of_script |= {"PBS_ARRAY_INDEX": index} if index else {}
        name = f"{asked['-N']}.o{number}{index and f'.{index}'}"
        log = Path(asked["-o"]) if "-o" in asked else Path.cwd() / name
        job.begin(script, {**os.environ, **of_pbs, **of_script}, folder, log)
    print(f"{number}{'[]' if '-J' in asked else ''}.pbs01")
    return 0


def _indices(array: str | None) -> list[str]:
    """Return the indices of 1-3 or 1,3; one empty index for a job that is not an array."""
    if array is None:
        return [""]
    first, dash, last = array.partition("%")[0].partition("-")
    return [str(index) for index in range(int(first), int(last) + 1)] if dash else first.split(",")


def pbsdsh(folder: Path, words: list[str]) -> int:
    """Run a program on the host of this number; it says the exit status, and ends with 0."""
    assert words[0] == "-n", words
    assert words[2] == "--", words
    job = Job(folder, os.environ["PBS_JOBID"])
    variables = {**job.variables, "PBS_NODENUM": words[1], "PBS_TASKNUM": str(int(words[1]) + 1)}
    for name in ("PBS_NODEFILE", "PBS_ARRAY_INDEX"):
        variables.pop(name, None)
    done = subprocess.run(words[3:], cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        print(f"pbsdsh: task 0x00000000 exit status {done.returncode}")
    return 0


def qstat(folder: Path, words: list[str]) -> int:
    """``qstat -x -f``: the fields of each job, long ones wrapped behind a tab; ``-t``: of each in an array too."""
    assert words[:2] == ["-x", "-f"], words
    (folder / "asked").open("a").write(f"qstat {' '.join(words)}\n")
    code = 0
    for number in words[2:]:
        if number == "-t":
            continue
        for job in _of(folder, number, "-t" in words):
            if not job.folder.exists():
                print(f"qstat: Unknown Job Id {number}", file=sys.stderr)
                code = 153
                continue
            state = "F" if job.status is not None or (job.waits and job.killed) else "Q" if job.waits else "R"
            print(f"Job Id: {job.number}\n    Job_Name = train.py\n    job_state = {state}")
            if job.waits:
                print("    comment = Not Running: Insufficient amount of resource: ncpus")
            if job.status is not None:
                print(f"    Exit_status = {job.status}")
            print("    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C.UTF-8,\n\tPBS_O_WORKDIR=/data/wine\n")
    return code


def _of(folder: Path, number: str, each: bool) -> list[Job]:
    """Return the job of this id, or a job of an array: 7[2].pbs01 in PBS, 7[2] in LSF."""
    jobs = (folder / "jobs").iterdir()
    ours = sorted(path.name for path in jobs if each and path.name.partition("[")[0] == number.partition("[")[0])
    return [Job(folder, name) for name in ours] or [Job(folder, number)]


def qdel(folder: Path, words: list[str]) -> int:
    for job in _of(folder, words[0], each="[]" in words[0]):
        job.kill(signal.SIGTERM)
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
    number = os.getpid()
    array = re.search(r"\[(.*)\]", asked["-J"])
    hosts = [HOSTS[slot // int(on_each[1])] for slot in range(slots)]
    for index in _indices(array[1] if array else None):
        job = _new(folder, f"{number}{index and f'[{index}]'}")
        (job.folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        of_lsf = {
            "LSB_JOBID": str(number),
            "LSB_JOBINDEX": index or "0",
            "LSB_DJOB_HOSTFILE": str(job.folder / "hosts"),
        }
        job.begin(script, {**os.environ, **of_lsf}, Path.cwd(), None, again=int(asked.get("-Q", -1)))
    print(f"Job <{number}> is submitted to default queue <normal>.")
    return 0


def blaunch(folder: Path, words: list[str]) -> int:
    """Run a command on a host by a shell, with our input and the variables of the shell that submitted."""
    assert words[0] == "-z", words
    index = os.environ["LSB_JOBINDEX"]
    job = Job(folder, os.environ["LSB_JOBID"] + (f"[{index}]" if index != "0" else ""))
    assert words[1] in (job.folder / "hosts").read_text().split(), words
    variables = {name: value for name, value in job.variables.items() if not name.startswith("LSB_")}
    return subprocess.run(["/bin/sh", "-c", " ".join(words[2:])], cwd=folder, env=variables, check=False).returncode


def bjobs(folder: Path, words: list[str]) -> int:
    """``bjobs -noheader -o``: number, index, state, exit code and reason of each job, and of each in an array."""
    assert words[:3] == ["-noheader", "-o", "jobid jobindex stat exit_code exit_reason delimiter='|'"], words
    (folder / "asked").open("a").write(f"bjobs {' '.join(words)}\n")
    for number in words[3:]:
        for job in _of(folder, number, "[" not in number):
            if not job.folder.exists():
                print(f"Job <{number}> is not found", file=sys.stderr)
                continue
            name, _, index = job.number.rstrip("]").partition("[")
            status = job.status
            if job.waits and not job.killed:
                expected = "PEND|-|-"
            elif status is None and not job.waits:
                expected = "RUN|-|-"
            elif status == 0:
                expected = "DONE|-|-"
            else:
                expected = f"EXIT|{status or '-'}|{'TERM_OWNER: job killed by owner' if job.killed else '-'}"
            print(f"{name}|{index or 0}|{expected}")
    return 0


def bkill(folder: Path, words: list[str]) -> int:
    """Signal the job as LSF does at first: with SIGINT."""
    for job in _of(folder, words[0], each="[" not in words[0]):
        job.kill(signal.SIGINT)
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
