"""What the surroundings say where the user does not: a finding of ``clusters`` fills in options."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.options import OptionSource, RunOptions
from ddplaunch.cli.values import AUTO
from ddplaunch.clusters import SYSTEMS, detect
from ddplaunch.clusters.alone import check_single_node
from ddplaunch.clusters.finding import ClusterEnv, RankAssignment
from ddplaunch.errors import EXIT_USAGE, UsageError, host_name
from ddplaunch.plan.layout import ExternalRank
from ddplaunch.plan.plan import Plan
from ddplaunch.words import format_count

if TYPE_CHECKING:
    from ddplaunch.cli.options import Inferred

TOKEN_VARIABLE = "DDPLAUNCH_TOKEN"

IN_RANK_VARIABLE = "DDPLAUNCH_DEVICE"
"""Every rank of ours has it: what a rank starts with ddplaunch is a job of its own, not that rank again."""

OVER_SSH_VARIABLE = "DDPLAUNCH_OVER_SSH"
"""The variable by which a launcher knows that the others are started at the same time."""

SLURM = "slurm"

TORCHRUN_CLUSTER = "torchelastic"
"""Where torchrun has started us it coordinates the ranks and holds their store; we only run ours."""

_KEPT_VARIABLES = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "ROLE_NAME",
)

LOOKUP_TIMEOUT_S = 2.0  # seconds for a name server to say whether a MASTER_ADDR that nothing goes with is another host


def detect_cluster(options: RunOptions) -> tuple[RunOptions, ClusterEnv | None]:
    """Fill in what the user has not set from what the surroundings say; return what was used, None where nothing was.

    Raises:
        UsageError: the variables make no sense, or contradict what the user has set.
    """
    describes_itself = options.is_set("nnodes") or options.is_set("node_rank")  # then variables mean another job
    if options.cluster is None and (IN_RANK_VARIABLE in os.environ or describes_itself):
        finding = _step_of(options)
    else:
        ignored = ("LOCAL_RANK",) if ignored_rank_variables(options) else ()
        finding = detect({name: value for name, value in os.environ.items() if name not in ignored}, options.cluster)
    if finding is None:
        return options, None
    nnodes, node_rank, nproc = finding.nnodes, finding.node_rank, finding.nproc
    if finding.rank_assignment is not None:
        if options.nproc not in (None, "1") and options.is_set("nproc"):
            raise _already_started_error(finding, finding.rank_assignment, options.nproc)
        if options.sources["nproc"] is OptionSource.FILE:  # for jobs that have a launcher
            options = options.with_values(OptionSource.CLUSTER, {"nproc": "1"})
        nnodes, node_rank, nproc = finding.rank_assignment.world_size, finding.rank_assignment.rank, "1"
    assert nnodes is not None
    options = options.with_defaults(
        OptionSource.CLUSTER, {"nnodes": (finding.min_nodes or nnodes, nnodes), "node_rank": node_rank, "nproc": nproc}
    )
    if options.nnodes == (1, 1):
        return options.with_defaults(OptionSource.CLUSTER, {"run_id": finding.run_id}), finding
    if finding.cluster == TORCHRUN_CLUSTER:
        options = options.with_values(OptionSource.CLUSTER, {"control": "none"})
    address = None if os.environ.get("MASTER_ADDR") else finding.address
    port = None if os.environ.get("MASTER_PORT") else finding.port
    of_node_0: Inferred = {"master_addr": address, "master_port": port, "run_id": finding.run_id}
    return options.with_defaults(OptionSource.CLUSTER, of_node_0), finding


def _slurm_step(options: RunOptions) -> ClusterEnv | None:
    """The Slurm step whose tasks may be the nodes of the job that is typed; None where there is no such step."""
    if options.cluster is not None or IN_RANK_VARIABLE in os.environ or options.nnodes[1] == 1:
        return None
    try:
        finding = detect(os.environ)
    except UsageError:  # the variables count only where nothing is typed
        return None
    return finding if finding and finding.cluster == SLURM and not finding.is_batch_script else None


def _step_of(options: RunOptions) -> ClusterEnv | None:
    """The Slurm step that knows the node rank, where the number of nodes is typed without it.

    Raises:
        UsageError: the step has more tasks than the job has nodes.
    """
    if (step := _slurm_step(options)) is None:
        return None
    tasks, nodes = _tasks(step), options.nnodes[1] + options.spares
    if tasks > nodes:
        if _task(step) and has_shared_log(step):
            raise SystemExit(EXIT_USAGE)
        each = f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
        raise UsageError(
            f"Slurm has started {tasks} tasks, and the job has {nodes} nodes (--nnodes): each task would be a node",
            f"one task on each node: srun {each} ddplaunch run …\nor --cluster none, if the step runs several jobs",
        )
    return step if tasks == nodes and step.rank_assignment is None and not options.is_set("node_rank") else None


def in_step(options: RunOptions, finding: ClusterEnv | None, node_rank: int) -> bool:
    """Whether the tasks of a Slurm step are the job's nodes, or its ranks, and a node rank is a task's number."""
    if finding is not None:
        return finding.cluster == SLURM and not finding.is_batch_script
    step = _slurm_step(options)
    if step is None or _tasks(step) != options.nnodes[1] + options.spares:
        return False
    return options.node_rank == AUTO or (step.rank_assignment is None and node_rank == step.node_rank)


def _tasks(step: ClusterEnv) -> int:
    return step.rank_assignment.world_size if step.rank_assignment else step.nnodes or 1


def _task(step: ClusterEnv) -> int:
    return step.rank_assignment.rank if step.rank_assignment else step.node_rank or 0


def check_lone_node(options: RunOptions, finding: ClusterEnv | None, plan: Plan) -> str | None:
    """Return what to say of a job that is planned for this machine because nothing was typed and nothing recognised.

    Raises:
        UsageError: variables speak of several nodes, each of which would train alone.
    """
    decided = options.cluster is not None or options.is_set("nnodes") or options.is_set("node_rank")
    if decided or plan.nnodes > 1 or IN_RANK_VARIABLE in os.environ:
        return None
    if finding and not finding.is_batch_script and not finding.may_be_single:
        return None
    return check_single_node(os.environ, plan.world_size, finding, _is_local_address)


def _is_local_address(address: str) -> bool | None:
    """Whether an address is this machine's; None if it cannot be resolved, soon."""
    own = host_name()
    if address in (own, own.partition(".")[0]):
        return True
    from ddplaunch.control.route import is_local_address

    try:
        return is_local_address(address.strip("[]"), LOOKUP_TIMEOUT_S)
    except UsageError:
        return None


