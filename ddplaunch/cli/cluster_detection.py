"""Fills in options that the user has not set, from the cluster's environment variables (``clusters.detect``)."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddplaunch.base.errors import EXIT_USAGE, UsageError, host_name
from ddplaunch.base.options import Options, OptionSource
from ddplaunch.base.text import format_count
from ddplaunch.core.options import Elastic, Nodes, RanksPerNode
from ddplaunch.system.clusters import SYSTEMS, detect
from ddplaunch.system.clusters.cluster_env import ClusterEnv, RankAssignment
from ddplaunch.system.clusters.single_node_check import check_single_node
from ddplaunch.system.network.addresses import is_local_address
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import ExternalRank

TOKEN_VARIABLE = "DDPLAUNCH_TOKEN"

IN_RANK_VARIABLE = "DDPLAUNCH_DEVICE"
"""Set in every rank of ddplaunch: a launcher that a rank starts is a new job and ignores the rank's variables."""

OVER_SSH_VARIABLE = "DDPLAUNCH_OVER_SSH"
"""Set where ddplaunch was started over SSH by ``--hosts``, together with all other nodes."""

SLURM = "slurm"

TORCHRUN_CLUSTER = "torchelastic"
"""Under torchrun, which coordinates the ranks and holds their store, ddplaunch only runs its own rank."""

_FORWARDED_VARIABLES = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "ROLE_NAME",
)

LOOKUP_TIMEOUT_S = 2.0  # to resolve a MASTER_ADDR without other variables: this machine or another one?


def detect_cluster(options: Options) -> tuple[Options, ClusterEnv | None]:
    """Fill in unset options from the cluster environment; return the options and that environment, None if unused.

    Raises UsageError if the variables are invalid, or contradict what the user has set.
    """
    describes_itself = options.is_set("nnodes") or options.is_set(
        "node_rank"
    )  # then the variables belong to another job
    if options[Nodes].cluster is None and (IN_RANK_VARIABLE in os.environ or describes_itself):
        cluster_env = _step_with_node_rank(options)
    else:
        ignored = ("LOCAL_RANK",) if ignored_variables_note(options) else ()
        cluster_env = detect(
            {name: value for name, value in os.environ.items() if name not in ignored}, options[Nodes].cluster
        )
    if cluster_env is None:
        return options, None
    nnodes, node_rank, nproc = cluster_env.nnodes, cluster_env.node_rank, cluster_env.nproc
    if cluster_env.rank_assignment is not None:
        if (typed := options[RanksPerNode].nproc) not in (None, "1") and options.is_set("nproc"):
            raise _already_started_error(cluster_env, cluster_env.rank_assignment, typed)
        if options.sources["nproc"] is OptionSource.FILE:  # meant for jobs that ddplaunch starts
            options = options.with_values(OptionSource.CLUSTER, {"nproc": "1"})
        nnodes, node_rank, nproc = cluster_env.rank_assignment.world_size, cluster_env.rank_assignment.rank, "1"
    assert nnodes is not None
    options = options.with_defaults(
        OptionSource.CLUSTER,
        {"nnodes": (cluster_env.min_nodes or nnodes, nnodes), "node_rank": node_rank, "nproc": nproc},
    )
    if options[Nodes].nnodes == (1, 1):
        return options.with_defaults(OptionSource.CLUSTER, {"run_id": cluster_env.run_id}), cluster_env
    if cluster_env.cluster == TORCHRUN_CLUSTER:
        options = options.with_values(OptionSource.CLUSTER, {"control": "none"})
    address = None if os.environ.get("MASTER_ADDR") else cluster_env.address
    port = None if os.environ.get("MASTER_PORT") else cluster_env.port
    of_node_0 = {"master_addr": address, "master_port": port, "run_id": cluster_env.run_id}
    return options.with_defaults(OptionSource.CLUSTER, of_node_0), cluster_env


def separate_trainings_note(options: Options) -> str | None:
    """Return a note if each of several tasks of a Slurm step trains alone, because --nnodes 1 or --standalone says so.

    On the first task only.
    """
    if options[Nodes].nnodes[1] > 1 or not options.is_set("nnodes") or options[Nodes].cluster is not None:
        return None
    step = _detect_slurm_step()
    if step is None or task_count(step) < 2 or _task_number(step):
        return None
    return (
        f"Slurm has started {task_count(step)} tasks of this step, and each trains alone (--nnodes 1, or --standalone);"
        " for one job leave that out; if it is meant: --cluster none"
    )


def find_slurm_step(options: Options) -> ClusterEnv | None:
    """Return the Slurm step whose tasks may be the nodes of a job with --nnodes, None if there is none."""
    if options[Nodes].cluster is not None or options[Nodes].nnodes[1] == 1:
        return None
    return _detect_slurm_step()


def _detect_slurm_step() -> ClusterEnv | None:
    if IN_RANK_VARIABLE in os.environ:
        return None
    try:
        cluster_env = detect(os.environ)
    except UsageError:  # --nnodes has precedence over invalid variables
        return None
    return cluster_env if cluster_env and cluster_env.cluster == SLURM and not cluster_env.is_batch_script else None


def _step_with_node_rank(options: Options) -> ClusterEnv | None:
    """Return the Slurm step that supplies the node rank for a job with --nnodes but without --node-rank, or None.

    Raises UsageError if the step has more tasks than the job has nodes.
    """
    if (step := find_slurm_step(options)) is None:
        return None
    tasks, nodes = task_count(step), options[Nodes].nnodes[1] + options[Elastic].spares
    if tasks > nodes:
        if _task_number(step) and has_shared_log(step):
            raise SystemExit(EXIT_USAGE)
        each = f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
        raise UsageError(
            f"Slurm has started {tasks} tasks, and the job has {nodes} nodes (--nnodes): each task would be a node",
            f"one task on each node: srun {each} ddplaunch run …\nor --cluster none, if the step runs several jobs",
        )
    return step if tasks == nodes and step.rank_assignment is None and not options.is_set("node_rank") else None


