"""What an older kernel, or a container, does not have: jobs run without it, or the message names it."""

import os
import shlex
import signal
from pathlib import Path

import pytest

from tests.conftest import command, ran, write
from tests.seccomp import without
from tests.starts import FORKED
from tests.warm.conftest import Shell, gone
from tests.warm.test_kills import again, begin

PIDFDS = ("pidfd_open", "pidfd_send_signal")


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])  # Linux before 5.3; container runtimes that do not know them
@pytest.mark.parametrize("calls", [PIDFDS, PIDFDS[1:]], ids="+".join)
def test_a_failed_job_is_stopped_and_reported_without_pidfds(tmp_path, error, calls):
    program = write(
        tmp_path, "fails.py", "import os, time\nif os.environ['RANK'] == '1':\n    1 / 0\ntime.sleep(600)\n"
    )
    done = ran([*without(error, *calls), *command("run", "--nproc", "2", *FORKED, program)], tmp_path)
    assert done.returncode == 1, done
    assert "rank 1 failed with ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_ranks_of_any_kind_run_without_pidfds(tmp_path):
    program = str(write(tmp_path, "ends.py", "import os\nassert os.environ['RANK']\n"))
    for words in (["--nproc", "1", program], ["--nproc", "2", "--start", "exec", program], ["--no-python", "true"]):
        done = ran([*without("ENOSYS", *PIDFDS), *command("run", *words)], tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), words


class ShellWithout(Shell):
    """Runs ``ddplaunch`` without pidfds."""

    error: str

    def launch(self, *words: str | Path, nproc: int = 2) -> str:
        return f"{shlex.join(without(self.error, *PIDFDS))} {super().launch(*words, nproc=nproc)}"


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_warm_runs_without_pidfds(tmp_path, error):
    shell = ShellWithout(tmp_path)
    shell.error = error
    try:
        for killed in ("launcher", "zygote"):
            above, below = begin(shell)
            os.kill(above[killed], signal.SIGKILL)
            gone(above["launcher"], above["zygote"], above["guardian"], *below)
            assert again(shell) == above["warm"]
        shell.log_out()
        gone(above["warm"])
    finally:
        shell.close()