def ignored_rank_variables(options: RunOptions) -> str | None:
    """Say that variables of a job of one rank are not read where several ranks are typed: they were exported to run a
    script alone, and number nothing here.
    """
    said = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)]
    alone = len(said) == 3 and os.environ["WORLD_SIZE"].strip() == "1"
    if not alone or options.nproc in (None, "1") or options.cluster:
        return None
    if any(os.environ.get(name) for name in (IN_RANK_VARIABLE, "TORCHELASTIC_RUN_ID")):  # a rank of another launcher
        return None
    return f"{', '.join(said)} in the environment do not count: --nproc {options.nproc} starts ranks of its own"


def _already_started_error(finding: ClusterEnv, place: RankAssignment, nproc: str) -> BaseException:
    """Each rank of another launcher refuses to start several; where they share a log, rank 0 says why."""
    if place.rank and has_shared_log(finding):
        return SystemExit(EXIT_USAGE)
    starter = "mpirun -npernode 1 ddplaunch run …, or what does the same"
    if finding.cluster == SLURM:
        each = f"--nodes={finding.nnodes} --ntasks={finding.nnodes} --ntasks-per-node=1"
        starter = f"srun {each} ddplaunch run --nproc {nproc} …"
    started = format_count(place.world_size, "rank")
    return UsageError(
        f"--nproc {nproc} does not work here: {finding.cluster} has started {started} already, "
        f"and this is rank {place.rank}",
        f"leave --nproc out, or --cluster none; or start one launcher on each node:\n{starter}",
    )


def check_token(token: str | None, name: str = "--token") -> None:
    """Refuse a token that is empty, as of a secret that is not set: the job would be open to all.

    ``name`` is where it was typed; where it was not, the variable counts, and click takes an empty one for none.
    """
    if token is None:
        token, name = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    if token is not None and not token.strip():
        raise UsageError(f"{name} is empty, so it would protect nothing", f"give a secret, or leave {name} out")


def to_started_rank(finding: ClusterEnv | None) -> ExternalRank | None:
    """Return this process's rank as the plan has it, if another launcher has started all ranks."""
    if finding is None or finding.rank_assignment is None:
        return None
    kept = {
        name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ and finding.cluster == TORCHRUN_CLUSTER
    }
    place = finding.rank_assignment
    return ExternalRank(
        place.local_rank, place.local_world_size, finding.node_rank, finding.nnodes, tuple(kept.items())
    )


def has_shared_log(finding: ClusterEnv | None) -> bool:
    """Whether what all nodes print comes to one place; submitit has srun write a file for each."""
    return finding is not None and SYSTEMS[finding.cluster].has_shared_log and "SUBMITIT_EXECUTOR" not in os.environ


def cluster_notes(finding: ClusterEnv) -> Iterator[str]:
    """Say in one line what was found, and from which variables; once for the job, unless there is more to say."""
    if finding.rank_assignment is not None:
        first, many = finding.rank_assignment.rank == 0, finding.rank_assignment.world_size > 1
        what = f"rank {finding.rank_assignment.rank} of {finding.rank_assignment.world_size}"
    else:
        first, many = finding.node_rank == 0, (finding.nnodes or 1) > 1
        what = f"node {finding.node_rank} of {finding.nnodes}"
    if many and first:
        where = f", at {finding.address}" if finding.address else ""
        yield f"{finding.cluster}: this is {what}{where} ({', '.join(finding.variables)}; --cluster none to ignore)"
    if first:
        yield from finding.notes
