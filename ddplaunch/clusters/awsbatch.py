"""AWS Batch: a node of a multi-node parallel job.

The variables are those of docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html. Any node may be the main one,
which ends the job when it ends, so ranks are counted from it. It is not told its own address.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import check_below, is_set, job_port, numbers, text

NNODES = "AWS_BATCH_JOB_NUM_NODES"  # 2
INDEX = "AWS_BATCH_JOB_NODE_INDEX"  # 1
MAIN = "AWS_BATCH_JOB_MAIN_NODE_INDEX"  # 0
ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"  # 10.0.0.4; not set on the main node
JOB_ID = "AWS_BATCH_JOB_ID"  # 1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e#1: the node's index after the job's own id

ELSEWHERE = ("192.0.2.1", 9)  # of a network that is for documentation (RFC 5737)


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job."""
    if not is_set(environ, NNODES):
        return None
    nnodes, index, main = numbers(environ, NNODES, INDEX, MAIN)
    check_below(index, nnodes, INDEX, NNODES)
    check_below(main, nnodes, MAIN, NNODES)
    told = index != main
    job = environ.get(JOB_ID, "").partition("#")[0]
    return Finding(
        "awsbatch",
        (NNODES, INDEX, MAIN, *([ADDRESS] if told else [])),
        nnodes=nnodes,
        node_rank=(index - main) % nnodes,
        address=text(environ, ADDRESS) if told else _own_address(),
        port=job_port(job) if job else None,
        run_id=job or None,
    )


def _own_address() -> str | None:
    """Return the address that this machine sends from; None where it has no network."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ELSEWHERE)  # which sends nothing: the kernel only chooses the way
        except OSError:
            return None
        address: str = sock.getsockname()[0]
        return address
