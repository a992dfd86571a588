"""Kubernetes as a batch scheduler: queries and cancels jobs, and runs commands in their pods.

The "number" of a job here is its name, with the kind before it unless that is Job: ``jobset/wine``. Its "cluster"
is its context and namespace.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, LaunchError, UsageError
from ddplaunch.cli import launcher_command
from ddplaunch.features.kubernetes import kubectl, objects
from ddplaunch.features.kubernetes.job_state import current_pods, describe_job, find_unexplained_pod, why_queued
from ddplaunch.features.kubernetes.kubectl import Call, CallFailed, Collection, Place, get
from ddplaunch.features.kubernetes.objects import EVENTS, JOBS, PODS, WORKLOADS, Job, Pod
from ddplaunch.features.kubernetes.pod_logs import PodLogs
from ddplaunch.features.manifest.pod_job import CONTAINER, JOB, NAME, NODE
from ddplaunch.system.schedulers.scheduler import (
    QUERY_TIMEOUT_S,
    BatchJobState,
    Deadline,
    JobId,
    LogSource,
    Scheduler,
    ended_state,
    side_by_side_command,
)
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

FIND_TIMEOUT_S = 3.0  # for a name that is not on record: it may not be a job at all
MANAGED = "app.kubernetes.io/managed-by"  # a label of all objects that ddplaunch creates


def split_job_number(number: str) -> tuple[str, str]:
    """Split the number of a job into kind and name: "wine" is a Job, "jobset/wine" a JobSet."""
    kind, slash, name = number.rpartition("/")
    return (kind, name) if slash else (JOB, number)


def job_number(kind: str, name: str) -> str:
    """Return the number of a job, its name in commands and messages: "wine" for a Job, "jobset/wine" for a JobSet."""
    return name if kind == JOB else f"{kind}/{name}"


class Kubernetes(Scheduler):
    """Kubernetes, through kubectl; queries many jobs at once with two requests for each namespace and kind of job."""

    title, submit_program, query_program, cancel_program = "Kubernetes", *[kubectl.PROGRAM] * 3
    history_hint = "it was deleted, by --ttl or by a user"
    missing_hint = "install kubectl: kubernetes.io/docs/tasks/tools"
    ping_command = "kubectl cluster-info"
    allows_overlapping_steps = True
    stderr_prefixes = ("command terminated with exit code", "error: ", "Error from server", "Unable to connect")
    step_failure_hint = "kubectl auth can-i create pods/exec shows whether you may run commands in pods"

    def __init__(self) -> None:
        self._alive: set[JobId] = set()  # jobs seen before their end: if one is gone later, it was deleted
        self._pods: dict[JobId, list[Pod]] = {}  # as last seen

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[BatchJobState]:
        return list(self._query(jobs, deadline))

    def _query(self, jobs: Sequence[JobId], deadline: Deadline) -> Iterator[BatchJobState]:
        groups: dict[tuple[Place, str], list[JobId]] = {}
        for job in jobs:
            groups.setdefault((Place.parse(job.cluster), split_job_number(job.number)[0]), []).append(job)
        calls = [(place, kind, of, _request_job_and_pods(place, kind, of)) for (place, kind), of in groups.items()]
        for place, kind, of, (job_call, pod_call) in calls:
            try:
                objects_by_name = {job.metadata.name: job for job in _decode_jobs(job_call.result(deadline.left), of)}
                pods = objects.decode_pods(pod_call.result(deadline.left))
            except CallFailed as error:
                pod_call.close()
                if error.error.reason == "NotFound" and len(of) == 1:
                    yield from self._gone(of[0])
                    continue
                yield from (_unknown_state(job, place, error) for job in of)
                continue
            except msgspec.DecodeError as error:
                yield from (_unknown_state(job, place, error) for job in of)
                continue
            of_name: dict[str, list[Pod]] = {}
            for pod in pods:
                of_name.setdefault((pod.metadata.labels or {}).get(objects.POD_LABELS[kind], ""), []).append(pod)
            for job in of:
                name = split_job_number(job.number)[1]
                if name in objects_by_name:
                    yield self._record_state(job, objects_by_name[name], _nodes(of_name.get(name, ())))
                else:
                    yield from self._gone(job)

    def query_one(self, job: JobId, seconds: float = QUERY_TIMEOUT_S) -> BatchJobState | None:
        """Query one job; if it waits, also query the events that show why."""
        place, (kind, name), deadline = Place.parse(job.cluster), split_job_number(job.number), Deadline(seconds)
        try:
            job_call, pod_call = _request_job_and_pods(place, kind, [job])
        except OSError:  # kubectl was removed
            return None
        try:
            job_object = objects.decode_job(job_call.result(deadline.left))
            pods = _nodes(objects.decode_pods(pod_call.result(deadline.left)))
        except CallFailed as error:
            pod_call.close()
            if error.error.reason == "NotFound":
                if gone := next(self._gone(job), None):
                    return gone
                raise self.forgotten_error(job) from None
            if error.error.reason in ("Forbidden", "Unauthorized"):
                what = f"cannot see job {job.text} in namespace {place.namespace}: {error.message}"
                raise LaunchError(
                    what, f"kubectl auth can-i get {JOBS[kind].plural},pods shows what you may do"
                ) from None
            return None
        except msgspec.DecodeError:
            return None
        state, ask = self._record_state(job, job_object, pods), partial(_try_get, place, deadline)
        if state.code and not any(pod.has_ended for pod in pods):  # the pods were listed before the job had failed
            data = ask(PODS, labelSelector=f"{objects.POD_LABELS[kind]}={name}")
            return self._record_state(job, job_object, _nodes(objects.decode_pods(data)) if data else pods)
        if not state.is_pending:
            return state
        if job_object.spec.is_suspended:
            data = ask(WORKLOADS, labelSelector=f"kueue.x-k8s.io/job-uid={job_object.metadata.uid}")
            return self._record_state(
                job, job_object, pods, queued=why_queued(objects.decode_workloads(data)) if data else ""
            )
        waits = find_unexplained_pod(pods)
        if not pods or waits:
            first = job_object.spec.replicated_jobs[0].name if job_object.spec.replicated_jobs else NODE
            of = waits.name if waits else name if kind in (JOB, "pytorchjob") else f"{name}-{first}-0"
            data = ask(EVENTS, fieldSelector=f"involvedObject.name={of}")
            return self._record_state(job, job_object, pods, objects.decode_events(data) if data else ())
        return state

    def _record_state(
        self, job: JobId, found: Job, pods: list[Pod], events: Sequence[objects.Event] = (), queued: str = ""
    ) -> BatchJobState:
        self._pods[job] = pods
        state = describe_job(found, pods, events, queued)
        if state.code is None:
            self._alive.add(job)
        return replace(state, job=job, number=job.number)

    def _gone(self, job: JobId) -> Iterator[BatchJobState]:
        """Yield the final state of a job that was deleted while it was watched; nothing for a job that was not seen."""
        self._pods[job] = []
        if job in self._alive:
            yield replace(ended_state(EXIT_SIGNAL + 15, "was deleted"), job=job, number=job.number)

    def find_pods(self, job: JobId) -> list[Pod]:
        """Return all pods of a job as last seen, the earliest first."""
        if job not in self._pods:
            with suppress(LaunchError):  # it was deleted
                self.query_one(job)
        return self._pods.get(job, [])

    def open_log(self, job: JobId, lines: int) -> LogSource:
        return PodLogs(Place.parse(job.cluster), job.text, lambda: self.find_pods(job), lines)

    def find_unrecorded_job(self, word: str) -> SubmittedJob | None:
        """Find a job that is not on record, by NAME or KIND/NAME, in the current context; None if there is none."""
        kind, name = split_job_number(word)
        if kind not in JOBS or not NAME.fullmatch(name):
            return None
        deadline = Deadline(FIND_TIMEOUT_S)
        try:
            place = kubectl.read_current_namespace(None, os.environ, deadline.left)
            job_call, pod_call = _request_job_and_pods(place, kind, [JobId(word)])
            job_call.result(deadline.left)
            pods = objects.decode_pods(pod_call.result(deadline.left))
        except (OSError, LaunchError, msgspec.DecodeError):
            return None
        args = next((pod.container.args or () for pod in pods), ())
        run_id = next((value for option, value in pairwise(args) if option == "--run-id"), "")
        return SubmittedJob(
            number=word, cluster=str(place), name=name, target="", nodes=1, array=None, cwd="", log="", run_id=run_id,
            python="python", image=None, moment=time.time(), scheduler="kubernetes", by_hand=True,
        )  # fmt: skip

    def cancel(self, job: JobId) -> None:
        """Delete a job and all objects that it owns; its pods get SIGTERM, and SIGKILL after their grace."""
        place, (kind, name) = Place.parse(job.cluster), split_job_number(job.number)
        path = JOBS[kind].path(place, name, propagationPolicy="Foreground")
        try:
            Call(place, "delete", "--raw", path).result(QUERY_TIMEOUT_S)
        except CallFailed as error:
            if not error.error.is_from_server:
                raise kubectl.unreachable_error(place, error.message) from None
            raise LaunchError(f"kubectl did not delete job {job.text}: {error.message}") from None
        except OSError as error:
            raise LaunchError(f"kubectl did not delete job {job.text}: {error.strerror}") from None
        self._alive.add(job)

    def step_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return a kubectl command that runs ``ddplaunch WORDS`` in a pod; ``everywhere``: a command for all pods."""
        pods, zero = self._running_pods(job, state)
        if not everywhere:
            return _exec_command(job, state, zero, words), os.environ
        return side_by_side_command(_exec_command(job, state, pod, words) for pod in pods), os.environ

    def interactive_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, terminal: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        _, pod = self._running_pods(job, state)
        options = ("--stdin", "--tty") if terminal else ("--stdin",)
        return _exec_command(job, state, pod, words, *options), os.environ

    def _running_pods(self, job: SubmittedJob, state: BatchJobState) -> tuple[list[Pod], Pod]:
        """Return the running pods, and that of ``state.host``, else the first one. Raises UsageError if none runs."""
        pods = [pod for pod in current_pods(self.find_pods(JobId(job.number, job.cluster))) if pod.is_running]
        if not pods:
            raise UsageError(f"job {job.number}: no pod runs", f"ddplaunch attach {job.number} waits for them")
        # Of the pod wine-0-x7k2p the host name is wine-0.
        of_host = (pod for pod in pods if state.host and state.host in (pod.name, pod.name.rpartition("-")[0]))
        return pods, next(of_host, pods[0])

    def file_copy_hint(self, state: BatchJobState) -> str:
        place = Place.parse(state.job.cluster if state.job else None)
        return f"{shlex.join([kubectl.PROGRAM, 'cp', *place.words])} {state.host}:FILE FILE"


