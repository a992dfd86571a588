"""Tests that a program with DDP on gloo ends, however late gloo's threads are with its last work."""

import ctypes
import hashlib
import threading

import pytest

from ddplaunch.core.rank.rank_runner import load_private_module
from tests.conftest import write_program
from tests.start_modes import EXEC

# gloo's threads get a CPU only while the main thread sleeps, so each end begins before they have freed their last work.
PROGRAM = """
import gc, os, sys, weakref
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def set_up(with_group=False):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + str(set_up.count), rank=rank, world_size=2)
    set_up.count += 1
    group = dist.new_group([0, 1]) if with_group else None
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cpu)
        if open(f"/proc/self/task/{task}/comm").read() == "pt_gloo_runloop\\n":
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    return group

def train(group=None, optimizer=torch.optim.SGD, **options):
    model = DistributedDataParallel(torch.nn.Linear(10, 5), process_group=group, **options)
    steps = optimizer(model.parameters(), lr=0.001)
    for _ in range(3):
        steps.zero_grad()
        model(torch.randn(20, 10)).square().sum().backward()
        steps.step()
    return model

def frees_the_model_after_destroy(**options):
    set_up()
    model = train(**options)
    dist.destroy_process_group()

def frees_a_model_of_another_group():
    model = train(set_up(with_group=True))
    dist.destroy_process_group(model.process_group)
    del model
    dist.destroy_process_group()

def frees_a_cycle():
    set_up()
    model = train()
    model.itself = [model]
    dist.destroy_process_group()
    del model
    gc.collect()

def raises():
    set_up()
    model = train()
    dist.destroy_process_group()
    raise ValueError

def threads():
    return sorted(open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))

rank, set_up.count = int(os.environ["RANK"]), 0
cpus = sorted(os.sched_getaffinity(0))
cpu = [cpus[rank % len(cpus)]]
frees_the_model_after_destroy()
print("SGD", threads().count("pt_gloo_runloop\\n"))
frees_the_model_after_destroy(optimizer=torch.optim.Adam, static_graph=True)
print("Adam")
frees_a_model_of_another_group()
print("group")
frees_a_cycle()
print("cycle")
try:
    raises()
except ValueError:
    print("exception", flush=True)
set_up()
kept = train()
if rank:
    dist.destroy_process_group()
sys.exit(0)
"""


@pytest.mark.ci
@pytest.mark.parametrize("mode", [("--start", "zygote"), EXEC], ids=["zygote", "exec"])
def test_ends_of_programs_with_ddp(run_ddplaunch, tmp_path, mode):
    path = write_program(tmp_path, "ends", PROGRAM)
    done = run_ddplaunch("run", "--nproc", "2", *mode, "--show", "1", path, tmp_path / "store", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    # With --start exec DDP imports torch._dynamo after init_process_group, and a default argument keeps the group.
    first = "SGD 2" if mode == EXEC else "SGD 0"
    assert done.stdout.replace("[1] ", "").splitlines() == [first, "Adam", "group", "cycle", "exception"]


def test_a_rank_ends_after_gloos_threads_have_finished_their_work():
    """Without that, the interpreter ends them in a destructor, and the process aborts."""
    begun, done = threading.Event(), []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)  # some hundredths of a second, without the GIL
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    load_private_module("core/rank/gloo_teardown").wait_for_threads()
    assert done
    thread.join()
