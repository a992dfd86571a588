"""Slurm's own programs: submit a script, look at a job, cancel it. Only this module reads what they print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE, LaunchError, UsageError
from ddplaunch.submit.programs import call, check_on_path

asked = "scontrol"
"""What a follower asks."""

OVERRIDES = {
    "account": "SBATCH_ACCOUNT",
    "array": "SBATCH_ARRAY_INX",
    "constraint": "SBATCH_CONSTRAINT",
    "error": "SBATCH_ERROR",
    "exclusive": "SBATCH_EXCLUSIVE",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "gpus-per-task": "SBATCH_GPUS_PER_TASK",
    "gres": "SBATCH_GRES",
    "job-name": "SBATCH_JOB_NAME",
    "mem": "SBATCH_MEM_PER_NODE",
    "mem-per-cpu": "SBATCH_MEM_PER_CPU",
    "mem-per-gpu": "SBATCH_MEM_PER_GPU",
    "open-mode": "SBATCH_OPEN_MODE",
    "output": "SBATCH_OUTPUT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
    "time": "SBATCH_TIMELIMIT",
}
"""The variables that overrule the lines of a script (sbatch(1), INPUT ENVIRONMENT VARIABLES)."""

MEMORY = ("mem", "mem-per-gpu", "mem-per-cpu")
"""The options of memory, of which sbatch takes one."""

_KEPT_OF_AN_OUTER_JOB = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}

_FINAL: dict[str, tuple[str, int | None]] = {
    "COMPLETED": ("completed", None),
    "FAILED": ("failed", None),
    "CANCELLED": ("was cancelled", EXIT_SIGNAL + 15),
    "DEADLINE": ("passed its deadline", EXIT_SIGNAL + 15),
    "TIMEOUT": ("reached its time limit", EXIT_SIGNAL + 15),
    "OUT_OF_MEMORY": ("used more memory than it had", EXIT_SIGNAL + 9),
    "BOOT_FAIL": ("got a node that did not boot", EXIT_UNAVAILABLE),
    "NODE_FAIL": ("lost a node", EXIT_UNAVAILABLE),
    "PREEMPTED": ("was preempted", EXIT_PREEMPTED),
}
"""The final states of a job (squeue(1), JOB STATE CODES): words for each, and our exit code.