def task_count(step: ClusterEnv) -> int:
    return step.rank_assignment.world_size if step.rank_assignment else step.nnodes or 1


def _task_number(step: ClusterEnv) -> int:
    return step.rank_assignment.rank if step.rank_assignment else step.node_rank or 0


def check_lone_node(options: Options, cluster_env: ClusterEnv | None, plan: Plan) -> str | None:
    """Check a job planned for one node because no option or detected system names several; return a note or None.

    Raises UsageError if variables suggest several nodes, each of which would train alone.
    """
    decided = options[Nodes].cluster is not None or options.is_set("nnodes") or options.is_set("node_rank")
    if decided or plan.nnodes > 1 or IN_RANK_VARIABLE in os.environ:
        return None
    if cluster_env and not cluster_env.is_batch_script and not cluster_env.may_be_single:
        return None
    return check_single_node(os.environ, plan.world_size, cluster_env, _is_local_address)


def _is_local_address(address: str) -> bool | None:
    """Whether an address is this machine's; None if it cannot be resolved within ``LOOKUP_TIMEOUT_S``."""
    own = host_name()
    if address in (own, own.partition(".")[0]):
        return True

    try:
        return is_local_address(address.strip("[]"), LOOKUP_TIMEOUT_S)
    except UsageError:
        return None


def ignored_variables_note(options: Options) -> str | None:
    """Return a note if variables of a job with one rank are ignored because --nproc starts several ranks.

    Users export RANK=0, WORLD_SIZE=1 and LOCAL_RANK=0 to run a script without a launcher.
    """
    present = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)]
    is_single = len(present) == 3 and os.environ["WORLD_SIZE"].strip() == "1"
    if not is_single or options[RanksPerNode].nproc in (None, "1") or options[Nodes].cluster:
        return None
    if any(os.environ.get(name) for name in (IN_RANK_VARIABLE, "TORCHELASTIC_RUN_ID")):  # a rank of another launcher
        return None
    nproc = options[RanksPerNode].nproc
    return f"ignoring {', '.join(present)} from the environment: --nproc {nproc} starts its own ranks"


def _already_started_error(cluster_env: ClusterEnv, place: RankAssignment, nproc: str) -> BaseException:
    """Build the error of --nproc in a rank of another launcher; with a shared log, only rank 0 prints it."""
    if place.rank and has_shared_log(cluster_env):
        return SystemExit(EXIT_USAGE)
    starter = "mpirun -npernode 1 ddplaunch run …, or what does the same"
    if cluster_env.cluster == SLURM:
        each = f"--nodes={cluster_env.nnodes} --ntasks={cluster_env.nnodes} --ntasks-per-node=1"
        starter = f"srun {each} ddplaunch run --nproc {nproc} …"
    started = format_count(place.world_size, "rank")
    return UsageError(
        f"--nproc {nproc} does not work here: {cluster_env.cluster} has started {started} already, "
        f"and this is rank {place.rank}",
        f"leave --nproc out, or --cluster none; or start one launcher on each node:\n{starter}",
    )


def check_token(token: str | None, name: str = "--token") -> None:
    """Raise UsageError if the token is empty, as when a secret is not set: any process could then join the job.

    ``name`` is the option of the token. Without a token the variable is checked: click treats an empty one as unset.
    """
    if token is None:
        token, name = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    if token is not None and not token.strip():
        raise UsageError(f"{name} is empty", f"give a secret, or leave {name} out")


def to_external_rank(cluster_env: ClusterEnv | None) -> ExternalRank | None:
    """Return the place of this process among the ranks if another launcher has started all of them, else None."""
    if cluster_env is None or cluster_env.rank_assignment is None:
        return None
    variables = {
        name: os.environ[name]
        for name in _FORWARDED_VARIABLES
        if name in os.environ and cluster_env.cluster == TORCHRUN_CLUSTER
    }
    place = cluster_env.rank_assignment
    return ExternalRank(
        place.local_rank, place.local_world_size, cluster_env.node_rank, cluster_env.nnodes, tuple(variables.items())
    )


def has_shared_log(cluster_env: ClusterEnv | None) -> bool:
    """Whether the output of all nodes goes to one log; not under submitit, where srun writes a file for each task."""
    return (
        cluster_env is not None
        and SYSTEMS[cluster_env.cluster].has_shared_log
        and "SUBMITIT_EXECUTOR" not in os.environ
    )


def cluster_notes(cluster_env: ClusterEnv) -> Iterator[str]:
    """Describe the cluster environment in one line, with its variables; on the first node or rank only."""
    if cluster_env.rank_assignment is not None:
        first, many = cluster_env.rank_assignment.rank == 0, cluster_env.rank_assignment.world_size > 1
        what = f"rank {cluster_env.rank_assignment.rank} of {cluster_env.rank_assignment.world_size}"
    else:
        first, many = cluster_env.node_rank == 0, (cluster_env.nnodes or 1) > 1
        what = f"node {cluster_env.node_rank} of {cluster_env.nnodes}"
    if many and first:
        where = f", at {cluster_env.address}" if cluster_env.address else ""
        variables = ", ".join(cluster_env.variables)
        yield f"{cluster_env.cluster}: this is {what}{where} ({variables}; --cluster none to ignore)"
    if first:
        yield from cluster_env.notes
