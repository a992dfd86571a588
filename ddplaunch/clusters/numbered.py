"""Systems whose variables number the nodes and need no thought besides: a row each, with where they are documented."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import a_copy, counts_nodes, is_set, numbers, unaddressed
from ddplaunch.dataclass import dataclass


@dataclass(frozen=True)
class Numbered:
    """One system, by the names of its variables."""

    cluster: str
    source: str
    nnodes: str
    node_rank: str
    address: str
    port: str | None = None
    nproc: str | None = None
    run_id: str | None = None
    comes_late: bool = False  # whether the address is a name that comes with node 0's own start
    copies: bool = False  # whether nodes that are given no address are as many jobs

    def find(self, environ: Mapping[str, str]) -> Finding | None:
        """Recognise a node of a job.

        Raises UsageError if there are several and the variables do not say where the first is.
        """
        if not is_set(environ, self.nnodes):
            return None
        nnodes, _ = numbers(environ, self.nnodes, self.node_rank)
        if nnodes > 1 and not is_set(environ, self.address):
            if self.copies:
                return a_copy(self.cluster, environ, self.node_rank, self.address, "replica")
            raise unaddressed(environ, self.nnodes, self.node_rank)
        return counts_nodes(
            self.cluster,
            environ,
            self.nnodes,
            self.node_rank,
            self.address,
            self.port,
            nproc=self.nproc,
            run_id=environ.get(self.run_id or "") or None,
            comes_late=self.comes_late,
        )


_ROWS = (
    Numbered(
        "dstack",
        'dstack.ai/docs/concepts/tasks, "System environment variables"; no two runs of a project have one name',
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        nproc="DSTACK_GPUS_PER_NODE",
        run_id="DSTACK_RUN_NAME",
    ),
    Numbered(
        "runpod",
        'docs.runpod.io/instant-clusters/configuration, "Environment variables"',
        "NUM_NODES",
        "NODE_RANK",
        "MASTER_ADDR",
        port="MASTER_PORT",
        nproc="NUM_TRAINERS",
    ),
    Numbered(
        "beaker",
        "github.com/allenai/beaker-gantry: --replicas, --leader-selection; without a leader, replicas share out work",
        "BEAKER_REPLICA_COUNT",
        "BEAKER_REPLICA_RANK",
        "BEAKER_LEADER_REPLICA_HOSTNAME",
        copies=True,
    ),
    Numbered(
        "leaderworkerset",
        "github.com/kubernetes-sigs/lws, api/leaderworkerset/v1: in all containers of a group",
        "LWS_GROUP_SIZE",
        "LWS_WORKER_INDEX",
        "LWS_LEADER_ADDRESS",
        comes_late=True,
    ),
    Numbered(
        "ngc",
        "Base Command Platform of NVIDIA's NGC: NVIDIA's own training scripts start torch's launcher with these",
        "NGC_ARRAY_SIZE",
        "NGC_ARRAY_INDEX",
        "NGC_MASTER_ADDR",
        nproc="NGC_GPUS_PER_NODE",
        run_id="NGC_JOB_ID",
        comes_late=True,
    ),
)

ROWS = {row.cluster: row for row in _ROWS}
