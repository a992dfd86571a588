"""Tests of what the objects of a job say about its state."""

import json

import pytest

from ddplaunch.features.kubernetes.job_state import describe_job, find_unexplained_pod, why_queued
from ddplaunch.features.kubernetes.objects import decode_events, decode_job, decode_pods, decode_workloads

IMAGE = "registry.example/wine:1"


def job(condition=None, *, reason=None, message=None, **spec):
    conditions = [{"type": condition, "status": "True", "reason": reason, "message": message}] if condition else None
    metadata = {"name": "wine", "uid": "1", "labels": spec.pop("labels", None)}
    metadata["deletionTimestamp"] = spec.pop("deleted", None)
    return decode_job(json.dumps({"metadata": metadata, "spec": spec, "status": {"conditions": conditions}}).encode())


def pod(index=0, state=None, *, name="", created="1", restarts=0, **status):
    state = {"running": {"startedAt": "x"}} if state is None else state
    container = {"name": "ddplaunch", "image": IMAGE}
    statuses = [{**container, "restartCount": restarts, "state": state}] if state else []
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name or f"wine-{index}-abcde", "labels": labels, "creationTimestamp": created}
    fields = {"phase": "Pending", "containerStatuses": statuses, **status}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": fields}


def test_a_pod_of_a_jobset_of_several_jobs_has_its_node_rank():
    first, later = pod(1, name="a"), pod(1, name="b")
    later["metadata"]["annotations"] = {"ddplaunch-first-node": "2"}
    assert [each.rank for each in pods(first, later)] == [1, 3]


def waits(reason, message=None, **more):
    return pod(more.pop("index", 0), {"waiting": {"reason": reason, "message": message}}, **more)


def ended(code, *, index=0, at="1", reason="Error", message="", **more):
    terminated = {"exitCode": code, "reason": reason, "finishedAt": at, "message": message}
    return pod(index, {"terminated": terminated}, phase="Failed" if code else "Succeeded", **more)


def pods(*found):
    return decode_pods(json.dumps({"items": found}).encode())


def events(*messages):
    fields = [{"type": "Warning", "reason": "Failed", "message": each, "lastTimestamp": "1"} for each in messages]
    return decode_events(json.dumps({"items": fields}).encode())


UNSCHEDULABLE = pod(
    0,
    {},
    conditions=[
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu. preemption: 0/8 nodes are available.",
        }
    ],
)
EVICTED = pod(0, {}, phase="Failed", reason="Evicted", message="The node was low on resource: memory.", name="old")
QUOTA = 'pods "wine-0" is forbidden: exceeded quota: compute, requested: requests.nvidia.com/gpu=8, limited: …=4'
PULL = 'Failed to pull image "registry.example/wine:1": rpc error: not found'

