"""Tests of hangs outside collectives: calls that no flight recorder has, and sleeping system calls."""

import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from ddplaunch.observe.diagnosis.rank_position import GLOO_TEARDOWN
from ddplaunch.observe.node.system_calls import BlockingCall, read_blocking_calls
from ddplaunch.observe.node.tree_usage import read_tree_usage
from tests.conftest import wait_until, write_program
from tests.observe.diagnosis.clauses import CHILD_WAIT, CYCLE, LOCK_WAIT
from tests.start_modes import LIGHT

PROGRAM = """
import fcntl, os, queue, sys, threading, time, types
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
rank, what = dist.get_rank(), sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
deep = types.ModuleType("deep")
source = "import time\\ndef call(n):\\n    call(n - 1) if n else time.sleep(600)"
exec(compile(source, "/lib/python3/site-packages/deep.py", "exec"), deep.__dict__)


def step():
    if what == "deep":
        return deep.call(120)  # stuck
    time.sleep(600)  # stuck


if what == "ring":
    if rank == 2:
        step()
    ops = [dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % 3), dist.P2POp(dist.irecv, torch.ones(1), (rank - 1) % 3)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()  # wait
if what == "new_group":
    for members in ([0, 1], [1, 2])[: 1 if rank == 2 else 2]:
        dist.new_group(members)  # group
if what == "local_group" and rank == 1:  # its backend makes no connections, as NCCL's does not
    import torch.testing._internal.distributed.fake_pg
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.new_group([1, 2], backend="fake", use_local_synchronization=True)  # local
if what == "flock":
    file = open("lock", "w")
    while rank and not os.path.exists("locked"):
        time.sleep(0.01)
    fcntl.flock(file, fcntl.LOCK_EX)  # lock
    open("locked", "w").close()
if what == "feeder" and rank == 2:
    threading.Thread(target=lambda: 1 / 0, name="feed").start()  # feed
    queue.Queue().get()  # get
if rank == 2:
    step()
if what == "irecv":
    dist.irecv(torch.ones(1), src=2).wait()  # irecv
dist.all_reduce(torch.ones(6))  # reduce
"""

SENTENCES = {
    "deep": "ranks 0, 1 wait in all_reduce #2 of default_pg (float32[6]), entered at {reduce}; "
    "rank 2 has not entered it: step at {stuck}",
    "irecv": "ranks 0, 1 wait in the wait() of isend or irecv, called at {irecv}; rank 2 does not communicate: "
    "step at {stuck}",
    "ring": "rank 0 waits in irecv from rank 2, called at {wait}; rank 2 does not send: step at {stuck}",
    "new_group": "rank 1 waits in new_group (ranks 1, 2), called at {group}; rank 2 has not called it: step at {stuck}",
    "local_group": "rank 1 waits in new_group (ranks 1, 2), called at {local}; rank 2 has not called it: "
    "step at {stuck}",
    "feeder": "ranks 0, 1 wait in all_reduce #2 of default_pg (float32[6]), entered at {reduce}; rank 2 has not "
    "entered it: it waits for a queue to fill, {get} (its thread feed had failed: ZeroDivisionError: division by zero "
    "(<lambda> at {feed}))",
    "flock": "ranks 1, 2 wait in flock, called at {lock}; rank 0 holds the lock: it waits in all_reduce #2 of "
    f"default_pg, {{reduce}}; {CYCLE}: 0 → 1 → 0",
}


@pytest.mark.slow
def test_stacks_name_hangs_outside_collectives(start_ddplaunch, run_in_fork, tmp_path):
    """The job hangs in another way in each attempt, until a rank is killed."""
    options = ("--max-restarts", str(len(SENTENCES)), "--restart-on", "always", "--min-uptime", "0", "--grace", "0")
    job = start_ddplaunch("run", *options, "--nproc", "3", write_program(tmp_path, "train.py", PROGRAM), *SENTENCES)
    for what, sentence in SENTENCES.items():
        lines = {}
        for number, line in enumerate(PROGRAM.splitlines()):
            text, mark, name = line.rpartition("# ")
            if mark and (name != "stuck" or ("deep" in text) == (what == "deep")):
                lines[name] = f"train.py:{number}"
        wanted = sentence.format_map(lines)
        wait_until(lambda wanted=wanted: wanted in run_in_fork("stacks", str(job.process.pid)).stdout, wanted, 20)
        os.kill(job.ranks()[0], signal.SIGKILL)
    job.process.kill()
    job.assert_nothing_left()


