"""Variables that number nodes and have several sources: Kubernetes operators, platforms, users' own scripts."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import parse
from ddplaunch.system.clusters.cluster_env import ClusterEnv, DetectionPriority, register_system
from ddplaunch.system.clusters.env_builders import env_for_node, env_from_node_variables
from ddplaunch.system.clusters.env_variables import IGNORE_HINT, EnvVariables, parse_number
from ddplaunch.system.plan.numbers import parse_int


@register_system("kubeflow", "PET_NNODES", "KUBERNETES_SERVICE_HOST", priority=DetectionPriority.COMMON)
def kubeflow(environ: EnvVariables) -> ClusterEnv | None:
    """Kubeflow: a pod of a TrainJob (PET_*, as torchrun's options) or of a PyTorchJob (RANK; PET_* in newer ones).

    A PyTorchJob's RANK is the pod's index, not a process's, and WORLD_SIZE counts pods or processes, by version. A
    missing LOCAL_RANK shows that no process is meant. KUBERNETES_SERVICE_HOST is set in every pod.
    """
    if environ.is_set("PET_NNODES"):
        lowest, colon, highest = environ["PET_NNODES"].partition(":")  # 2, or 1:3 where the job is elastic
        if colon and lowest != highest:
            what = f"PET_NNODES={environ['PET_NNODES']}: the pods of an elastic job do not know their node rank"
            raise UsageError(what, IGNORE_HINT)
        count, count_name = parse_number(lowest, "PET_NNODES"), "PET_NNODES"
        newer = (("PET_NODE_RANK", "RANK"), ("PET_MASTER_ADDR", "MASTER_ADDR"), ("PET_MASTER_PORT", "MASTER_PORT"))
        index, address, port = (new if environ.is_set(new) else old for new, old in newer)
    elif environ.is_set("RANK", "WORLD_SIZE", "MASTER_ADDR") and not environ.is_set("LOCAL_RANK"):
        count, count_name = environ.number("WORLD_SIZE"), "WORLD_SIZE"
        index, address, port = "RANK", "MASTER_ADDR", "MASTER_PORT"
    else:
        return None
    return env_from_node_variables(
        "kubeflow",
        environ,
        count_name,
        index,
        address,
        port,
        count=count,
        nproc="PET_NPROC_PER_NODE",
        run_id=environ.get("PET_RDZV_ID") or None,
        address_may_be_unknown=True,
    )


@register_system("pai", "NPROC_PER_NODE", priority=DetectionPriority.COMMON)
def pai(environ: EnvVariables) -> ClusterEnv | None:
    """PAI DLC of Alibaba Cloud, and AIHC of Baidu: a node of a PyTorch job.

    RANK and WORLD_SIZE count nodes there; NPROC_PER_NODE is the GPUs of a node ("General environment variables" in
    the manuals: alibabacloud.com/help/en/pai/general-environment-variables, cloud.baidu.com/doc/AIHC/s/mm346i20k).
    """
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR")
    if not environ.is_set(*names) or environ.is_set("LOCAL_RANK"):
        return None
    return env_from_node_variables(
        "pai", environ, *names, "MASTER_PORT", nproc="NPROC_PER_NODE", address_may_be_unknown=True
    )


@register_system("nodes", "NNODES", "NUM_NODES", "NODE_COUNT", priority=DetectionPriority.COMMON)
def generic_nodes(environ: EnvVariables) -> ClusterEnv | None:
    """NNODES, NODE_RANK and MASTER_ADDR, as users and platforms set them for scripts that pass them to torchrun.

    LLaMA-Factory and ms-swift document them for their users; NUM_NODES is set by RunPod and others, NODE_COUNT by
    jobs of Oracle's Data Science (oracle/accelerated-data-science, ads/jobs). The names leave no doubt that nodes are
    counted. Raises UsageError if NODE_RANK is missing, a variable is not a number, or contradicts another.
    """
    counts = ("NNODES", "NUM_NODES", "NODE_COUNT")
    if not environ.is_set("MASTER_ADDR") or environ.consistent_number(*counts) < 2:
        return None
    count = next(name for name in counts if environ.is_set(name))
    if not environ.is_set("NODE_RANK") and environ.is_set("RANK") and not environ.is_set("LOCAL_RANK"):
        settings = ", ".join(f"{name}={sanitize_line(environ[name])}" for name in (count, "RANK", "MASTER_ADDR"))
        words = f'--nnodes "${count}" --node-rank "$RANK" --master-addr "$MASTER_ADDR"'
        raise UsageError(
            f"{settings}: this may be one node of several, but NODE_RANK is not set",
            f"if RANK numbers the nodes: ddplaunch run {words} …\n{IGNORE_HINT}",
        )
    return env_from_node_variables(
        "nodes", environ, count, "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", nproc="NPROC_PER_NODE"
    )


ROLES = ("chief", "master", "worker", "workerpool0", "workerpool1")
"""The task types of TF_CONFIG, in the order of their ranks."""


@register_system("tfconfig", "TF_CONFIG", "CLUSTER_SPEC", priority=DetectionPriority.COMMON)
def tfconfig(environ: EnvVariables) -> ClusterEnv | None:
    """TF_CONFIG, and Vertex AI's CLUSTER_SPEC: a job's nodes as one JSON object, which other frameworks get too.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

    Formats: tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver, and
    cloud.google.com/vertex-ai/docs/training/distributed-training, where the third worker pool has parameter servers and
    the fourth evaluates. Neither has ranks.

    Raises UsageError if it is not such an object, or this node is not one of those that have ranks.
    """
    for name in ("CLUSTER_SPEC", "TF_CONFIG"):
        cluster, role, index = _cluster_spec(name, environ[name]) if environ.get(name) else ({}, "", 0)
        if not cluster:
            continue
        hosts = [(each, place, host) for each in ROLES for place, host in enumerate(cluster.get(each, []))]
        node_rank = next((i for i, (each, place, _) in enumerate(hosts) if (each, place) == (role, index)), None)
        if node_rank is None:
            what = f"{name}: this is {role} {index}, not one of the {len(hosts)} nodes of {', '.join(ROLES)}"
            raise UsageError(what, f"start ddplaunch on those alone; {IGNORE_HINT}")
        address, _, port = hosts[0][-1].rpartition(":")
        node = env_for_node(
            "tfconfig", (name,), len(hosts), node_rank, address.strip("[]"), address_may_be_unknown=True
        )
        return replace(node, port=int(port))
    return None


class _TaskInSpec(Struct):
    type: str
    index: int | float | str  # 1, 1.0 or "1"


class _ClusterSpec(Struct):
    """The JSON object in TF_CONFIG or CLUSTER_SPEC; ``cluster`` has the hosts of each role, with their ports."""

    cluster: dict[str, list[str]] = {}
    task: _TaskInSpec | None = None


def _cluster_spec(name: str, written: str) -> tuple[dict[str, list[str]], str, int]:
    """Return the hosts of each role, the role of this node, and its index among the hosts of this role."""
    try:
        spec = parse(written, _ClusterSpec)
        if not spec.cluster:
            return {}, "", 0
        index = parse_int(str(spec.task.index).removesuffix(".0")) if spec.task else None
        hosts = [host.rpartition(":") for each in spec.cluster.values() for host in each]
        if spec.task and index is not None and all(address and port.isdecimal() for address, _, port in hosts):
            return spec.cluster, spec.task.type, index
    except ProtocolError:
        pass
    what = f"{name}={sanitize_line(written[:80])} does not describe a cluster and this node's task in it"
    raise UsageError(what, IGNORE_HINT)
