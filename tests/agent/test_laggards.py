"""A rank that hangs in its last breath is named, with the process to look at."""

from __future__ import annotations

from ddplaunch.agent.laggards import QUIET
from tests.conftest import wait_until, write

ENDS_WHEN_TOLD = """
    import os, time

    print(os.environ["RANK"], os.getpid(), flush=True)
    while os.environ["RANK"] in ("0", "3") and not os.path.exists("end"):
        time.sleep(0.05)
"""


def test_those_that_still_run_are_named_once(start, tmp_path):
    job = start("run", "--nproc", "4", write(tmp_path, "train.py", ENDS_WHEN_TOLD))
    wait_until(job.stderr, "a word on the ranks that still run", QUIET + 60)
    pids = dict(line.split()[1:] for line in job.stdout().splitlines())
    assert job.stderr() == (
        "ddplaunch: the other ranks of this node are done; "
        f"waiting for rank 0 (pid {pids['0']}), rank 3 (pid {pids['3']})\n"
    )
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert job.stderr().count("\n") == 1
    job.assert_nothing_left()