JOINS_A_THREAD = """
import ctypes, os
libc, thread, before = ctypes.PyDLL(None), ctypes.c_ulong(), set(os.listdir("/proc/self/task"))
libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(600))
(number,) = set(os.listdir("/proc/self/task")) - before
with open(f"/proc/self/task/{{number}}/comm", "w") as file:
    file.write("{name}")
libc.pthread_join(thread, None)  # with the GIL, as torch's destructor does
"""


def test_system_calls_in_which_a_process_sleeps(tmp_path):
    path = write_program(tmp_path, "lock", "")
    held = os.open(path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.mkfifo(tmp_path / "fifo")
    programs = {
        1: ("import fcntl; fcntl.flock(open('lock'), fcntl.LOCK_EX)", BlockingCall(LOCK_WAIT, holder=0)),
        2: ("input()", BlockingCall("waits for input")),
        3: ("open('fifo').read()", BlockingCall("waits for the other end of a fifo")),
        4: ("import os; os.system('exec sleep 60')", BlockingCall(CHILD_WAIT)),
        5: ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", BlockingCall("asleep")),
        6: (JOINS_A_THREAD.format(name="pt_gloo_runloop"), BlockingCall(GLOO_TEARDOWN)),
        7: (JOINS_A_THREAD.format(name="pt_autograd_0"), BlockingCall("asleep")),
    }
    started = {
        rank: subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE)
        for rank, (program, _) in programs.items()
    }
    try:
        pids = {0: os.getpid(), **{rank: process.pid for rank, process in started.items()}}
        wanted = {rank: sleep for rank, (_, sleep) in programs.items()}
        wait_until(lambda: {**read_blocking_calls(pids, 0), 0: None} == {0: None, **wanted}, "all asleep", 10)
    finally:
        for process in started.values():
            subprocess.run(["pkill", "-P", str(process.pid)], check=False)
            process.kill()
            process.wait()
        os.close(held)


def test_the_cpu_time_of_gloos_threads_is_not_counted():
    """The threads of idle groups wake up all the time."""

    def spin(name: bytes) -> None:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        done.append(name)
        over.wait()

    counted = []
    for name in (b"gloo_tcp_loop", b"train"):
        done, over = list[bytes](), threading.Event()
        before = read_tree_usage([os.getpid()])[os.getpid()].cpu_s
        thread = threading.Thread(target=spin, args=(name,))
        thread.start()
        wait_until(lambda done=done: bool(done), "the end of the work", 10)
        counted.append(read_tree_usage([os.getpid()])[os.getpid()].cpu_s - before)
        over.set()
        thread.join()
    assert counted[0] < 0.15 < counted[1]


def test_the_time_in_which_a_thread_waits_for_a_cpu_is_read():
    """Two processes share one CPU; both would use it all the time."""
    cpu = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        pids = [process.pid for process in both]

        def all_waited() -> bool:
            used = read_tree_usage(pids)
            return all(used[pid].threads[pid].waited_s > 0.1 < used[pid].threads[pid].cpu_s for pid in pids)

        wait_until(all_waited, "both have used the CPU, and waited for it", 10)
    finally:
        for process in both:
            process.kill()
            process.wait()


CHILDREN = """
import fcntl, multiprocessing, os, time
import filelock

rank, forks = int(os.environ["RANK"]), multiprocessing.get_context("fork")


def nap(*_):
    time.sleep(600)  # nap


if rank in (0, 1):
    child = forks.Process(target=nap)
    child.start()
    if rank:
        child.join()
elif rank == 2:
    queue = forks.Queue()
    queue.put(b"x" * 10_000_000)
elif rank == 3:
    forks.Pool(1).map(nap, [1])
elif rank == 4:
    forks.Queue().get()
else:
    file = open("lock", "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    filelock.FileLock("lock").acquire()
"""


@pytest.mark.slow
def test_a_wait_for_a_child_process_or_a_polled_lock_is_named(start_ddplaunch, run_in_fork, tmp_path):
    """The stack of the child is shown, also at the exit of the rank."""
    nap = f"train.py:{next(n for n, line in enumerate(CHILDREN.splitlines()) if line.endswith('# nap'))}"
    job = start_ddplaunch("run", "--nproc", "6", *LIGHT, write_program(tmp_path, "train.py", CHILDREN))
    states = {
        "rank 0: waits at its exit for a child process to end",
        CHILD_WAIT,
        "rank 2: waits at its exit until its queue is read",
        "waits for its process pool",
        "waits for a message from another process",
        LOCK_WAIT,
    }

    def stacks() -> str:
        return run_in_fork("stacks", str(job.process.pid)).stdout

    wait_until(lambda: all(state in stacks() for state in states), "all six waits", 20)
    children = re.findall(r"  its child process \(pid \d+\):\n  nap at (.*)\n", stacks())
    assert children == [nap] * 3


