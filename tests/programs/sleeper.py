"""A rank that prints "ready" and waits; its arguments select what it does meanwhile."""

import os
import signal
import subprocess
import sys
import time


def daemon():
    """Start a detached process that ends at once; return its pid."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 16))


how = set(sys.argv[1:])
if "children" in how:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000"])
if "deaf" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if how & {"collective", "collective-once"}:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
if "checkpoint" in how:
    child = subprocess.Popen(["sleep", "1000"])

    def checkpoint(number, frame):
        time.sleep(0.5)
        state = "alive" if child.poll() is None else "dead"
        os.write(1, f"checkpoint with its child {state}\n".encode())  # print() may be what we interrupt
        sys.exit(0)

    signal.signal(signal.SIGTERM, checkpoint)
if "daemons" in how:
    for _ in range(5):
        print("daemon", daemon(), flush=True)
try:
    print("ready", flush=True)
    if "return" in how:
        sys.exit(0)
    if "collective-once" in how:
        dist.destroy_process_group()
        sys.exit(0)
    if "collective" in how:
        if dist.get_rank() == 0:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
    time.sleep(1000)
finally:
    if "finally" in how:
        print("cleaned up", flush=True)
