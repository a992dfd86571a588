"""Systems that number pods or tasks, not always with their count or the address of the first."""

from __future__ import annotations

import re

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.system.clusters.cluster_env import ClusterEnv, DetectionPriority, register_system
from ddplaunch.system.clusters.env_builders import (
    env_for_array_task,
    env_for_node,
    env_from_node_variables,
    missing_address_error,
    own_host_index,
    read_host_file,
)
from ddplaunch.system.clusters.env_variables import (
    IGNORE_HINT,
    EnvVariables,
    check_below,
    contradiction_error,
    parse_number,
)


@register_system("openpai", "PAI_CURRENT_TASK_ROLE_NAME", priority=DetectionPriority.INDEX)
def openpai(environ: EnvVariables) -> ClusterEnv | None:
    """OpenPAI: a task of a job.

    The variables are those of openpai.readthedocs.io, "How to use advanced job settings", "Environmental variables". An
    index counts within a task role. Raises UsageError if the job has several roles: no variable says whether they
    are one job of ranks.
    """
    index_name = "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"
    if not environ.is_set(index_name):
        return None
    role, index = environ["PAI_CURRENT_TASK_ROLE_NAME"], environ.number(index_name)
    count_name, host_name = "PAI_TASK_ROLE_TASK_COUNT_" + role, "PAI_HOST_IP_" + f"{role}_0"
    count = environ.number(count_name)
    roles = environ.get("PAI_TASK_ROLE_LIST", role).split(",")
    if len(roles) > 1:
        raise UsageError(
            f"{index_name}={index} counts within {role}, but the job has {len(roles)} task roles: {', '.join(roles)}",
            "ddplaunch run --nnodes N --node-rank I --master-addr HOST … on every node\n"
            "or --cluster none …, for this machine alone",
        )
    check_below(index, count, index_name, count_name)
    job = environ.get("PAI_JOB_NAME") or None  # admin~train
    address = environ.text(host_name) if count > 1 else None
    used = (index_name, count_name, *([host_name] if count > 1 else []))
    return env_for_node("openpai", used, count, index, address, job=job)


@register_system("volcano", "VC_TASK_INDEX", "VK_TASK_INDEX", priority=DetectionPriority.INDEX)
def volcano(environ: EnvVariables) -> ClusterEnv | None:
    """Volcano: a pod of a job with its env and svc plugins; without the svc plugin, each pod is a job of its own.

    The variables are those of github.com/volcano-sh/volcano: docs/user-guide/how_to_use_env_plugin.md, and, for the
    hosts, pkg/controllers/job/plugins/svc. An index counts within a task, and no variable says which task the pod is
    of. Pods that its pytorch plugin numbers look like those of a PyTorchJob, and are read as such. Older versions have
    VK_TASK_INDEX alone. Raises UsageError if the job has several tasks.
    """
    indexes = ("VC_TASK_INDEX", "VK_TASK_INDEX")
    index, index_name = environ.consistent_number(*indexes), next(name for name in indexes if environ.is_set(name))
    # VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job, for every task
    named = [name for name in sorted(environ) if re.fullmatch(r"VC_([A-Z0-9_]+)_HOSTS", name) and environ[name]]
    tasks = {name: environ[name].split(",") for name in named}
    if not tasks:
        return env_for_array_task("volcano", environ, index_name, "VC_…_HOSTS of the svc plugin", "pod")
    if len(tasks) > 1:
        nnodes, first = sum(map(len, tasks.values())), tasks[named[0]][0]
        raise UsageError(
            f"{index_name}={index} counts within one task, but the job has {len(tasks)}: {', '.join(tasks)}",
            f"ddplaunch run --nnodes {nnodes} --node-rank … --master-addr {first} …, or Volcano's pytorch plugin\n"
            "or --cluster none …, for this pod alone",
        )
    ((name, hosts),) = tasks.items()
    count_name = name.removesuffix("HOSTS") + "NUM"
    if environ.optional_number(count_name) not in (None, len(hosts)):
        listed = f"{name}={environ[name]} (nodes: {len(hosts)})"
        raise contradiction_error(f"{count_name}={environ[count_name]}", listed)
    check_below(index, len(hosts), index_name, f"hosts in {name}")
    return env_for_node("volcano", (index_name, name), len(hosts), index, hosts[0], address_may_be_unknown=True)


@register_system("htcondor", "_CONDOR_NPROCS", priority=DetectionPriority.INDEX)
def htcondor(environ: EnvVariables) -> ClusterEnv | None:
    """HTCondor: a node of a job in its parallel universe.

    It numbers the nodes (src/condor_starter.V6.1/parallel_proc.cpp sets these two) but has no addresses: a
    job's script must exchange them, as those in HTCondor's examples do. Raises UsageError if there are several nodes
    and the script does not set the first one's address.
    """
    nnodes, node_rank = "_CONDOR_NPROCS", "_CONDOR_PROCNO"
    if not environ.is_set(node_rank):
        return None
    if environ.number(nnodes) > 1 and not environ.is_set("MASTER_ADDR"):
        raise missing_address_error(environ, nnodes, node_rank)
    return env_from_node_variables("htcondor", environ, nnodes, node_rank, "MASTER_ADDR", "MASTER_PORT")


INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # 1
NNODES_VARIABLE = "DDPLAUNCH_NNODES"  # 2, or 2:4
ADDRESS_VARIABLE = "MASTER_ADDR"  # job-0.job
PORT_VARIABLE = "MASTER_PORT"  # 29500
FIRST_NODE_VARIABLE = "DDPLAUNCH_FIRST_NODE"  # 2: the node rank of index 0, where a JobSet has several Jobs


@register_system("kubernetes", INDEX_VARIABLE, priority=DetectionPriority.INDEX)
def kubernetes(environ: EnvVariables) -> ClusterEnv | None:
    """Kubernetes without an operator: a pod of an indexed Job, alone or in a JobSet.

    Kubernetes sets only JOB_COMPLETION_INDEX; the Job's template sets DDPLAUNCH_NNODES, MASTER_ADDR and MASTER_PORT.
    In a JobSet of several Jobs DDPLAUNCH_FIRST_NODE is added to the index.
    Without the number of nodes the pod is a job of its own, as usual in an indexed Job.
    """
    if not environ.is_set(NNODES_VARIABLE):
        return env_for_array_task("kubernetes", environ, INDEX_VARIABLE, NNODES_VARIABLE, "pod")
    lowest, colon, highest = environ.text(NNODES_VARIABLE).partition(":")
    nnodes, node_rank = parse_number(highest if colon else lowest, NNODES_VARIABLE), environ.number(INDEX_VARIABLE)
    node_rank += environ.optional_number(FIRST_NODE_VARIABLE) or 0
    min_nodes = parse_number(lowest, NNODES_VARIABLE) if colon else None
    if min_nodes is not None and not 1 <= min_nodes <= nnodes:
        raise UsageError(f"{NNODES_VARIABLE}={environ[NNODES_VARIABLE]} is not a range like 2:4", IGNORE_HINT)
    check_below(node_rank, nnodes, INDEX_VARIABLE, NNODES_VARIABLE)
    address = environ.text(ADDRESS_VARIABLE) if nnodes > 1 else environ.get(ADDRESS_VARIABLE) or None
    port = environ.optional_number(PORT_VARIABLE) if nnodes > 1 else None  # it may be that of a Service called master
    names = (INDEX_VARIABLE, NNODES_VARIABLE, ADDRESS_VARIABLE)
    node = env_for_node("kubernetes", names, nnodes, node_rank, address, address_may_be_unknown=True)
    return replace(node, min_nodes=min_nodes, port=port)


@register_system("gcpbatch", "BATCH_TASK_INDEX", priority=DetectionPriority.INDEX)
def gcpbatch(environ: EnvVariables) -> ClusterEnv | None:
    """Batch of Google Cloud: a task of a job; each task is a job of its own unless there is a file of the hosts.

    The variables are those of cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs: ``taskCount``,
    ``requireHostsFile``. No variable says on which host a task is, so hosts are numbered by their place in the file.
    Raises UsageError if the file has more or fewer hosts than there are tasks, or lacks this machine.
    """
    index, count_name, file = "BATCH_TASK_INDEX", "BATCH_TASK_COUNT", "BATCH_HOSTS_FILE"
    if not environ.is_set(count_name):
        return None
    count, hosts = environ.number(count_name), read_host_file(environ[file]) if environ.is_set(file) else ()
    if count == 1:
        return env_for_node("gcpbatch", (index, count_name), 1, 0, None)
    if not hosts:
        return env_for_array_task("gcpbatch", environ, index, file, "task")
    if count != len(hosts):
        raise contradiction_error(f"{count_name}={count}", f"{file}={environ[file]} (hosts: {len(hosts)})")
    place = own_host_index(hosts)
    if place is None:
        raise UsageError(f"{file}={environ[file]} does not have this machine, {host_name()}", IGNORE_HINT)
    return env_for_node("gcpbatch", (count_name, file), count, place, hosts[0])


@register_system("nomad", "NOMAD_ALLOC_INDEX", priority=DetectionPriority.INDEX)
def nomad(environ: EnvVariables) -> ClusterEnv | None:
    """Nomad: an allocation of a task group, treated as a job of its own because variables give only its index.

    The index is that of developer.hashicorp.com/nomad/docs/runtime/environment; no variable has the group's count.
    """
    return env_for_array_task("nomad", environ, "NOMAD_ALLOC_INDEX", "a count", "allocation")
