"""Slurm's own programs: submit a script, look at jobs, cancel one. Only this module reads what they print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE, LaunchError, UsageError
from ddplaunch.plan.command import python_command
from ddplaunch.queue import scheduler as programs
from ddplaunch.queue.scheduler import Deadline, JobId, Record, Told, call

if TYPE_CHECKING:
    from ddplaunch.queue.submitted import Submitted

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


def _words(state: str, reason: str, code: int | None, restarts: int, log: str | None) -> str:
    """What to say about a job, after "job 7"."""
    if state == "PENDING":
        waits = "was requeued and waits" if restarts else "waits"
        never = _NEVER.get(reason) or ("more than one job may have" if _PER_JOB.fullmatch(reason) else "")
        if never:
            return f"{waits}, and will never start: {reason} ({never})"
        return waits if reason == "None" else f"{waits}: {reason}"
    if state == _NO_LOG:
        return f"failed: Slurm could not open its log {log or ''} on the node (exit code {code})"
    if state in _FINAL:
        return f"{_FINAL[state][0]} (exit code {code})"
    again = f" again (restart {restarts})" if restarts and state == "RUNNING" else ""
    return f"is {state.lower().replace('_', ' ')}{again}"


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


def parse(record: str) -> Record | None:
    """Read what ``scontrol --oneliner show job`` prints; None if it is something else.

    ``JobId=7 JobName=x UserId=… JobState=FAILED Reason=None … Restarts=0 … ExitCode=3:0 … PreemptTime=None …
    StdOut=/a/slurm-7.out Power=`` where ExitCode is the batch script's own, and the signal that ended it. PreemptTime
    is None again after a requeue.
    """
    state = re.search(r" JobState=(\S+) Reason=(\S+)", record)
    if state is None:
        return None
    ended = re.search(r" ExitCode=(\d+):(\d+)", record)
    restarts = re.search(r" Requeue=\d Restarts=(\d+)", record)
    log = re.search(r" StdOut=(.*?)(?: \w+=|$)", record, re.MULTILINE)
    errors = re.search(r" StdErr=(.*?)(?: \w+=|$)", record, re.MULTILINE)
    host = re.search(r" BatchHost=(\S+)", record)
    number = re.match(r"JobId=(\d+)", record)
    return _record(
        state[1],
        state[2],
        (int(ended[1]), int(ended[2])) if ended else (0, 0),
        restarts=int(restarts[1]) if restarts else 0,
        preempted=re.search(r" PreemptTime=\d", record) is not None,
        number=number[1] if number else "",
        host=host[1] if host else None,
        log=log[1] if log else None,
        errors=errors[1] if log and errors and errors[1] != log[1] else None,
    )


def _record(
    name: str,
    reason: str,
    code: tuple[int, int],
    *,
    restarts: int = 0,
    preempted: bool = False,
    number: str,
    host: str | None = None,
    log: str | None = None,
    errors: str | None = None,
) -> Record:
    """What Slurm says of a job, by its state and its batch script's own exit code and signal."""
    state, ours = _ended(name, *code, preempted) if name in _FINAL else (name, None)
    words = _words(state, reason, ours, restarts, log)
    count = name.lower().replace("_", " ")
    return Record(
        words,
        ours,
        state == "PENDING",
        state == "RUNNING",
        state=count,
        number=number,
        host=host,
        log=log,
        errors=errors,
    )


_FIELDS = {
    "JobArrayID": 64, "JobID": 16, "State": 32, "Reason": 96, "exit_code": 16, "RestartCnt": 12, "BatchHost": 256,
    "PreemptTime": 24,
}  # fmt: skip
"""What squeue is asked for, and how wide each is: it puts nothing between them (squeue(1))."""


def listed(text: str) -> Iterator[tuple[str, Record]]:
    """Read what squeue prints of ``_FIELDS``: each job as people type it, and what is said of it."""
    for line in text.splitlines():
        row, begin = [], 0
        for width in _FIELDS.values():
            row.append(line[begin : begin + width].strip())
            begin += width
        typed, number, state, reason, code, restarts, host, preempted = row
        if not (number.isdecimal() and code.isdecimal()):
            continue
        signal = int(code) & 0x7F  # it is the status of wait(2)
        how = (0, signal) if signal else (int(code) >> 8, 0)
        again = int(restarts) if restarts.isdecimal() else 0
        late = preempted[:1].isdecimal()
        yield typed, _record(state, reason, how, restarts=again, preempted=late, number=number, host=host)


def _ended(name: str, own: int, signal: int, preempted: bool) -> tuple[str, int]:
    """The state of a job that has ended, and our exit code, by its script's ``own`` and the signal that ended that."""
    if name == "FAILED" and own == EXIT_SIGNAL + 15 and preempted:
        name = "PREEMPTED"  # it ended within its grace, so Slurm sees only a script that failed
    code = _FINAL[name][1]
    if name == "FAILED" and (own, signal) == (0, _LOG_SIGNAL):
        return _NO_LOG, EXIT_USAGE
    return name, own or (EXIT_SIGNAL + signal if signal else int(name == "FAILED")) if code is None else code


def _is_of(typed: str, job: JobId) -> bool:
    """Whether Slurm's 4711, 4711_2 or 4711_[3-5] is this job, or one of this array."""
    number, _, index = typed.partition("_")
    return typed == job.typed or (job.index == "" and number == job.number and index.isdecimal())


