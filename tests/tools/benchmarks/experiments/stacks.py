"""How long a job takes to answer which rank waits for which: all ranks but one wait in a collective."""

import time

from ddplaunch.cli import client
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.request import InspectJobRequest
from tests.tools.benchmarks import harness as bench


def _measure_inspection(ranks: int) -> float:
    with bench.Job(bench.ddplaunch()(ranks, "collective.py"), variables={"BENCH_ABSENT": "1"}, hold=True) as job:
        job.wait_for_ranks("held", ranks)
        (path,) = [path for path in list_sockets() if path.endswith(f".{job.launchers[0].pid}")]
        began = time.monotonic()
        found = client.send_request(path, InspectJobRequest(Detail.WAITS)).inspection
        seconds = time.monotonic() - began
        if not all(rank.threads for rank in found.ranks):
            raise bench.BenchmarkError("a rank without a stack")
        job.release()
        job.finish()  # with the absent rank's end the others fail
        return seconds


def experiment(size: bench.Size) -> bench.Experiment:
    sizes = (size.many, 8 * size.many)

    def measure_all() -> bench.Values:
        return {f"stacks_{ranks}": _measure_inspection(ranks) for ranks in sizes}

    rows = (bench.Row(f"stacks and collectives of {ranks} ranks", f"stacks_{ranks}", "s") for ranks in sizes)
    return bench.Experiment({bench.DDPLAUNCH: measure_all}, tuple(rows), rounds=3)
