"""Three gloo ranks; in the step before the last, rank 2 does what argv[1] says, while the others wait for it.

argv[1] may have several words, separated by commas: one for each attempt.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from ddplaunch import runtime

LONG = 6.0  # seconds: three times the stall timeout of the tests


def sleep():
    time.sleep(1000)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def validate(seconds=LONG):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10000))


def save():
    """Write in pauses, as to a slow disk."""
    until = time.monotonic() + LONG
    with open(f"checkpoint.{os.getpid()}", "wb") as file:
        while time.monotonic() < until:
            file.write(bytes(1 << 20))
            file.flush()
            time.sleep(0.4)
    os.unlink(file.name)


def build():
    """Wait for a child process that computes, as a compiler's worker does."""
    subprocess.run([sys.executable, "-c", f"import time\nt = time.time()\nwhile time.time() < t + {LONG}: pass"])


def chat():
    """Sleep, but print."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        time.sleep(0.5)
        print("still here", flush=True)


def upload():
    """Send 20 KiB a second to the port argv[2] of this machine, which is not one of the job."""
    until = time.monotonic() + LONG
    with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as there:
        while time.monotonic() < until:
            there.sendall(bytes(4 << 10))
            time.sleep(0.2)


def reply():
    """Wait for a reply from that port, which never comes."""
    with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as there:
        there.recv(1)


def poll():
    """Sleep, but report progress."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        runtime.working()
        time.sleep(0.5)


def store():
    """Wait for a key that rank 0 sets after its work, while its collective waits for this rank."""
    dist.distributed_c10d._get_default_store().wait(["ready"])


def old():
    """Hang, in a torch from which main has removed the flight recorder."""
    sleep()


def main(what):
    if what == "old":
        del torch._C._distributed_c10d._dump_fr_trace_json
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(6))
    print("started", rank, flush=True)
    if what == "idle":
        sleep()
    if what == "recv":
        dist.recv(torch.ones(1), src=(rank + 1) % 3)
    for _ in range(12 if what == "steps" else 0):
        time.sleep(0.5)
        dist.all_reduce(torch.ones(6))
    if rank == 0 and what == "store":
        begun = dist.all_reduce(torch.ones(6), async_op=True)
        validate()
        dist.distributed_c10d._get_default_store().set("ready", "")
        begun.wait()
        return
    if rank == 2 and what != "steps":
        globals()[what]()
    dist.all_reduce(torch.ones(6))
    dist.destroy_process_group()


what = sys.argv[1].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
if what == "torchless":
    time.sleep(LONG)
    sys.exit()
elif what == "absent" and os.environ["RANK"] == "2":
    sleep()
main(what)