class Slurm(programs.Scheduler):
    """Slurm, by squeue for many jobs at once, and by scontrol, which knows more, for one."""

    system, submits, asks, cancels = "Slurm", "sbatch", "scontrol", "scancel"
    keeps = "sacct shows it, if the site keeps accounts"
    speaks = ("srun: ", "slurmstepd")
    refuses = "the site or its Slurm (before 20.11) may not allow srun --overlap; on the node itself ddplaunch works"

    def __init__(self) -> None:
        self._answers = False  # the last time

    def hand_in(self, script: str, environ: Mapping[str, str]) -> JobId:
        return submit(script, environ)

    def words(self, job: JobId) -> tuple[str, ...]:
        """Its number, behind the option for its cluster."""
        return ("-M", job.cluster, job.typed) if job.cluster else (job.typed,)

    def ask(self, jobs: Sequence[JobId], seconds: float) -> Told | None:
        deadline, told = Deadline(seconds), dict[JobId, list[Record]]()
        try:
            for cluster in dict.fromkeys(job.cluster for job in jobs):
                of = [job for job in jobs if job.cluster == cluster]
                where = ["-M", cluster] if cluster else []
                fields = ",".join(f"{name}:{width}" for name, width in _FIELDS.items())
                numbers = ",".join(job.typed for job in of)
                words = ("--noheader", "--array", "--states=all", f"--Format={fields}", f"--jobs={numbers}")
                done = deadline.call("squeue", *where, *words)
                if done.returncode and "Invalid job id" not in done.stderr:
                    return None
                self._sort(listed(done.stdout), of, told)
                if lost := [job for job in of if job not in told]:
                    self._sort(_accounted(where, lost, deadline), lost, told)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return told

    @staticmethod
    def _sort(found: Iterator[tuple[str, Record]], jobs: Sequence[JobId], told: dict[JobId, list[Record]]) -> None:
        for typed, record in found:
            for job in jobs:
                if _is_of(typed, job):
                    own = JobId(job.number, job.cluster, typed.partition("_")[2] or None)
                    told.setdefault(job, []).append(replace(record, job=own))

    def look(self, job: JobId, seconds: float = programs.PATIENCE) -> Record | None:
        """Ask scontrol, and sacct about a job that it has forgotten, after MinJobAge of slurm.conf (300 s)."""
        deadline, words = Deadline(seconds), self.words(job)
        if self.down(job.cluster):  # the question would take long
            return None
        self._answers = False
        try:
            done = deadline.call("scontrol", "--oneliner", *words[:-1], "show", "job", job.typed)
        except (OSError, subprocess.TimeoutExpired):
            return None
        self._answers = not done.returncode or "Invalid job id" in done.stderr
        if "Invalid job id" not in done.stderr:
            return None if done.returncode else parse(done.stdout)
        kept = next((record for typed, record in _accounted(words[:-1], [job], deadline) if typed == job.typed), None)
        if kept is None:
            raise self.forgotten(job)
        return kept

    def down(self, cluster: str | None = None) -> str | None:
        """What scontrol says at once of a controller that is down, for which other questions take long."""
        if self._answers:
            return None
        try:
            said = call("scontrol", *(["-M", cluster] if cluster else []), "ping", seconds=programs.SOON / 2).stdout
        except subprocess.TimeoutExpired:
            return "Slurm's controller does not answer"
        except OSError:
            return None
        if "is DOWN" in said and "is UP" not in said:
            return f"Slurm's controller is down: {said.splitlines()[0]}"
        return None

    def kill(self, job: JobId) -> None:
        """Cancel a job without SIGTERM and the time after it: scancel sends SIGKILL only after the site's KillWait."""
        words = self.words(job)
        shown = call("squeue", "--steps", "--noheader", "--format=%i", *words[:-1], f"--jobs={job.typed}").stdout
        steps = re.findall(r"^\S+\.\d+$", shown, re.MULTILINE)
        for step in steps:
            subprocess.run(["scancel", "--signal=KILL", *words[:-1], step], stdin=subprocess.DEVNULL, check=False)
        try:
            self.cancel(job)
        except LaunchError:
            if not steps:  # else it may have ended already
                raise

    def enter(
        self, job: Submitted, seen: Record, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], dict[str, str]]:
        """A step: with ``--overlap`` (srun(1), since Slurm 20.11) it shares what the job has, and waits for none."""
        if job.image:
            what = f"job {seen.number} runs in a container, which srun --overlap does not enter"
            raise UsageError(what, f"ddplaunch attach {seen.number} shows its log")
        count = job.nodes if everywhere else 1
        where = [] if everywhere or not seen.host else [f"--nodelist={seen.host}"]
        cluster = ["-M", job.cluster] if job.cluster else []
        counts = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        options = ["--overlap", f"--jobid={seen.number}", *counts, *where, f"--chdir={job.cwd}", "--input=none"]
        return ["srun", *cluster, *options, *python_command(job.python), *words], _environment("", os.environ)


def _accounted(where: Sequence[str], jobs: Sequence[JobId], deadline: Deadline) -> Iterator[tuple[str, Record]]:
    """What the site's accounts have of the ends of jobs; nothing where there are none."""
    numbers = ",".join(job.typed for job in jobs)
    try:
        text = deadline.call("sacct", *where, "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", numbers).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    for typed, state, own, signal in re.findall(r"(?m)^(\w+)\|(\w+)[^|]*\|(\d+):(\d+)", text):
        if state in _FINAL:
            yield typed, _record(state, "None", (int(own), int(signal)), number=typed)
