"""The launchers that the fault matrix is run with, each with the same options."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import BackgroundCommand, clean_environment
from tests.faults.rows import HEARTBEAT
from tests.virtual_hosts.host import Host

PORT = 29500
PROGRAM = Path(__file__).with_name("program.py")

_MARGIN = ("--heartbeat-timeout", "--grace", "--join-timeout", "--log-dir", "--preload")
"""Options that torchrun has no counterpart of."""


def words(
    launcher: str, node: int, nnodes: int, address: str, port: int, restarts: int, more: Sequence[str]
) -> list[str]:
    """The command line of one node; ``more`` are options of ddplaunch, each with its value."""
    common = ["--nnodes", str(nnodes), "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
    common += ["--max-restarts", str(restarts)]
    if launcher == "torchrun":
        kept = [
            word
            for flag, value in zip(more[::2], more[1::2], strict=True)
            if flag not in _MARGIN
            for word in (flag, value)
        ]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *common, *kept]
    beat = ["--heartbeat-timeout", f"{HEARTBEAT:g}"]
    return [sys.executable, "-m", "ddplaunch", "run", "--nproc", "2", *common, *beat, *more]


class Run(BackgroundCommand):
    """One launcher on a host, its output in files, its temporary files in a folder of the host's own."""

    def __init__(self, host: Host, command: Sequence[str], folder: Path, name: str) -> None:
        self.host = host
        self.out, self.err, self.tmp = (folder / f"{name}.{kind}" for kind in ("out", "err", "tmp"))
        self.tmp.mkdir()
        environment = clean_environment(
            {"TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        )
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = host.start(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.fault_at: float | None = None
        self.verdict_at: float | None = None

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def under_way(self) -> list[tuple[int, int, int]]:
        """Rank, attempt and pid on its host of each rank that has reported its start."""
        found = re.findall(r"under way: rank (\d+), attempt (\d+), pid (\d+)", self.stdout())
        return [(int(rank), int(attempt), int(pid)) for rank, attempt, pid in found]

    def steps(self) -> int:
        """Return how many steps rank 0 has printed."""
        return self.stdout().count("step ")

    def pid_outside(self, inside: int) -> int:
        """The pid, seen from here, of what is ``inside`` on the host."""
        for pid in self.host.processes():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it ended
            if re.search(rf"(?m)^NSpid:.*\t{inside}$", status):
                return pid
        raise ProcessLookupError(f"no pid {inside} on {self.host.name}")

    def connected(self, port: int) -> bool:
        """Whether the host has a TCP connection to or from that port, or listens there."""
        wanted = f":{port:04X}"
        lines = []
        for table in ("tcp", "tcp6"):
            try:
                lines += Path(f"/proc/{self.process.pid}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                pass  # it ended
        rows = [line.split()[1:4] for line in lines]
        return any(state == "01" and (ours.endswith(wanted) or theirs.endswith(wanted)) for ours, theirs, state in rows)


def command_line(pid: int) -> str:
    """Return the command line of a process, for messages."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"
    return " ".join(os.path.basename(word) for word in line.split())[:60]
