"""The simplest launcher: ``python start_by_loop.py N PROGRAM`` starts N processes and waits for all."""

import os
import socket
import subprocess
import sys

count, program = int(sys.argv[1]), sys.argv[2]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ranks = [
    subprocess.Popen(
        [sys.executable, program],
        env={
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        },
    )
    for rank in range(count)
]
sys.exit(max(rank.wait() for rank in ranks))
