"""This machine as a scheduler: jobs wait their turn for GPUs or CPUs, and go on when the terminal is closed.

There is no daemon. ``submit`` starts a process for each job (``local_supervisor``), the launcher waits for what it
needs (``features/reservations``), and what ``ps`` shows is read from the folder of the job (``local_job``).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import click
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, LaunchError, UsageError, host_name
from ddplaunch.base.types import as_dict
from ddplaunch.cli import launcher_command
from ddplaunch.features.reservations.command_line import describe_wait, find_launcher
from ddplaunch.features.reservations.free_gpus import GpuNeed, parse_free_gpus
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.batch_scheduler import BatchScheduler
from ddplaunch.features.submit.local_job import (
    ONLY_INDEX,
    JobFolder,
    LocalJob,
    boot_id,
    find_job_folder,
    make_job_folder,
)
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import (
    BatchJobState,
    Deadline,
    JobId,
    array_indices,
    ended_state,
)
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

WAIT = "364d"
"""How long jobs wait for GPUs or CPUs: in practice without a limit."""

RUN_ID_MARK = "RUN-ID-OF-THIS-JOB"  # in the words of the command, until the script gets it from a variable
START_TIMEOUT_S = 20.0  # for the supervisor to start
EXIT_LOST = 1
_OTHERS = dict.fromkeys(
    ("gres", "cpus_per_task", "mem", "mem_per_gpu", "mem_per_cpu", "partition", "account", "qos", "constraint",
     "nodelist", "exclude", "exclusive", "reservation", "mail_type", "mail_user", "comment", "container_image",
     "container_mounts"),
    "leave it out: this machine is not divided",
)  # fmt: skip


class Local(BatchScheduler):
    """This machine as a scheduler."""

    title, submit_program, query_program, cancel_program = "this machine", "bash", "bash", "kill"
    list_command, history_hint = "ddplaunch ps", "its folder may have been removed"
    default_outputs = ("ddplaunch-%j.out", "ddplaunch-%A_%a.out")
    unsupported_options: Mapping[str, str] = {
        **_OTHERS,
        "error": "stderr is in the log",
        "dependency": "jobs start in the order in which they were submitted",
        "code": "commit, and submit from a work tree of that commit",
        "spares": "this machine is the only node",
        "requeue": "--max-restarts 3 restarts the ranks",
        "requeue_on": "--max-restarts 3 --restart-on restarts the ranks",
        **dict.fromkeys(("sbatch_args", "srun_args"), "it needs Slurm"),
    }

    def check_options(self, ctx: click.Context) -> None:
        nodes, gpus = ctx.params["nodes"], ctx.params["gpus_per_node"] or ctx.params["gpus_per_task"]
        if nodes != 1:
            raise UsageError(f"--nodes {nodes} does not work with --scheduler local", "this machine is one node")
        if gpus and not gpus.isdecimal():
            what = f"--gpus-per-node {gpus}: --scheduler local takes a number only"
            raise UsageError(what, f"--gpus-per-node {gpus.rpartition(':')[2]}, with CUDA_VISIBLE_DEVICES for a kind")
        if gpus and ctx.params["gpus"]:
            what = f"--gpus-per-node {gpus} and --gpus {ctx.params['gpus']} contradict each other"
            raise UsageError(what, "leave one of them out")
        count = int(gpus) if gpus else parse_free_gpus(ctx.params["gpus"])
        if count and not ctx.params["dry_run"]:
            GpuNeed(count, os.environ)

    def read_job(self, ctx: click.Context, target: str) -> BatchJob:
        job = super().read_job(ctx, target)
        return replace(job, command=(*_added_options(ctx, job), *job.command))

    def script_parts(self, job: BatchJob) -> Iterator[Iterable[str]]:
        words = job.command_line.replace(RUN_ID_MARK, '"$DDPLAUNCH_LOCAL_JOB"', 1)
        yield (
            "#!/bin/bash",
            "# Written by ddplaunch submit --scheduler local, which starts it with an index and a file for its end.",
            "index=$1 end_file=$2 launcher= stopped=",
            'trap \'stopped=1; [ -z "$launcher" ] || kill "$launcher" 2>/dev/null\' TERM',
            "finish() {",
            "  code=$?",
            *(f"  ({' ' * each.line.startswith('(')}{each.line})" for each in job.teardown),
            '  echo "$code" >"$end_file.new" && mv "$end_file.new" "$end_file"',
            "}",
            "trap finish EXIT",
            f"cd {shlex.quote(job.chdir)} || exit",
        )
        yield (each.line_or_exit for each in job.setup)
        yield job.grid_lines("$index")
        yield (
            f'[ -z "$stopped" ] || exit {EXIT_SIGNAL + signal.SIGTERM}',
            f"{shlex.join(launcher_command(job.interpreter))} \\",
            f"  run --cluster none {words} </dev/null &",
            "launcher=$!",
            '[ -z "$stopped" ] || kill "$launcher" 2>/dev/null',
            "# A signal interrupts wait; after the end it gives the exit code again.",
            'wait "$launcher"',
            'while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done',
            'wait "$launcher"',
            "exit $?",
        )

    def log_name(self, job: BatchJob) -> str:
        return self.output_pattern(job)

    def log_path(self, job: BatchJob, number: str) -> str:
        pattern = self.output_pattern(job).replace("%j", number).replace("%A", number)
        return os.path.join(job.chdir, pattern)

    def rejection_hint(self, error: str) -> str:
        return "--dry-run shows the script"

    def submit_script(self, job: BatchJob, script: str) -> JobId:
        """Start the process that runs the job, in a session of its own."""
        try:
            number, folder = make_job_folder({each.number for each in submitted_jobs.list_jobs()})
            indices, _, limit = (job.array or ONLY_INDEX).partition("%")
            submitted = LocalJob(
                number=number,
                indices=tuple(array_indices(indices)),
                is_array=job.array is not None,
                limit=int(limit) if limit else None,
                log=self.log_path(job, number),
                host=host_name(),
                boot=boot_id(),
            )
            for name, text in (("script", script), ("job.json", json.dumps(as_dict(submitted)))):
                with open(os.path.join(folder.path, name), "wb") as file:
                    file.write(os.fsencode(text))
            supervisor = os.path.join(os.path.dirname(__file__), "local_supervisor.py")
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor, folder.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            what = f"cannot submit the job: {error.filename or 'its folder'}: {error.strerror}"
            raise LaunchError(what, "a job has its records in ~/.local/state, or in $XDG_STATE_HOME") from None
        deadline = time.monotonic() + START_TIMEOUT_S
        while folder.read_supervisor() is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()  # it must not start after the error
                process.wait()
                raise LaunchError(f"the process of {number} did not start", f"its folder is {folder.path}")
            time.sleep(0.01)
        return JobId(number, index="" if job.array else None)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> Iterator[BatchJobState]:
        for which in jobs:
            folder = find_job_folder(which.number)
            if job := folder.read_job():
                for index in _indices(job, which):
                    yield _state_of(job, folder, index)

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        """The PID of the process that runs the job."""
        supervisor = find_job_folder(job.number).read_supervisor()
        return (str(supervisor.pid),) if supervisor else ()

    def cancel(self, job: JobId) -> None:
        """Stop the job, or an index of it, with SIGTERM; indices that have not started never start."""
        folder = find_job_folder(job.number)
        if (submitted := folder.read_job()) is None:
            raise self.forgotten_error(job)
        if not (indices := _indices(submitted, job)):
            raise self.forgotten_error(job)
        for index in indices:
            if folder.read_exit_code(index) is None:
                with open(folder.file(index, "cancel"), "wb"):
                    pass
        supervisor = folder.read_supervisor()
        if supervisor and supervisor.is_alive and not job.index:
            os.kill(supervisor.pid, signal.SIGTERM)
            return
        for index in indices:
            process = folder.read_script_process(index)
            name = JobId(job.number, index=index if submitted.is_array else None).text
            pid = process.pid if process and process.is_alive else find_launcher(name)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def step_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], dict[str, str]]:
        return [*launcher_command(job.python), *words], dict(os.environ)


def _added_options(ctx: click.Context, job: BatchJob) -> Iterator[str]:
    """Yield the options of ``run`` that do what a scheduler of a cluster does."""
    if not ctx.params["run_id"]:
        yield from ("--run-id", RUN_ID_MARK)
    gpus = ctx.params["gpus_per_node"] or ctx.params["gpus_per_task"]
    waits = ctx.params["jobs"] is not None
    if gpus and int(gpus):
        yield from ("--gpus", f"free:{gpus}")
        waits = True
    elif ctx.params["gpus"] is None:
        yield from ("--gpus", "none")
    elif parse_free_gpus(ctx.params["gpus"]):
        waits = True
    if not waits and ctx.params["gpus"] is None:
        yield from ("--jobs", "auto")
        waits = True
    if waits and ctx.params["wait"] is None:
        yield from ("--wait", WAIT)
    if job.seconds and ctx.params["timeout"] is None:
        yield from ("--timeout", str(job.seconds))


def _indices(job: LocalJob, which: JobId) -> list[str]:
    """Return the indices that an id names: all of the job, or one; none if the job has no such index."""
    return [index for index in job.indices if not which.index or index == which.index]


def _state_of(job: LocalJob, folder: JobFolder, index: str) -> BatchJobState:
    """Return the state of an index, from its files and processes."""
    which = JobId(job.number, index=index if job.is_array else None)
    state = _find_index_state(job, folder, index, which)
    log = job.log.replace("%a", index)
    return replace(state, job=which, number=which.text, log_path=log, host=job.host)


def _find_index_state(job: LocalJob, folder: JobFolder, index: str, which: JobId) -> BatchJobState:
    is_cancelled = folder.has_file(index, "cancel")
    if (code := folder.read_exit_code(index)) is not None:
        return _ended(code, is_cancelled=is_cancelled)
    if job.host != host_name():
        return BatchJobState(f"is on {job.host}", is_running=folder.has_file(index, "started"))
    if job.boot != boot_id():
        return ended_state(EXIT_LOST, "was lost when this machine restarted")
    process = folder.read_script_process(index) or folder.read_supervisor()
    if not (process and process.is_alive):
        if (code := folder.read_exit_code(index)) is not None:  # it has ended meanwhile
            return _ended(code, is_cancelled=is_cancelled)
        if find_launcher(which.text) is not None:
            return BatchJobState("is running, but its script was killed", is_running=True)
        return ended_state(EXIT_LOST, "was lost: its processes were killed")
    if folder.has_file(index, "started"):
        return BatchJobState("is running", is_running=True)
    if folder.read_script_process(index) is None:
        before = [each for each in job.indices[: job.indices.index(index)] if folder.read_exit_code(each) is None]
        what = f"waits behind {len(before)} of its array" if before else "is about to start"
        return BatchJobState(what, is_pending=True)
    return BatchJobState(describe_wait(which.text) or "is about to start", is_pending=True)


def _ended(code: int, *, is_cancelled: bool) -> BatchJobState:
    is_stopped = is_cancelled or code in (EXIT_SIGNAL + signal.SIGINT, EXIT_SIGNAL + signal.SIGTERM)
    return ended_state(code, "was cancelled" if is_stopped and code else "failed" if code else "completed")