STATES = {
    "no pods yet": (job(), [], "waits for its pods"),
    "a node is missing": (job(), [UNSCHEDULABLE], "waits: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu"),
    "not yet on a node": (job(), [pod(0, {})], "waits for a node"),
    "the image is pulled": (job(), [waits("ContainerCreating")], "waits for its containers"),
    "a wrong image": (
        job(),
        [waits("ErrImagePull", "rpc error: not found")],
        f"waits: cannot pull image {IMAGE}: rpc error: not found",
    ),
    "a wrong image, later": (
        job(),
        [waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')],
        f"waits: cannot pull image {IMAGE}",
    ),
    "a wrong image, since 1.31": (
        job(),
        [waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: not found')],
        f"waits: cannot pull image {IMAGE}: ErrImagePull: not found",
    ),
    "a secret is missing": (
        job(),
        [waits("CreateContainerConfigError", 'secret "hf" not found')],
        'waits: CreateContainerConfigError: secret "hf" not found',
    ),
    "one of two pods waits": (
        job(),
        [pod(), {**UNSCHEDULABLE, "metadata": pod(1)["metadata"]}],
        "is running, but 1 of 2 pods waits: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu",
    ),
    "node 0 waits": (job(), [pod(1), waits("ContainerCreating")], "waits for its containers"),
    "all run": (job(), [pod(), pod(1)], "is running"),
    "evicted, and not there again": (job(), [EVICTED], "waits to start again after exit code 69 of pod old"),
    "started again": (job(), [EVICTED, pod(created="2")], "is running again (restart 1)"),
    "restarted by the kubelet": (job(), [pod(restarts=2)], "is running again (restart 2)"),
    "waits again": (
        job(),
        [EVICTED, waits("ContainerCreating", created="2")],
        "was restarted, and waits for its containers",
    ),
    "the pods have ended": (job(), [ended(0)], "is ending"),
    "suspended": (job(suspend=True), [], "waits: it is suspended"),
    "a suspended PyTorchJob": (job(runPolicy={"suspend": True}), [], "waits: it is suspended"),
    "in Kueue": (
        job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "gpus"}),
        [],
        "waits in Kueue's queue gpus",
    ),
    "deleted": (job(deleted="2026"), [pod()], "is being deleted"),
    "completed": (job("Complete"), [ended(0)], "completed (exit code 0)"),
    "a JobSet completed": (job("Completed"), [], "completed (exit code 0)"),
    "a PyTorchJob completed": (job("Succeeded"), [], "completed (exit code 0)"),
    "node 0 names the code": (job("Failed"), [ended(3), ended(143, index=1, at="0")], "failed (exit code 3)"),
    "node 0 survived": (
        job("Failed"),
        [ended(0), ended(9, index=1, at="2"), ended(7, index=2, at="1")],
        "failed (exit code 7)",
    ),
    "out of memory": (job("Failed"), [ended(137, reason="OOMKilled")], "used more memory than it had (exit code 137)"),
    "time limit": (
        job("Failed", reason="DeadlineExceeded"),
        [ended(143)],
        "reached its time limit (exit code 143)",
    ),
    "without its pods": (
        job("Failed", message="Container ddplaunch for pod default/wine-0 failed with exit code 3 matching FailJob"),
        [],
        "failed (exit code 3)",
    ),
    "without anything": (job("Failed", reason="BackoffLimitExceeded"), [], "failed: BackoffLimitExceeded"),
    "evicted for good": (job("Failed"), [EVICTED], "failed: its pod was evicted (exit code 69)"),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    found, its_pods, words = STATES[name]
    state = describe_job(found, pods(*its_pods))
    assert state.description == words
    assert (state.code is not None) == (found.condition("Complete", "Completed", "Succeeded", "Failed") is not None)
    assert state.is_running == words.startswith("is running")
    assert state.is_pending == ("waits" in words and not state.is_running)


def test_events_say_why():
    """Where the pods do not: a quota, a volume, a pull of which only the back-off is left."""
    assert describe_job(job(), (), events(QUOTA)).description == f"waits: cannot create its pods: {QUOTA}"
    mount = 'MountVolume.SetUp failed for volume "m": secret "keys" not found'
    creating = pods(waits("ContainerCreating"))
    assert describe_job(job(), creating, events(mount)).description == f"waits: Failed: {mount}"
    backing_off = pods(waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"'))
    assert describe_job(job(), backing_off, events("x", PULL)).description.endswith(f"{IMAGE}: rpc error: not found")
    assert find_unexplained_pod(creating) is creating[0]
    assert find_unexplained_pod(pods(UNSCHEDULABLE)) is None
    assert find_unexplained_pod(pods(pod())) is None


def test_kueue_says_why():
    why = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": why}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [condition]}}
    queued = why_queued(decode_workloads(json.dumps({"items": [workload]}).encode()))
    found = job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    assert describe_job(found, (), queued=queued).description == f"waits in Kueue's queue gpus: {why}"
    assert why_queued([]) == ""


def test_what_a_failed_rank_printed_last():
    """The kubelet keeps the end of the log of a container that failed."""
    state = describe_job(job("Failed"), pods(ended(3, message="rank 1 exited with code 3\n")))
    assert (state.code, state.host, state.last_lines) == (3, "wine-0-abcde", "rank 1 exited with code 3")
