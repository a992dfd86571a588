"""Tests of the debugger of a rank on another host, over SSH, from hosts inside and outside the job."""

import os
import subprocess

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program
from tests.features.ssh.job import Job
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

WAITS = """
    import os, time
    print("ready", flush=True)
    while not os.path.exists("over"):
        time.sleep(0.01)
"""


def test_debug_reaches_a_rank_on_any_host(sshd, tmp_path):
    write_program(tmp_path, "train.py", WAITS)
    servers = sshd(3)
    job = Job(servers, tmp_path, "--hosts", "n0:2,n1:2", "--debug", "--run-id", "demo", *LIGHT, "train.py")
    state = {"XDG_STATE_HOME": str(servers.folder / "state")}
    environment = clean_environment({**os.environ, **state, **servers.environment})

    def debug(host: int, lines: str, *words: str) -> subprocess.CompletedProcess[str]:
        typed = tmp_path / "typed"
        typed.write_text(lines)
        with typed.open() as stdin:
            process = job.hosts[host].start(
                ddplaunch_command("debug", *words), cwd=tmp_path, env=environment, stdin=stdin,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            out, err = process.communicate(timeout=scaled_timeout(60))
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    try:
        job.wait_for("ready", 4)
        lines = "p 'rank', os.environ['RANK'], os.uname().nodename\n"
        for host, rank, words in (
            (0, 3, ("demo",)),  # the job runs over SSH
            (1, 0, ("demo",)),  # also from a node that is not node 0
            (0, 1, ("demo",)),
            (2, 2, ("demo", "--hosts", "n1")),
            (2, 3, ("demo", "--hosts", "root@n[0-1]")),
        ):
            done = debug(host, lines, *words, "--rank", str(rank))
            assert f"(rank {rank}) p 'rank'" in done.stdout, (host, rank, done.stdout, done.stderr)
            assert f"('rank', '{rank}', 'n{rank // 2}')" in done.stdout
            assert done.returncode == 0, done.stderr
        refused = debug(2, "", "demo", "--hosts", "n0,n1")
        assert (refused.returncode, "--hosts n0,n1 has 2 hosts" in refused.stderr) == (2, True)
        unknown = debug(2, "", "demo", "--hosts", "n0,n1", "--rank", "9")
        assert unknown.returncode == 69, unknown.stderr
        assert "rank 9 was not found on the hosts of --hosts n0,n1" in unknown.stderr
        write_program(tmp_path, "over", "")
        assert job.wait() == 0, job.stderr()
        job.assert_nothing_left()
    finally:
        job.process.kill()
        job.process.wait()