def _exec_command(job: SubmittedJob, state: BatchJobState, pod: Pod, words: Sequence[str], *options: str) -> list[str]:
    """Return the command that runs ``ddplaunch WORDS`` in a pod.

    The run of a job that was not submitted here has an unknown name, but is the only run in the pod.
    """
    named = words if job.run_id else [word for word in words if word != f"{state.number}."]
    place, argv = Place.parse(job.cluster), [*launcher_command("python"), *named]
    return [kubectl.PROGRAM, "exec", *place.words, *options, pod.name, "--container", pod.container.name, "--", *argv]


def _request_job_and_pods(place: Place, kind: str, jobs: Sequence[JobId]) -> tuple[Call, Call]:
    """Start to read jobs of one kind and their pods: a single job by its name, several jobs by ddplaunch's label."""
    collection = JOBS[kind]
    if len(jobs) == 1:
        name = split_job_number(jobs[0].number)[1]
        pods = PODS.path(place, labelSelector=f"{objects.POD_LABELS[kind]}={name}")
        return get(place, collection.path(place, name)), get(place, pods)
    selector = f"{MANAGED}=ddplaunch"
    return get(place, collection.path(place, labelSelector=selector)), get(
        place, PODS.path(place, labelSelector=selector)
    )


def _decode_jobs(data: bytes, jobs: Sequence[JobId]) -> list[Job]:
    return [objects.decode_job(data)] if len(jobs) == 1 else objects.decode_jobs(data)


def _nodes(pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods in which ddplaunch runs; a job of Kubeflow may have other pods, which prepare data first."""
    return [
        pod
        for pod in pods
        if (pod.metadata.labels or {}).get(objects.REPLICATED_JOB, NODE) == NODE or pod.container.name == CONTAINER
    ]


def _unknown_state(job: JobId, place: Place, error: Exception) -> BatchJobState:
    """Return the state of a job whose API server did not answer."""
    where = f"context {place.context}" if place.context else "Kubernetes"
    return BatchJobState(f"is unknown: {where} does not answer: {error}", job=job, number=job.number)


def _try_get(place: Place, deadline: Deadline, collection: Collection, **query: str) -> bytes | None:
    """Read a list of objects that only helps to explain a state; None if it cannot or may not be read."""
    try:
        return get(place, collection.path(place, **query)).result(deadline.left)
    except (CallFailed, OSError):
        return None
