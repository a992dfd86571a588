"""A restart after the death of a rank."""

import os
import signal
import time

from tests.benchmarks.harness import OURS, TORCHRUN, Experiment, Job, Launcher, Row, Size, Values, ddplaunch, torchrun

# Without it torchrun's restarts meet the keys of the previous attempt and fail (torch 2.13, gloo).
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def experiment(size: Size) -> Experiment:
    def restarted(launcher: Launcher, variables: dict[str, str]) -> Values:
        with Job(launcher(size.few, "collective.py"), variables, hold=True) as job:
            job.until("held", size.few)
            began = time.monotonic()
            os.kill(job.pids("held")[size.few - 1], signal.SIGKILL)
            job.until("collective", size.few, attempt=1)
            job.release()
            job.succeed()
            return {"torch": max(job.times("torch", 1)) - began}

    turns = {
        OURS: lambda: restarted(ddplaunch("--max-restarts", "1"), {}),
        TORCHRUN: lambda: restarted(torchrun("--max-restarts=1"), RESTARTABLE),
    }
    what = f"restart: until all {size.few} ranks are past `import torch`"
    return Experiment(turns, (Row(what, "torch", "s", TORCHRUN),))
