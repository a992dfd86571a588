"""Replies of NCCL's RAS service: the samples of NVIDIA's user guide, and text in the forms of its source."""

import json

HEAD = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... ({seconds}s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""

HEALTHY = HEAD.format(seconds="0.00") + "    0         8         4         1         4        32   RUNNING      OK\n"

STOPPED = HEAD.format(seconds="2.05") + (
    """\
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
)

DEAD = STOPPED.replace(
    "INCOMPLETE\n  Missing communicator data from 1 job process",
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)",
).replace("The missing rank: 21", "Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213")

BEHIND = HEAD.format(seconds="0.00") + (
    """\
    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""
)

BEHIND_BY_OPERATION = BEHIND.replace("collective operation", "AllReduce operation").replace(
    """\
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
""",
    "  Rank 9 has not launched any operations -- GPU 1 managed by process 4711 on node 172.16.64.211\n",
)

ENDING = HEAD.format(seconds="0.00") + (
    """\
    0         1         4       1-2        32        32  FINALIZE  MISMATCH
    1         7         4         1         4        28   RUNNING      OK

Warnings
========

#0-0 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  28 ranks have status NOCOMM
  4 ranks have status RUNNING
  Rank 0 -- GPU 0 managed by process 507285 on node 172.16.64.210
  Rank 8 -- GPU 0 managed by process 1598388 on node 172.16.64.212
"""
)


def make_json(launched: dict[int, tuple[int, int]], missing: dict[int, int] | None = None) -> str:
    """The JSON of one communicator: by rank, its pid and its AllReduces; and the pids of missing ranks."""
    missing = missing or {}
    place = {"host": "172.16.64.245", "cuda_dev": 0, "nvml_dev": 0}
    good = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    communicator = {
        "hash": "0xae94423cfbb2ef4a",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(launched) + len(missing),
        "ranks_count": len(launched),
        "missing_ranks_count": len(missing),
        "ranks": [
            {"rank": rank, "pid": pid, **place, "status": good, "collective_counts": {"Broadcast": 0, "AllReduce": n}}
            for rank, (pid, n) in launched.items()
        ],
        "missing_ranks": [
            {"rank": rank, "pid": pid, **place, "status": {"unresponsive": True, "considered_dead": False}}
            for rank, pid in missing.items()
        ],
    }
    return json.dumps(
        {
            "nccl_version": "2.29.1",
            "cuda_runtime_version": 13000,
            "cuda_driver_version": 13000,
            "timestamp": "2025-12-19 13:06:53",
            "communicators_count": 1,
            "communicators": [communicator],
            "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
        },
        indent=2,
    )