NEW_INTERPRETERS = """
import concurrent.futures, multiprocessing, os, sys, time


def nap(*_):
    open(f"up.{os.environ['RANK']}", "w").close()
    time.sleep(600)  # nap


if __name__ == "__main__":
    rank, context = int(os.environ["RANK"]), multiprocessing.get_context(sys.argv[1])
    if rank < 2:
        child = context.Process(target=nap)
        child.start()
        child.join(600 if rank else None)
    elif rank == 2:
        context.Pool(1).map(nap, [1])
    else:
        concurrent.futures.ProcessPoolExecutor(1, context).submit(nap).result()
"""


@pytest.mark.ci
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_stacks_of_children_that_are_new_interpreters(start_ddplaunch, run_in_fork, tmp_path, method):
    nap = f"train.py:{next(n for n, line in enumerate(NEW_INTERPRETERS.splitlines()) if line.endswith('# nap'))}"
    program = write_program(tmp_path, "train.py", NEW_INTERPRETERS)

    def children() -> list[str]:
        stacks = run_in_fork("stacks", str(job.process.pid)).stdout
        return re.findall(r"  its child process \(pid \d+\):\n  (.*)\n", stacks)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # forkserver has a socket there: its path must be short
        job = start_ddplaunch("run", "--nproc", "4", *LIGHT, program, method, env={"TMPDIR": folder})
        wait_until(lambda: len(list(tmp_path.glob("up.*"))) == 4, "all children", 30)
        wait_until(lambda: children() == [f"nap at {nap}"] * 4, "the stacks", 20)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143


REMOTE_CALLS = """
import os, time, torch
from torch.distributed import rpc


def nap():
    time.sleep(600)  # nap


rank = int(os.environ["RANK"])
patient = rpc.TensorPipeRpcBackendOptions(rpc_timeout=600)  # by default a call fails after 60 s
rpc.init_rpc(f"w{rank}", rank=rank, world_size=5, rpc_backend_options=patient)
if rank == 0:
    rpc.rpc_sync("w4", nap)  # sync
elif rank == 1:
    rpc.rpc_async("w4", nap).wait()  # wait
elif rank == 2:
    rpc.remote("w4", nap).to_here()  # fetch
elif rank == 3:
    torch.futures.wait_all([rpc.rpc_async("w4", nap)])  # all
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ci
def test_the_callee_of_an_rpc_is_named(start_ddplaunch, run_in_fork, tmp_path):
    at = {line.partition("  # ")[2]: f"train.py:{n}" for n, line in enumerate(REMOTE_CALLS.splitlines())}
    job = start_ddplaunch("run", "--nproc", "5", write_program(tmp_path, "train.py", REMOTE_CALLS))
    late = f"rank 4 has not replied: nap at {at['nap']}"
    asyncs = f"ranks 1, 3 wait in the wait() of rpc_async, called at {at['wait']}, {at['all']}; {late}"
    expected = [
        f"rank 0 waits in rpc_sync, called at {at['sync']}; {late}",
        f"rank 2 waits in to_here, called at {at['fetch']}; {late}",
    ]

    def found() -> bool:
        sentences = run_in_fork("stacks", str(job.process.pid)).stdout.splitlines()
        return {asyncs, *expected} <= {*sentences}

    wait_until(found, "the three sentences", 40)


PAUSES = """
import os, signal, sys
import torch.distributed as dist

signal.signal(signal.SIGUSR1, lambda *_: None)
if os.environ["RANK"] == "2":
    sys.exit(signal.pause())
dist.init_process_group("gloo", world_size=2, rank=int(os.environ["RANK"]))
if os.environ["RANK"] == "1":
    print("pauses", flush=True)
    signal.pause()  # pause
    print("goes on", flush=True)
dist.barrier()
"""


@pytest.mark.ci
def test_an_inspection_does_not_end_a_wait_for_a_signal(start_ddplaunch, run_in_fork, tmp_path):
    """A signal of ours would. Without a process group nothing but a signal shows where the rank is."""
    pause = f"train.py:{next(n for n, line in enumerate(PAUSES.splitlines()) if line.endswith('# pause'))}"
    job = start_ddplaunch("run", "--nproc", "3", write_program(tmp_path, "train.py", PAUSES))
    wait_until(lambda: "pauses" in job.stdout(), "the pause")
    late = f"rank 1 has not entered it: it waits for a signal, {pause}"

    def stacks() -> str:
        return run_in_fork("stacks", str(job.process.pid)).stdout

    wait_until(lambda: late in stacks(), "the sentence", 20)
    assert "it waits for any signal, as in pause()" in stacks()
    assert "goes on" not in job.stdout()
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert "goes on" in job.stdout()
