"""TF_CONFIG, and Vertex AI's CLUSTER_SPEC: the nodes of a job as one JSON object, which other frameworks get too.

Formats: tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver, and
cloud.google.com/vertex-ai/docs/training/distributed-training, where the third worker pool has parameter servers and the
fourth evaluates. Neither has ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF
from ddplaunch.errors import UsageError, shown

if TYPE_CHECKING:
    from typing import Any

VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")
"""{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}"""

ROLES = ("chief", "master", "worker", "workerpool0", "workerpool1")
"""In the order of their ranks."""


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job; None where no cluster is described.

    Raises UsageError if it is not such an object, or this node is not one of those that have ranks.
    """
    for name in VARIABLES:
        if not environ.get(name):
            continue
        cluster, role, index = _read(name, environ[name])
        if not cluster:
            continue
        hosts = [(each, place, host) for each in ROLES for place, host in enumerate(cluster.get(each, []))]
        node_rank = next((i for i, (each, place, _) in enumerate(hosts) if (each, place) == (role, index)), None)
        if node_rank is None:
            what = f"{name}: this is {role} {index}, not one of the {len(hosts)} nodes of {', '.join(ROLES)}"
            raise UsageError(what, f"start ddplaunch on those alone; {OFF}")
        address, _, port = hosts[0][-1].rpartition(":")
        return Finding(
            "tfconfig",
            (name,),
            nnodes=len(hosts),
            node_rank=node_rank,
            address=address.strip("[]"),
            address_comes_late=True,
            port=int(port),
        )
    return None


def _read(name: str, written: str) -> tuple[dict[str, list[str]], str, int]:
    """Return the hosts of each role, this node's role and its index there."""
    try:
        spec: Any = json.loads(written)
        cluster = {str(role): [str(host) for host in hosts] for role, hosts in spec.get("cluster", {}).items()}
        for host in (host for hosts in cluster.values() for host in hosts):
            if not host.rpartition(":")[0] or not host.rpartition(":")[2].isdecimal():
                raise ValueError(host)
        if not cluster:
            return {}, "", 0
        return cluster, str(spec["task"]["type"]), int(spec["task"]["index"])
    except (ValueError, KeyError, AttributeError, TypeError):
        what = f"{name}={shown(written[:80])} does not describe a cluster and this node's task in it"
        raise UsageError(what, OFF) from None
