"""``kill -9`` of the last rank, while the others sleep, and while they wait for it in an all_reduce."""

import os
import signal
import time

from tests.tools.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    victim = size.few - 1

    def measure_kill(launcher: bench.Launcher, variables: dict[str, str]) -> float:
        """Milliseconds until every process of the job is gone."""
        with bench.Job(launcher(size.few, "collective.py"), variables=variables, hold=True) as job:
            job.wait_for_ranks("held", size.few)
            began = time.monotonic()
            os.kill(job.pids("held")[victim], signal.SIGKILL)
            if job.finish() == 0:
                raise bench.BenchmarkError("exit code 0 although a rank was killed")
            assert job.all_exited_at is not None
            return (job.all_exited_at - began) * 1000

    def measure_both(launcher: bench.Launcher) -> bench.Values:
        return {"asleep": measure_kill(launcher, {}), "waiting": measure_kill(launcher, {"BENCH_ABSENT": str(victim)})}

    what = f"{size.few} ranks, kill -9 of one"
    return bench.Experiment(
        bench.compare(measure_both, bench.DDPLAUNCH, bench.TORCHRUN, bench.SPAWN),
        (
            bench.Row(f"{what}, the others asleep: until all is gone", "asleep", "ms", bench.TORCHRUN),
            bench.Row(f"{what}, the others in a collective: until all is gone", "waiting", "ms", bench.TORCHRUN),
        ),
    )
