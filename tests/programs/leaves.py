"""Ranks of which rank 0 exits early, or runs in a child process; argument: "exit" or "wrap"."""

import os
import subprocess
import sys

how = sys.argv[1]
if how == "wrap" and os.environ["RANK"] == "0":
    if "AGAIN" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})
    if len(sys.argv) == 2:
        sys.exit(subprocess.call([sys.executable, *sys.argv, "child"]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor(float(rank))
if how == "wrap":
    dist.all_reduce(total)
    print("met", int(total))
    dist.destroy_process_group()
    sys.exit()

store = dist.distributed_c10d._get_default_store()
new = store.add("arrivals", 1) <= world_size
print("the store is new, and not in a rank:", new and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True", flush=True)
if rank == 0:
    store.set("pid", str(os.getpid()))
first = int(store.get("pid"))
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3 * (rank == 1))
if rank == 0:
    os._exit(0)
while os.path.exists(f"/proc/{first}/exe"):  # a zombie has none
    pass
group = dist.new_group(list(range(1, world_size)), use_local_synchronization=True)
dist.all_reduce(total, group=group)
print("met", int(total), flush=True)
os._exit(0)
