"""A user of a cluster for tests: commands of ddplaunch that reach it by the real kubectl."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import BackgroundJob, Launch, wait_until
from tests.constant_override import write_launcher
from tests.features.submit.states import SHORT_INTERVALS
from tests.fork_server import CONSTANTS
from tests.kubernetes.api_server import ApiServer
from tests.start_modes import LIGHT

IMAGE = "registry.example/wine:1"
SUBMIT = ("submit", "--scheduler", "kubernetes", "--container-image", IMAGE)
TWO = ("--nodes", "2", "--nproc", "1", *LIGHT)
"""Two nodes with a rank each."""


def unsupported() -> str | None:
    """Why there can be no cluster here; None if there can."""
    return None if shutil.which("kubectl") else "apt-get install kubernetes-client"


class User:
    """Types commands, and starts some that go on."""

    def __init__(self, server: ApiServer, folder: Path, run: Launch) -> None:
        self.server, self.folder, self._run = server, folder, run
        self.env = {
            "KUBECONFIG": str(server.kubeconfig("test")),
            "HOME": str(folder),  # where kubectl keeps what it has read
            "XDG_STATE_HOME": str(folder / "state"),
            CONSTANTS: f"{SHORT_INTERVALS[CONSTANTS]} features.kubernetes.pod_logs.RETRY_INTERVAL_S=0.2",
        }
        self._started: list[BackgroundJob] = []

    def type(self, *words: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return self._run(*words, env={**self.env, **(env or {})})

    def submit(self, *words: str) -> str:
        """Submit a job; return its number."""
        done = self.type(*SUBMIT, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition(":")[0].removeprefix("job ")

    def start(self, *words: str, input: str | None = None) -> BackgroundJob:
        """Start a command with short intervals between its queries; ``input``: what it reads from a file."""
        launcher = write_launcher(
            self.folder,
            """
            from ddplaunch.features.kubernetes import pod_logs
            from ddplaunch.features.runs import stop
            from ddplaunch.system.schedulers import log_follower, outage_notice

            outage_notice.FIRST_NOTICE_DELAY_S = 1.0
            log_follower.LOG_POLL_INTERVAL_S = 0.05
            log_follower.MIN_QUERY_INTERVAL_S = pod_logs.RETRY_INTERVAL_S = stop.POLL_INTERVAL_S = 0.2
            log_follower.MAX_QUERY_INTERVAL_S = 0.5
            """,
        )
        stdin = subprocess.DEVNULL
        if input is not None:
            (self.folder / "input").write_text(input)
            stdin = os.open(self.folder / "input", os.O_RDONLY)
        self._started.append(BackgroundJob(self.folder, words, self.env, executable=launcher, stdin=stdin))
        return self._started[-1]

    def state(self, number: str) -> str:
        """Its state in ``ps --json``."""
        found = json.loads(self.type("ps", "--json").stdout)
        return next(str(each["state"]) for each in found if each["run"] == number and each["pid"] is None)

    def wait_for(self, number: str, text: str) -> None:
        """Wait until ``text`` is in the log of a job."""
        wait_until(lambda: text in self.type("logs", number).stdout, f"{text} in the log of {number}")

    def close(self) -> None:
        for job in self._started:
            job.process.kill()
            job.process.wait()