None is the batch script's own exit code. Where Slurm ended the job that says nothing, and SIGTERM is what it got.
"""


_NO_LOG = "NO_LOG"  # our state of a job whose log slurmd could not open
_LOG_SIGNAL = 53  # the signal that scontrol shows for it
_NEVER = {
    "PartitionNodeLimit": "the job asks for more nodes than the partition allows or has up",
    "PartitionTimeLimit": "the job asks for more time than the partition allows",
    "BadConstraints": "no node has what the job asks for",
    "DependencyNeverSatisfied": "the job that it waits for did not end as required",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the partition does not allow the QOS",
    "JobHeldUser": "you hold it: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
}
"""Reasons that waiting does not change, in words (Slurm's page "Job Reason Codes"), beside ``_PER_JOB``."""

_PER_JOB = re.compile(r"(Assoc|QOS)Max\w+PerJob(Limit)?|QOSMin\w+")
"""Limits of an account or a QOS that this job alone exceeds, like QOSMaxNodePerJobLimit."""


@dataclass(frozen=True)
class JobId:
    """A job's number, and the cluster where there are several."""

    number: str
    cluster: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The job as the programs of Slurm name it: its number, behind the option for its cluster."""
        return ("-M", self.cluster, self.number) if self.cluster else (self.number,)


@dataclass(frozen=True)
class JobRecord:
    """What Slurm says of a job."""

    state: str  # like PENDING, RUNNING, COMPLETED
    reason: str  # why it waits, like Priority or Resources; else "None"
    code: int | None  # our exit code; None while it runs or waits
    log: str | None  # the file of its output
    restarts: int = 0  # how often Slurm has requeued it
    errors: str | None = None  # the file of its stderr, where that is another
    number: str = ""  # its own, also in an array
    host: str | None = None  # of its batch script, which is node 0's
    said: str | None = None  # how it ended, in words that were kept

    @property
    def waits(self) -> bool:
        return self.state == "PENDING"

    @property
    def words(self) -> str:
        """What to say about it, after "job 7"."""
        if self.said:
            return self.said
        if self.waits:
            waits = "was requeued and waits" if self.restarts else "waits"
            never = _NEVER.get(self.reason) or ("more than one job may have" if _PER_JOB.fullmatch(self.reason) else "")
            if never:
                return f"{waits}, and will never start: {self.reason} ({never})"
            return waits if self.reason == "None" else f"{waits}: {self.reason}"
        if self.state == _NO_LOG:
            return f"failed: Slurm could not open its log {self.log or ''} on the node (exit code {self.code})"
        if self.state in _FINAL:
            return f"{_FINAL[self.state][0]} (exit code {self.code})"
        again = f" again (restart {self.restarts})" if self.restarts and self.state == "RUNNING" else ""
        return f"is {self.state.lower().replace('_', ' ')}{again}"


def check_is_here(environ: Mapping[str, str]) -> None:
    """Check that this machine has sbatch. Raises UsageError if it is not on PATH."""
    check_on_path("sbatch", "Slurm", environ)


def has_containers() -> bool:
    """Whether srun here has the options of pyxis; its help lists them. True if it does not answer."""
    try:
        done = call("srun", "--help")
    except (OSError, subprocess.TimeoutExpired):
        return True
    return bool(done.returncode) or "--container-image" in done.stdout


def submit(script: str, environ: Mapping[str, str]) -> JobId:
    """Hand a script to sbatch, whose stderr goes to ours; return the job's number. Raises UsageError if it refuses."""
    words, env = ["sbatch", "--parsable"], _environment(script, environ)
    done = subprocess.run(words, input=os.fsencode(script), capture_output=True, env=env, check=False)
    said = done.stderr.decode(errors="replace")
    if said:
        os.write(2, done.stderr)
    if done.returncode:
        raise UsageError(f"sbatch refused the job (exit code {done.returncode})", _advice(said))
    # The last line of stdout is the answer: a site's own checks may print there too. sbatch(1): "job id;cluster name".
    number, _, cluster = done.stdout.decode(errors="replace").strip().rpartition("\n")[2].partition(";")
    if not number.isdecimal():
        what = f"sbatch took the job, but its answer is not a job id: {number!r}"
        raise LaunchError(what, "squeue --me lists your jobs")
    return JobId(number, cluster or None)


_ADVICE = (  # the first that fits; for a wrong account Slurm names the partition too
    ("account", "sacctmgr show associations user=$USER lists the accounts"),
    ("qos", "sacctmgr show qos format=name lists them"),
    ("partition", "sinfo -s lists the partitions"),
    ("time limit", 'sinfo -o "%P %l" lists the partitions with their limits'),
    ("node configuration", 'sinfo -o "%P %D %c %m %G %f" lists nodes with CPUs, memory (MB), GPUs and features'),
    ("feature", 'sinfo -o "%P %D %f" lists nodes with their features'),
    ("dependency", "squeue --me lists your jobs; --dependency afterok:JOB waits for one"),
    ("reservation", "scontrol show reservation lists them"),
    ("node name", 'sinfo -N -o "%N" lists the nodes'),
    ("gres", 'sinfo -o "%P %D %G" lists nodes with their GPUs'),
    ("", "--dry-run shows the script"),
)


def _advice(said: str) -> str:
    found = next(advice for words, advice in _ADVICE if words in said.lower())
    return f"sbatch says why above; {found}"


def _environment(script: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that overrule the lines of the script, or that belong to a job in whose shell we run."""
    kept = dict(environ)
    for option, variable in OVERRIDES.items():
        if re.search(rf"^#SBATCH --{option}(=|$)", script, re.MULTILINE):
            kept.pop(variable, None)
    if re.search(r"^#SBATCH --mem(-per-[cg]pu)?=", script, re.MULTILINE):  # they exclude each other
        for option in MEMORY:
            kept.pop(OVERRIDES[option], None)
    if "SLURM_JOB_ID" in kept:
        for name in list(kept):
            if name.startswith(("SLURM_", "SRUN_")) and name not in _KEPT_OF_AN_OUTER_JOB:
                del kept[name]
    return kept


def look(job: JobId) -> JobRecord | None:
    """Ask scontrol about a job, and sacct about one that it has forgotten; None if scontrol does not answer.

    Raises LaunchError if both have no word of the job (scontrol after MinJobAge of slurm.conf, 300 s by default).
    """
    try:
        done = call("scontrol", "--oneliner", *job.words[:-1], "show", "job", job.number)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if "Invalid job id" in done.stderr and (kept := _accounted(job)):
        return kept
    if "Invalid job id" in done.stderr:
        what = f"Slurm has forgotten job {job.number}: how it ended is not known"
        raise LaunchError(what, f"sacct -j {job.number} shows it, if the site keeps accounts")
    return None if done.returncode else parse(done.stdout)


def parse(record: str) -> JobRecord | None:
    """Read what ``scontrol --oneliner show job`` prints; None if it is something else.

    ``JobId=7 JobName=x UserId=… JobState=FAILED Reason=None … Restarts=0 … ExitCode=3:0 … PreemptTime=None …
    StdOut=/a/slurm-7.out Power=`` where ExitCode is the batch script's own, and the signal that ended it. PreemptTime
    is None again after a requeue.
    """
    state = re.search(r" JobState=(\S+) Reason=(\S+)", record)
    if state is None:
        return None
    name = state[1]
    code: int | None = None
    if name in _FINAL:
        ended = re.search(r" ExitCode=(\d+):(\d+)", record)
        preempted = re.search(r" PreemptTime=\d", record) is not None
        name, code = _ended(name, *((int(ended[1]), int(ended[2])) if ended else (0, 0)), preempted)
    restarts = re.search(r" Requeue=\d Restarts=(\d+)", record)
    log = re.search(r" StdOut=(.*?)(?: \w+=|$)", record, re.MULTILINE)
    errors = re.search(r" StdErr=(.*?)(?: \w+=|$)", record, re.MULTILINE)
    apart = errors[1] if log and errors and errors[1] != log[1] else None
    host = re.search(r" BatchHost=(\S+)", record)
    number = re.match(r"JobId=(\d+)", record)
    return JobRecord(
        name,
        state[2],
        code,
        log[1] if log else None,
        int(restarts[1]) if restarts else 0,
        apart,
        number[1] if number else "",
        host[1] if host else None,
    )


def _ended(name: str, own: int, signal: int, preempted: bool) -> tuple[str, int]:
    """The state of a job that has ended, and our exit code, by its script's ``own`` and the signal that ended that."""
    if name == "FAILED" and own == EXIT_SIGNAL + 15 and preempted:
        name = "PREEMPTED"  # it ended within its grace, so Slurm sees only a script that failed
    code = _FINAL[name][1]
    if name == "FAILED" and (own, signal) == (0, _LOG_SIGNAL):
        return _NO_LOG, EXIT_USAGE
    return name, own or (EXIT_SIGNAL + signal if signal else int(name == "FAILED")) if code is None else code


def _accounted(job: JobId) -> JobRecord | None:
    """What the site's accounts have of a job; None where there are none, or not its end."""
    words = ("sacct", *job.words[:-1], "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job.number)
    try:
        found = re.match(r"(\w+)[^|]*\|(\d+):(\d+)", call(*words).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found is None or found[1] not in _FINAL:
        return None
    name, code = _ended(found[1], int(found[2]), int(found[3]), preempted=False)
    return JobRecord(name, "None", code, None, number=job.number)


def tasks(job: JobId) -> list[JobRecord]:
    """The jobs of an array; none where Slurm does not answer or has forgotten them."""
    try:
        done = call("scontrol", "--oneliner", *job.words[:-1], "show", "job", job.number)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [each for each in map(parse, done.stdout.splitlines()) if each is not None]


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for Slurm's programs, without those of a job in whose shell we run."""
    return _environment("", environ)


def cancel(job: JobId, *, now: bool = False) -> None:
    """Cancel a job; ``now``: without SIGTERM and the time after it. What scancel prints goes to our stderr.

    Raises LaunchError if scancel failed.
    """
    steps: list[str] = []
    if now:  # scancel itself sends SIGTERM first, and SIGKILL after the site's KillWait
        listed = call("squeue", "--steps", "--noheader", "--format=%i", *job.words[:-1], f"--jobs={job.number}").stdout
        steps = re.findall(r"^\S+\.\d+$", listed, re.MULTILINE)
        for step in steps:
            subprocess.run(["scancel", "--signal=KILL", *job.words[:-1], step], stdin=subprocess.DEVNULL, check=False)
    done = subprocess.run(["scancel", *job.words], stdin=subprocess.DEVNULL, check=False)
    if done.returncode and not steps:  # else it may have ended already
        raise LaunchError(f"scancel did not cancel job {job.number} (exit code {done.returncode})")
