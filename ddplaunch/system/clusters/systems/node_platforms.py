"""Platforms that number a job's nodes in variables of their own: a function each, or a row of a table if that suffices.

Each says where its variables are documented.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.base.types import Count, parse
from ddplaunch.system.clusters.cluster_env import ClusterEnv, DetectionPriority, register_system
from ddplaunch.system.clusters.env_builders import (
    env_for_array_task,
    env_for_node,
    env_from_node_variables,
    missing_address_error,
    outgoing_address,
)
from ddplaunch.system.clusters.env_variables import IGNORE_HINT, EnvVariables, check_below, contradiction_error


@register_system("skypilot", "SKYPILOT_NODE_IPS", priority=DetectionPriority.NODE)
def skypilot(environ: EnvVariables) -> ClusterEnv | None:
    """SkyPilot: a node of a task; it starts the same commands on all of them."""
    ips, node_rank_name, nnodes_name = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"
    addresses = environ[ips].split()  # one a line, node 0's first
    nnodes = environ.optional_number(nnodes_name)
    if nnodes not in (None, len(addresses)):
        raise contradiction_error(f"{nnodes_name}={nnodes}", f"{ips}={','.join(addresses)} (nodes: {len(addresses)})")
    node_rank = environ.number(node_rank_name)
    check_below(node_rank, len(addresses), node_rank_name, f"addresses in {ips}")
    gpus = environ.optional_number("SKYPILOT_NUM_GPUS_PER_NODE")
    task = environ.get("SKYPILOT_TASK_ID") or None  # sky-2024-05-01-12-00-00-000000_mycluster_task-name_7
    names = (ips, node_rank_name)
    return env_for_node("skypilot", names, len(addresses), node_rank, addresses[0], job=task, gpus=gpus)


@register_system("sagemaker", "SM_HOSTS", priority=DetectionPriority.NODE)
def sagemaker(environ: EnvVariables) -> ClusterEnv | None:
    """Amazon SageMaker: a host of a training job, recognized by the variables of its training toolkit.

    Raises UsageError if SM_HOSTS is not a JSON list of names, or lacks this host.
    """
    listed, host = environ["SM_HOSTS"], environ.text("SM_CURRENT_HOST")  # ["algo-1","algo-2"], algo-2
    try:
        hosts = parse(listed, list[str])
    except ProtocolError:
        hosts = []
    if not hosts:
        raise UsageError(f"SM_HOSTS={listed} is not a JSON list of hosts", IGNORE_HINT)
    if host not in hosts:
        raise contradiction_error(f"SM_HOSTS={listed}", f"SM_CURRENT_HOST={host}")
    gpus, names = environ.optional_number("SM_NUM_GPUS"), ("SM_HOSTS", "SM_CURRENT_HOST")
    node = env_for_node("sagemaker", names, len(hosts), hosts.index(host), hosts[0], gpus=gpus)
    return replace(node, run_id=environ.get("TRAINING_JOB_NAME") or None)


@register_system("vertexai", "CLOUD_ML_JOB_ID", priority=DetectionPriority.NODE)
def vertexai(environ: EnvVariables) -> ClusterEnv | None:
    """Vertex AI, and AI Platform Training before it: a machine of a custom PyTorch job.

    RANK and WORLD_SIZE count machines there (cloud.google.com/ai-platform/training/docs/distributed-pytorch); one
    process is started on each.
    """
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR")
    if not environ.is_set(*names) or environ.is_set("LOCAL_RANK"):
        return None
    job = environ["CLOUD_ML_JOB_ID"]
    return env_from_node_variables("vertexai", environ, *names, "MASTER_PORT", run_id=job, address_may_be_unknown=True)


@register_system("awsbatch", "AWS_BATCH_JOB_NUM_NODES", priority=DetectionPriority.NODE)
def awsbatch(environ: EnvVariables) -> ClusterEnv | None:
    """AWS Batch: a node of a multi-node parallel job.

    The variables are those of docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html. Any node may be the main
    node, whose end ends the job, so node ranks are counted from it. No variable of the main node has its address.
    """
    names = ("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX")
    address = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"  # not set on the main node
    nnodes, index, main = environ.numbers(*names)
    check_below(index, nnodes, names[1], names[0])
    check_below(main, nnodes, names[2], names[0])
    is_worker = index != main
    job = environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]  # 1c2f5a5e-…#1: the node's index after the job's own id
    where = environ.text(address) if is_worker else outgoing_address()
    used = (*names, *([address] if is_worker else []))
    return env_for_node("awsbatch", used, nnodes, (index - main) % nnodes, where, job=job)


@register_system("volcengine", "MLP_WORKER_NUM", priority=DetectionPriority.NODE)
def volcengine(environ: EnvVariables) -> ClusterEnv | None:
    """The machine learning platform of Volcengine and BytePlus: a node of a custom task.

    The variables are those of volcengine.com/docs/6459/75329, in English
    docs.byteplus.com/en/docs/mlp/List_of_common_environment_variables. A role's index counts within the role, so only
    workers are nodes of a job. Raises UsageError on a machine of another role.
    """
    role = environ.get("MLP_ROLE", "WORKER")  # or SERVER, SCHEDULER, CHIEF, PS, EVALUATOR
    names = ("MLP_WORKER_NUM", "MLP_ROLE_INDEX", "MLP_WORKER_0_HOST", "MLP_WORKER_0_PORT")
    if role.upper() != "WORKER":
        counted = f"the workers that {names[0]}={environ[names[0]]} counts"
        what = f"MLP_ROLE={role}: this machine is not one of {counted}"
        raise UsageError(what, f"start ddplaunch on the workers alone; {IGNORE_HINT}")
    task = environ.get("MLP_TASK_ID") or None  # t-20210924211641-nznsh
    return env_from_node_variables("volcengine", environ, *names, nproc="MLP_WORKER_GPU", run_id=task)


@register_system("lepton", "LEPTON_JOB_TOTAL_WORKERS", priority=DetectionPriority.NODE)
def lepton(environ: EnvVariables) -> ClusterEnv | None:
    """DGX Cloud Lepton of NVIDIA: a worker of a batch job.

    The variables are those of docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars. Its pods are
    those of an indexed Job, whose names and subdomain make an address: env-job-98bw-0.env-job-98bw-job-svc.
    Raises UsageError if there are several workers and the variables do not have the first one's address.
    """
    count, index = "LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_WORKER_INDEX"
    prefix, subdomain = "LEPTON_JOB_SERVICE_PREFIX", "LEPTON_SUBDOMAIN"
    nnodes, node_rank = environ.numbers(count, index)
    check_below(node_rank, nnodes, index, count)
    has_address = environ.is_set(prefix, subdomain)
    if nnodes > 1 and not has_address:
        raise missing_address_error(environ, count, index)
    gpus = environ.optional_number("LEPTON_RESOURCE_ACCELERATOR_NUM")
    job = environ.get("LEPTON_JOB_NAME") or None
    address = f"{environ[prefix]}-0.{environ[subdomain]}" if has_address else None
    used = (count, index, *([prefix, subdomain] if has_address else []))
    return env_for_node("lepton", used, nnodes, node_rank, address, job=job, gpus=gpus, address_may_be_unknown=True)


@register_system("modelarts", "MA_NUM_HOSTS", priority=DetectionPriority.NODE)
def modelarts(environ: EnvVariables) -> ClusterEnv | None:
    """ModelArts of Huawei Cloud: a node of a training job.

    The variables are those of support.huaweicloud.com/intl/en-us/develop-modelarts/develop-modelarts-0104.html, table
    2. VC_* come from Volcano, which runs its jobs; VC_TASK_INDEX means nothing where there is one node.
    """
    count, index, listed = "MA_NUM_HOSTS", "VC_TASK_INDEX", "VC_WORKER_HOSTS"
    nnodes = environ.consistent_number(count, "VC_WORKER_NUM")
    gpus = environ.optional_number("MA_NUM_GPUS")  # 0 on CPUs
    if nnodes == 1:
        return env_for_node("modelarts", (count,), 1, 0, None, gpus=gpus)
    node_rank, hosts = environ.number(index), environ.text(listed).split(",")
    check_below(node_rank, nnodes, index, count)
    if len(hosts) != nnodes:
        raise contradiction_error(f"{count}={nnodes}", f"{listed}={environ[listed]} (nodes: {len(hosts)})")
    names = (count, index, listed)
    return env_for_node("modelarts", names, nnodes, node_rank, hosts[0], gpus=gpus, address_may_be_unknown=True)


RENDEZVOUS = "/run/determined/info/rendezvous.json"
MAX_BYTES = 1 << 20


class _DeterminedRendezvous(Struct):
    container_addrs: list[str]  # in the order of their ranks
    container_rank: Count


@register_system("determined", "DET_ALLOCATION_ID", priority=DetectionPriority.NODE)
def determined(environ: EnvVariables) -> ClusterEnv | None:
    """Determined: a container of a trial, described by a file that exists before the trial's own program starts.

    The file is that of ``harness/determined/_info.py``, whose ``get_cluster_info()`` has its fields; notebooks and
    commands have none. Raises UsageError if the file is malformed.
    """
    try:
        rendezvous = parse(read_regular_file(RENDEZVOUS, MAX_BYTES), _DeterminedRendezvous)
    except FileNotFoundError:
        return None
    except (OSError, ProtocolError):
        raise UsageError(f"{RENDEZVOUS} does not say which container this is", IGNORE_HINT) from None
    hosts, node_rank = rendezvous.container_addrs, rendezvous.container_rank
    check_below(node_rank, len(hosts), "container_rank", "container_addrs")
    names, job = ("DET_ALLOCATION_ID", RENDEZVOUS), environ["DET_ALLOCATION_ID"]
    return env_for_node("determined", names, len(hosts), node_rank, hosts[0], job=job)


class NodeVariables(Struct, frozen=True):
    """A system whose variables directly give number of nodes, node rank and address; the fields are their names."""

    cluster: str
    source: str
    nnodes: str
    node_rank: str
    address: str
    port: str | None = None
    nproc: str | None = None
    run_id: str | None = None
    marker_variable: str | None = None  # if other systems use the name in ``nnodes`` too
    address_may_be_unknown: bool = False  # the address may resolve only once node 0 has started
    independent_without_address: bool = False  # whether nodes without an address are jobs of their own

    def find(self, environ: EnvVariables) -> ClusterEnv | None:
        """Return the cluster environment of this process from the variables; None if they are not set.

        Raises UsageError if there are several nodes and the variables do not have the first one's address.
        """
        if not environ.is_set(self.nnodes):
            return None
        nnodes, _ = environ.numbers(self.nnodes, self.node_rank)
        if nnodes > 1 and not environ.is_set(self.address):
            if self.independent_without_address:
                return env_for_array_task(self.cluster, environ, self.node_rank, self.address, "replica")
            raise missing_address_error(environ, self.nnodes, self.node_rank)
        return env_from_node_variables(
            self.cluster,
            environ,
            self.nnodes,
            self.node_rank,
            self.address,
            self.port,
            nproc=self.nproc,
            run_id=environ.get(self.run_id or "") or None,
            address_may_be_unknown=self.address_may_be_unknown,
        )


NODE_VARIABLE_SYSTEMS = (
    NodeVariables(
        "dstack",
        'dstack.ai/docs/concepts/tasks, "System environment variables"; no two runs of a project have one name',
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        nproc="DSTACK_GPUS_PER_NODE",
        run_id="DSTACK_RUN_NAME",
    ),
    NodeVariables(
        "runpod",
        'docs.runpod.io/instant-clusters/configuration, "Environment variables"',
        "NUM_NODES",
        "NODE_RANK",
        "MASTER_ADDR",
        port="MASTER_PORT",
        nproc="NUM_TRAINERS",
        marker_variable="NUM_TRAINERS",
    ),
    NodeVariables(
        "beaker",
        "github.com/allenai/beaker-gantry: --replicas, --leader-selection; without a leader, replicas share out work",
        "BEAKER_REPLICA_COUNT",
        "BEAKER_REPLICA_RANK",
        "BEAKER_LEADER_REPLICA_HOSTNAME",
        independent_without_address=True,
    ),
    NodeVariables(
        "leaderworkerset",
        "github.com/kubernetes-sigs/lws, api/leaderworkerset/v1: in all containers of a group",
        "LWS_GROUP_SIZE",
        "LWS_WORKER_INDEX",
        "LWS_LEADER_ADDRESS",
        address_may_be_unknown=True,
    ),
    NodeVariables(
        "ngc",
        "Base Command Platform of NVIDIA's NGC: NVIDIA's own training scripts start torch's launcher with these",
        "NGC_ARRAY_SIZE",
        "NGC_ARRAY_INDEX",
        "NGC_MASTER_ADDR",
        nproc="NGC_GPUS_PER_NODE",
        run_id="NGC_JOB_ID",
        address_may_be_unknown=True,
    ),
)

for row in NODE_VARIABLE_SYSTEMS:
    register_system(row.cluster, row.marker_variable or row.nnodes, priority=DetectionPriority.NODE)(row.find)
