"""A restart after the death of a rank."""

import os
import signal
import time

from tests.tools.benchmarks import harness as bench

# Without it torchrun's restarts meet the keys of the previous attempt and fail (torch 2.13, gloo).
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def experiment(size: bench.Size) -> bench.Experiment:
    def measure_restart(launcher: bench.Launcher, variables: dict[str, str]) -> bench.Values:
        with bench.Job(launcher(size.few, "collective.py"), variables=variables, hold=True) as job:
            job.wait_for_ranks("held", size.few)
            began = time.monotonic()
            os.kill(job.pids("held")[size.few - 1], signal.SIGKILL)
            job.wait_for_ranks("collective", size.few, attempt=1)
            job.release()
            job.succeed()
            return {"torch": max(job.times("torch", 1)) - began}

    turns = {
        bench.DDPLAUNCH: lambda: measure_restart(bench.ddplaunch("--max-restarts", "1"), {}),
        bench.TORCHRUN: lambda: measure_restart(bench.torchrun("--max-restarts=1"), RESTARTABLE),
    }
    what = f"restart: until all {size.few} ranks are past `import torch`"
    return bench.Experiment(turns, (bench.Row(what, "torch", "s", bench.TORCHRUN),))
