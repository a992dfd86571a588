"""``python -m tests.benchmarks.spares``: measures how soon a spare replaces a machine that lost its power.

Three virtual hosts, two of which train; every 0.1 s they add up a number. Measured is the time from the loss of power
to the first sum of the next attempt. torchrun gets what it has for this: ``--nnodes 2`` and a third agent. Both have
15 s of silence as their default for a lost node. It asserts nothing about seconds; the exit code is 1 where ddplaunch
did not go on.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import clean_environment, ddplaunch_command
from tests.virtual_hosts.network import Network

SILENCE = 15.0  # seconds after which a node is lost, for both
RECOVERY_TIMEOUT_S = 90.0  # seconds that a launcher has to go on

PROGRAM = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = True
while True:
    dist.all_reduce(torch.ones(1))
    if first and dist.get_rank() == 0:
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "trains", time.time(), flush=True)
    first = False
    time.sleep(0.1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.spares", description=(__doc__ or "").split(": ")[1]
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each launcher [default: 3]")
    rounds = parser.parse_args().rounds
    measured: dict[str, list[float | None]] = {"ddplaunch": [], "torchrun": []}
    for _ in range(rounds):
        for launcher, found in measured.items():
            found.append(replaced_after(launcher))
            print(f"{launcher}: {_shown(found[-1])}", file=sys.stderr, flush=True)
    print(f"silence of {SILENCE:g} s is a loss; {rounds} rounds, from the loss of power to the next sum:")
    for launcher, found in measured.items():
        went_on = [each for each in found if each is not None]
        middle = f"median {statistics.median(went_on):.1f} s, at most {max(went_on):.1f} s" if went_on else "never"
        print(f"  {launcher:9}  went on {len(went_on)} of {rounds} times; {middle}")
    return int(None in measured["ddplaunch"])


def _shown(seconds: float | None) -> str:
    return f"not within {RECOVERY_TIMEOUT_S:g} s" if seconds is None else f"{seconds:.1f} s"


def replaced_after(launcher: str) -> float | None:
    """Seconds from the loss of power of node 1 to the next attempt's first sum; None if that does not come."""
    with tempfile.TemporaryDirectory() as folder, Network(3) as network:
        program = Path(folder, "train.py")
        program.write_text(PROGRAM)
        out = Path(folder, "out")
        running = []
        for host in network.hosts:
            with (out if host.number == 0 else Path(folder, host.name)).open("wb") as file:
                words = _words(launcher, host.number, network.hosts[0].address)
                env = clean_environment({"TMPDIR": folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"})
                pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                running.append(host.start([*words, program], cwd=Path(folder), env=env, **pipes))
            if host.number == 1:
                _trains(out, 1)  # so that the third is the spare
                time.sleep(2)
        time.sleep(10)  # the third has imported what it needs, and waits
        network.hosts[1].power_off()
        lost = time.time()
        again = _trains(out, 2)
        for process in running:
            process.kill()
        return None if again is None else again - lost


def _words(launcher: str, node: int, address: str) -> list[str]:
    if launcher == "ddplaunch":
        words = ("--nnodes", "2", "--spares", "1", "--join-window", "0.5", "--max-restarts", "3", "--nproc", "1")
        return ddplaunch_command("run", *words, "--node-rank", str(node), "--master-addr", address)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"),
        *(
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}:29500",
            "--rdzv-id=x",
            f"--local-addr=10.77.0.{10 + node}",
        ),
        f"--rdzv-conf=is_host={int(node == 0)}",
    ]


def _trains(out: Path, attempts: int) -> float | None:
    """When attempt number ``attempts`` began to train; None if it does not."""
    end = time.monotonic() + RECOVERY_TIMEOUT_S
    while time.monotonic() < end:
        found = re.findall(r"attempt \d+ trains ([\d.]+)", out.read_text(errors="replace"))
        if len(found) >= attempts:
            return float(found[-1])
        time.sleep(0.05)
    print(out.read_text(errors="replace")[-2000:], file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main())
