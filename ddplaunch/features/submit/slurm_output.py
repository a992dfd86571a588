"""Parsers for the output of scontrol, squeue and sacct: job states, descriptions and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId, ended_state

_FINAL_STATES: dict[str, tuple[str, int | None]] = {
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
"""The final states of a job (squeue(1), JOB STATE CODES): description, and the exit code that ddplaunch returns.

None: the exit code of the batch script. If Slurm ended the job, that is not meaningful; it got SIGTERM.
"""


_LOG_OPEN_SIGNAL = 53  # the signal that scontrol shows for a job whose log slurmd could not open
_BLOCKING_REASONS = {
    "PartitionNodeLimit": "the job asks for more nodes than the partition allows or has up",
    "PartitionTimeLimit": "the job asks for more time than the partition allows",
    "PartitionConfig": "no node of the partition has what the job asks for, such as its CPUs or memory",
    "BadConstraints": "no node has what the job asks for",
    "DependencyNeverSatisfied": "the job that it waits for did not end as required",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the partition does not allow the QOS",
    "JobHeldUser": "you hold it: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
}
"""Reasons for which a job never starts (Slurm's page "Job Reason Codes"), besides ``_PER_JOB``."""

_PER_JOB = re.compile(r"(Assoc|QOS)Max\w+PerJob(Limit)?|QOSMin\w+")
"""Limits of an account or a QOS that this job alone exceeds, like QOSMaxNodePerJobLimit."""


def parse_scontrol(text: str) -> BatchJobState | None:
    """Parse ``scontrol --oneliner show job``; None if the text is something else.

    ``JobId=7 JobName=x UserId=… JobState=FAILED Reason=None … Restarts=0 … ExitCode=3:0 … PreemptTime=None …
    StdOut=/a/slurm-7.out Power=`` where ExitCode is the batch script's own, and the signal that ended it. PreemptTime
    is None again after a requeue. Of an array it shows all tasks, and the first counts: ``JobId=8 ArrayJobId=7
    ArrayTaskId=0 JobName=x …``.
    """

    def search(pattern: str) -> str | None:
        match = re.search(pattern, text, re.MULTILINE)
        return match[1] if match else None

    state = search(r" JobState=(\S+) Reason=\S+")
    if state is None:
        return None
    own, _, signal = (search(r" ExitCode=(\d+:\d+)") or "0:0").partition(":")
    log, errors = (search(rf" {name}=(.*?)(?: \w+=|$)") for name in ("StdOut", "StdErr"))
    restarts = int(search(r" Requeue=\d Restarts=(\d+)") or 0)
    preempted = search(r" PreemptTime=(\d)") is not None
    array, index = search(r"^JobId=\d+ ArrayJobId=(\d+)"), search(r"^JobId=\d+ .*?ArrayTaskId=(\S+)")
    return replace(
        _make_state(state, search(r" Reason=(\S+)") or "", int(own), int(signal), restarts, preempted, log),
        job=JobId(array, None, index) if array and index else None,
        number=search(r"^JobId=(\d+)") or "",
        host=search(r" BatchHost=(\S+)"),
        log_path=log,
        stderr_path=errors if log and errors != log else None,
    )


_FIELDS = {
    "JobArrayID": 64, "JobID": 16, "State": 32, "Reason": 96, "exit_code": 16, "RestartCnt": 12, "BatchHost": 256,
    "PreemptTime": 24,
}  # fmt: skip
"""The fields that squeue prints, and their widths: it puts nothing between them (squeue(1))."""

FIELDS = ",".join(f"{name}:{width}" for name, width in _FIELDS.items())


def parse_squeue(text: str, cluster: str | None = None) -> Iterator[BatchJobState]:
    """Parse the output of squeue with ``FIELDS``."""
    for line in text.splitlines():
        row, begin = [], 0
        for width in _FIELDS.values():
            row.append(line[begin : begin + width].strip())
            begin += width
        array_id, number, state, reason, code, restarts, host, preempted = row
        if not (number.isdecimal() and code.isdecimal()):
            continue
        signal = int(code) & 0x7F  # a wait status, as of wait(2)
        own = 0 if signal else int(code) >> 8
        again = int(restarts) if restarts.isdecimal() else 0
        record = _make_state(state, reason, own, signal, again, preempted[:1].isdecimal())
        yield replace(record, job=_parse_id(array_id, cluster), number=number, host=host)


def parse_sacct(text: str, cluster: str | None = None) -> Iterator[BatchJobState]:
    """Parse JobID, State and ExitCode, printed by ``sacct -P``, of jobs that have ended."""
    for job_id, state, own, signal in re.findall(r"(?m)^(\w+)\|(\w+)[^|]*\|(\d+):(\d+)", text):
        if state in _FINAL_STATES:
            record = _make_state(state, "None", int(own), int(signal))
            yield replace(record, job=_parse_id(job_id, cluster), number=job_id)


def _parse_id(text: str, cluster: str | None) -> JobId:
    number, _, index = text.partition("_")
    return JobId(number, cluster, index or None)


def _make_state(
    state: str, reason: str, own: int, signal: int, restarts: int = 0, preempted: bool = False, log: str | None = None
) -> BatchJobState:
    """Build the state of a job; ``own`` and ``signal``: exit code and signal of its batch script."""
    if state in _FINAL_STATES:
        return _end(state, own, signal, preempted, log)
    word = state.lower().replace("_", " ")
    if state != "PENDING":
        again = f" again (restart {restarts})" if restarts and state == "RUNNING" else ""
        return BatchJobState(f"is {word}{again}", is_running=state == "RUNNING", state=word)
    words = "was requeued and waits" if restarts else "waits"
    if never := _BLOCKING_REASONS.get(reason) or ("the job alone exceeds it" if _PER_JOB.fullmatch(reason) else ""):
        words += f", and will never start: {reason} ({never})"
    elif reason != "None":
        words += f": {reason}"
    return BatchJobState(words, is_pending=True, state=word)


def _end(state: str, own: int, signal: int, preempted: bool, log: str | None) -> BatchJobState:
    if state == "FAILED" and (own, signal) == (0, _LOG_OPEN_SIGNAL):
        return ended_state(EXIT_USAGE, f"failed: Slurm could not open its log {log or ''} on the node")
    if state == "FAILED" and own == EXIT_SIGNAL + 15 and preempted:
        state = "PREEMPTED"  # it ended within its grace, so Slurm reports only a failed script
    how, code = _FINAL_STATES[state]
    if code is None:
        code = own or (EXIT_SIGNAL + signal if signal else int(state == "FAILED"))
    return ended_state(code, how)
