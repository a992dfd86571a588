"""A rank that fails as its first argument says, if its number is among the other arguments; the rest wait for it."""

import ctypes
import os
import signal
import sys
import time

how, *which = sys.argv[1:]
rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mine = not which or str(rank) in which
print("rank", rank, "attempt", attempt, "parent", os.getppid(), flush=True)

if how.startswith("peer"):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("reduced", flush=True)
if how.endswith("-once") and attempt:
    if how.startswith("peer"):
        dist.destroy_process_group()
    sys.exit(0)
how = how.removesuffix("-once")
if mine:
    match how:
        case "exception":
            raise ValueError(f"rank {rank} fails")
        case "exit":
            sys.exit(7)
        case "kill" | "peer-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "bus":
            import mmap
            import tempfile

            with tempfile.TemporaryFile() as file:
                file.truncate(4096)
                memory = mmap.mmap(file.fileno(), 4096)
                file.truncate(0)
                memory[0]
        case "memory":
            held = [bytearray(16 << 20) for _ in range(1000)]
if how.startswith("peer"):
    dist.all_reduce(torch.ones(1))
time.sleep(1000)
