"""The jobs of this user that run on this machine, by their control sockets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ddplaunch.base.errors import host_name
from ddplaunch.base.local_sockets import is_private_dir
from ddplaunch.core.control_socket.socket_dir import MAX_NAME_BYTES, list_sockets
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord, RunState


class RunningJob(NamedTuple):
    """A job of this user that runs on this machine."""

    path: str  # the path of the job's control socket
    run_id: str  # the first 40 bytes of the run id, from the name of the control socket
    pid: int  # the launcher's

    @property
    def created_at(self) -> float:
        """When the job's control socket was created, in seconds since the epoch; 0 if it is gone."""
        try:
            return os.stat(self.path).st_mtime
        except OSError:
            return 0.0


def job_at(path: str) -> RunningJob:
    """Return the job whose control socket is, or was, at ``path``."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    return RunningJob(path, run_id, int(pid))


def list_running() -> list[RunningJob]:
    """List the jobs of this user that run on this machine; their launchers may be suspended.

    Also those that only the history knows: the folder of a socket depends on the launcher's variables.
    """
    jobs = [job_at(path) for path in list_sockets()]
    pids = {job.pid for job in jobs}
    for record in history_store.read_heads_of_local_launchers():
        path = record.control_socket or ""
        # A path as job_at reads it, in a folder like those where sockets are looked for.
        if record.pid not in pids and path.endswith(f".{record.pid}") and is_private_dir(os.path.dirname(path)):
            jobs += [job_at(path)] if os.path.exists(path) else []
    return jobs


def find_record(job: RunningJob, names: Iterable[str] | None = None) -> RunRecord | None:
    """Find the record of a job, which may have ended since, among these runs of the history; None is all of them."""
    for name in history_store.list_runs() if names is None else names:
        if _may_be_run_of(job, name) and any(
            _is_record_of(job, each) for each in history_store.read_node_records(name)
        ):
            return history_store.read_run_record(name)
    return None


def _may_be_run_of(job: RunningJob, name: str) -> bool:
    """Whether a recorded run may be the job's: the job's control socket may have only the start of the run id."""
    is_cut = len(job.run_id.encode()) > MAX_NAME_BYTES - 4  # within the last letter
    return name.startswith(job.run_id if is_cut else f"{job.run_id}.") or name == job.run_id


def _is_record_of(job: RunningJob, record: RunRecord) -> bool:
    """Whether a run record is the record of the job, which runs or has just ended."""
    is_launcher = (record.pid, record.host) == (job.pid, host_name())
    return is_launcher and (record.fate is RunState.RUNNING or (record.ended or 0) > job.created_at)
