"""Finds the state of a job in its Kubernetes objects: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, EXIT_UNAVAILABLE, sanitize_line
from ddplaunch.features.kubernetes.objects import QUEUE, Event, Job, Pod, Workload
from ddplaunch.system.schedulers.scheduler import BatchJobState, ended_state

_SUCCESS = ("Complete", "Completed", "Succeeded")  # of a Job and a TrainJob, a JobSet, a PyTorchJob
_CANNOT_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_STARTING = ("ContainerCreating", "PodInitializing")
_BACK_OFF = re.compile(r"Back-off pulling image (\"[^\"]*\"|\S+?)(: |$)")


def current_pods(pods: Iterable[Pod]) -> list[Pod]:
    """Return the latest pod of each node rank, sorted by node rank; ``pods`` must have the earliest first."""
    latest = {pod.rank: pod for pod in pods}
    return [latest[rank] for rank in sorted(latest)]


def describe_job(job: Job, pods: Sequence[Pod], events: Sequence[Event] = (), queued: str = "") -> BatchJobState:
    """Return the state of a job.

    Args:
        pods: all pods that the job has or had, the earliest first.
        events: of the pod for which the job waits, or of the job if it has no pods; the latest first.
        queued: why Kueue does not admit the job yet.
    """
    if job.condition(*_SUCCESS):
        return ended_state(0, "completed")
    if failed := job.condition("Failed"):
        return _failed(failed.reason, failed.message, pods)
    if job.metadata.deletion_timestamp:
        return BatchJobState("is being deleted", state="deleting")
    if job.spec.is_suspended:
        return _pending(_why_suspended(job, queued))
    current = current_pods(pods)
    if not current:
        why = next((_first_sentence(each.message) for each in events if each.type == "Warning"), "")
        return _pending(f"cannot create its pods: {why}" if why else "for its pods")
    zero, waiting = current[0], [pod for pod in current if not pod.is_running and not pod.has_ended]
    started_again = max(0, sum(pod.rank == zero.rank for pod in pods) - 1) + zero.container_status.restart_count
    again = f" again (restart {started_again})" if started_again else ""
    if zero.is_running:
        words = f"is running{again}"
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            words += (
                f", but {len(waiting)} of {len(current)} pods {_join_reason(verb, why_waiting(waiting[0], events))}"
            )
        return BatchJobState(words, is_running=True, state="running", host=zero.name)
    if waiting:
        return _pending(why_waiting(waiting[0], events), "was restarted, and waits" if again else "waits")
    ended = next((pod for pod in current if pod.has_ended and exit_code(pod)), None)
    if ended:
        return _pending(f"to start again after exit code {exit_code(ended)} of pod {ended.name}")
    return BatchJobState("is ending", state="ending", host=zero.name)


def find_unexplained_pod(pods: Sequence[Pod]) -> Pod | None:
    """Return the first waiting pod if only its events can show why it waits; None if its status does, or none waits."""
    waiting = [pod for pod in current_pods(pods) if not pod.is_running and not pod.has_ended]
    return next((pod for pod in waiting[:1] if why_waiting(pod) in ("for its containers", "for a node")), None)


def why_waiting(pod: Pod, events: Sequence[Event] = ()) -> str:
    """Return why a pod does not run yet, in words that can follow "waits: "."""
    statuses = [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]
    images = {each.name: each.image for each in pod.spec.containers}
    for status in statuses:
        if (wait := status.state.waiting) is None or not wait.reason:
            continue
        if wait.reason in _CANNOT_PULL:
            image = images.get(status.name) or status.image
            cause = _BACK_OFF.sub("", wait.message or "") or next(filter(None, map(_pull_error, events)), "")
            return f"cannot pull image {image}" + (f": {_one_line(cause)}" if cause else "")
        if wait.reason not in _STARTING:
            return f"{wait.reason}: {_one_line(wait.message)}" if wait.message else wait.reason
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False":
        return _first_sentence(scheduled.message) or scheduled.reason or "for a node"
    if warning := next((each for each in events if each.type == "Warning" and each.message), None):
        return f"{warning.reason}: {_one_line(warning.message)}"
    return "for its containers" if statuses or scheduled else "for a node"


def _pull_error(event: Event) -> str:
    """Return the registry's error message from an event "Failed to pull image"; "" for other events."""
    found = re.match(r"Failed to pull image \"[^\"]*\": (.*)", event.message or "", re.DOTALL)
    return found[1] if found else ""


def exit_code(pod: Pod) -> int:
    """Return the exit code of a pod that has ended; if it was evicted without one, the code for a lost node."""
    if pod.terminated:
        return pod.terminated.exit_code
    return EXIT_UNAVAILABLE if pod.status.phase == "Failed" else 0


def _failed(reason: str | None, message: str | None, pods: Sequence[Pod]) -> BatchJobState:
    if reason == "DeadlineExceeded":
        return ended_state(EXIT_SIGNAL + 15, "reached its time limit")
    current = current_pods(pods)
    ended = sorted(current, key=lambda pod: (pod.terminated.finished_at or "") if pod.terminated else "~")
    first = next((pod for pod in [*current[:1], *ended] if exit_code(pod)), None)
    if first is None:  # the pods are gone; the message of the failed job has the exit code
        found = re.search(r"exit code (\d+)", message or "")
        state = ended_state(int(found[1]) if found else 1, "failed")
        return state if found else replace(state, description=f"failed: {_one_line(message or reason or '')}")
    if first.terminated and first.terminated.reason == "OOMKilled":
        how = "used more memory than it had"
    else:
        how = f"failed: its pod was {first.status.reason.lower()}" if first.status.reason else "failed"
    return replace(ended_state(exit_code(first), how), host=first.name, last_lines=_message(first))


def _message(pod: Pod) -> str:
    """Return the last output of a pod's failed container, of which the kubelet keeps up to 2 KiB."""
    return (pod.terminated.message or "").strip() if pod.terminated else ""


def _pending(why: str, words: str = "waits") -> BatchJobState:
    return BatchJobState(_join_reason(words, why), is_pending=True, state="pending")


def _join_reason(words: str, why: str) -> str:
    """Join a verb and a reason: "waits for its pods", "waits: cannot pull image X"."""
    return f"{words} {why}" if why.startswith(("for ", "to ", "in ")) else f"{words}: {why}"


def _why_suspended(job: Job, queued: str) -> str:
    queue = (job.metadata.labels or {}).get(QUEUE)
    if not queue:
        return "it is suspended"
    return f"in Kueue's queue {queue}" + (f": {_one_line(queued)}" if queued else "")


def why_queued(workloads: Iterable[Workload]) -> str:
    """Return why Kueue does not admit a job, from the job's Workloads; "" if that is not known."""
    conditions = (each for workload in workloads for each in workload.status.conditions or ())
    reserved = (each.message for each in conditions if each.type == "QuotaReserved" and each.status == "False")
    return next(filter(None, reserved), "")


def _first_sentence(text: str | None) -> str:
    """Return the first sentence, without the part about preemption: "0/8 nodes are available: 8 Insufficient cpu"."""
    return re.split(r"\.?\s+preemption: |\. ", _one_line(text), maxsplit=1)[0].rstrip(".")


def _one_line(text: str | None) -> str:
    return sanitize_line(" ".join((text or "").split()), 300)
