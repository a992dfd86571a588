"""Tests of inspections of running ranks: by ``ddplaunch stacks``, and before ranks are stopped."""

import json
import os
import re
import signal
import subprocess
from typing import Any, NamedTuple

import pytest

from tests.conftest import BackgroundJob, ddplaunch_command, free_port, is_alive, run_command, wait_until, write_program
from tests.constant_override import launcher_with_constant, write_launcher
from tests.observe.diagnosis.clauses import CYCLE, HOLDS_GIL, NO_SIGNAL, NOT_PYTHON
from tests.start_modes import EXEC, FORKED, LIGHT

INSPECTOR = "observe.node.inspection_machine"

HANG = """
    import os, re, signal, sys, time

    def build():
        time.sleep(600)  # build

    # An argument for each attempt: a word for each rank from the third on, or for all.
    number = int(os.environ["RANK"])
    words = sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])].split()
    what = words[0] if len(words) == 1 else [*words, "", ""][number - 2]
    if what == "before" and number == 2:
        build()
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")  # init
    rank, tensor = dist.get_rank(), torch.ones(6)
    for _ in range(3):
        dist.all_reduce(tensor)

    def step():
        if what == "sleep":
            time.sleep(600)  # sleep
        if what == "gil":
            re.match("(a+)+$", "a" * 60 + "b")  # gil
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "exec":
            os.execv("/bin/sleep", ["sleep", "600"])
        if what == "loader":
            from torch.utils.data import DataLoader
            for _ in DataLoader(Slow(), num_workers=2):  # loader
                pass
        if what == "gone":
            from torch.utils.data import DataLoader
            next(iter(DataLoader(Slow(), num_workers=1, timeout=600)))  # gone
        if what == "ending":
            class Last:
                def __del__(self, sleep=time.sleep):
                    sleep(600)

            globals()["last"] = Last()
            sys.exit()

    class Slow:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if what == "gone":
                os._exit(0)
            time.sleep(600)  # item

    print("before", flush=True)
    if what == "roots":
        dist.broadcast(tensor, min(rank, 1))  # roots
    if rank >= 2:
        step()
    dist.all_reduce(tensor)  # reduce
    time.sleep(600)
"""

WAIT = "ranks 0, 1 wait in all_reduce #4 of default_pg (float32[6]), entered at {reduce}"
SENTENCES = {
    "sleep": f"{WAIT}; rank 2 has not entered it: step at {{sleep}}",
    "gil stopped exec": f"{WAIT}; rank 2 {HOLDS_GIL}: step at {{gil}}; rank 3 is stopped (SIGSTOP); "
    "rank 4 has become another program",
    "ending loader gone": f"{WAIT}; rank 2 is ending; rank 3 has not entered it: it waits for its DataLoader, step at "
    "{{loader}} (a worker: __getitem__ at {{item}}); rank 4 has not entered it: it waits for its DataLoader, step at "
    "{{gone}} (worker pid N has ended: exit code 0)".replace("{{", "{").replace("}}", "}"),
    "roots": "#4 of default_pg is broadcast from rank 0 on rank 0 ({roots}) and broadcast from rank 1 on rank 1 "
    "({roots}): " + CYCLE,
    "before": "ranks 0, 1 wait in init_process_group, called at {init}; rank 2 has not called it: build at {build}",
}


def sentence(what: str) -> str:
    """The expected sentence, with the lines that are marked in the program."""
    lines = dict((line.rpartition("# ")[2], f"train.py:{number}") for number, line in enumerate(HANG.splitlines()))
    return SENTENCES[what].format_map(lines)


@pytest.fixture
def found(run_in_fork):
    """Inspect a job until a sentence is among its answer; return that."""

    def ask(job, sentence: str, *words: str):
        seen = [{}]

        def is_reported() -> bool:
            assert job.process.poll() is None, job.stderr()
            done = run_in_fork("stacks", str(job.process.pid), "--json", *words)
            seen[0] = json.loads(done.stdout) if done.returncode == 0 else {"sentences": [done.stderr]}
            return sentence in [re.sub(r"pid \d+", "pid N", each) for each in seen[0]["sentences"]]

        try:
            wait_until(is_reported, sentence, 20)
        finally:
            print("last:", *seen[0]["sentences"], sep="\n")
        return seen[0]

    return ask


@pytest.mark.slow
def test_stacks_name_the_ranks_that_others_wait_for(start_ddplaunch, tmp_path, found):
    """The job hangs in another way in each attempt, until a rank is killed."""
    script, hangs = write_program(tmp_path, "train.py", HANG), [*SENTENCES][1:4]
    options = ("--max-restarts", "2", "--restart-on", "always", "--min-uptime", "0", "--grace", "0", "--nproc", "5")
    launcher = write_launcher(  # ranks and workers on a loaded machine reply late
        tmp_path,
        """
        from ddplaunch.observe.node import dataloader_workers, inspection_machine
        from ddplaunch.observe.rpc import KIND

        type(KIND).timeout_s = 8.0
        inspection_machine.READ_TIMEOUT_S, inspection_machine.SIGNAL_CHECK_TIMEOUT_S = 1.0, 0.5
        dataloader_workers.TOTAL_TIMEOUT_S, dataloader_workers._WORKER_TIMEOUT_S = 1.2, 0.6
        """,
    )
    job = start_ddplaunch("run", *options, script, *hangs, executable=launcher)
    for what in hangs:
        found(job, sentence(what))
        os.kill(job.ranks()[0], signal.SIGKILL)
    job.process.kill()
    job.wait()
    job.assert_nothing_left()


@pytest.mark.ci
@pytest.mark.parametrize(("what", "mode"), [pytest.param("sleep", (), marks=pytest.mark.smoke), ("before", EXEC)])
def test_a_hang_is_reported_when_the_job_is_stopped(start_ddplaunch, run_in_fork, tmp_path, found, what, mode):
    """It is reported also in init_process_group, which torch does not record, and the stacks are saved."""
    script = write_program(tmp_path, "train.py", HANG)
    launcher = write_launcher(
        tmp_path,
        """
        from ddplaunch.observe.job import inspect_job
        from ddplaunch.observe.node import inspection_machine

        inspect_job.LONG_WAIT_S, inspect_job.BEFORE_STOP_TIMEOUT_S = 0.1, 40.0
        inspection_machine.READ_TIMEOUT_S = inspection_machine.SIGNAL_CHECK_TIMEOUT_S = 20.0
        """,
    )
    words = (*mode, "--nproc", "3", "--run-id", f"hang-{what}", "--log-dir", "logs", script, what)
    job = start_ddplaunch("run", *words, executable=launcher)
    found(job, sentence(what))
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    expected = f"at the stop: {sentence(what)}"
    assert f"ddplaunch: {expected}" in job.stderr().splitlines()
    assert expected in run_in_fork("report", f"hang-{what}").stdout.splitlines()
    kept = json.loads((tmp_path / "logs" / f"hang-{what}" / "stacks.json").read_text())
    inside = "step" if what == "sleep" else "build"
    assert kept["ranks"][2]["threads"][0]["frames"][0]["function"] == inside


RESTARTED = """
    import os, sys, time, torch, torch.distributed as dist

    is_elastic, attempt = len(sys.argv) > 1, os.environ["TORCHELASTIC_RESTART_COUNT"]

    def begin(name):
        store = dist.FileStore(os.path.abspath(name + attempt), 3)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=3)

    dist.init_process_group("gloo") if is_elastic else begin("first")
    for _ in range(3):
        dist.all_reduce(torch.ones(6))
    if attempt == "0" and dist.get_rank() == 0:
        raise SystemExit(1)
    if not is_elastic:
        dist.destroy_process_group()
        begin("second")
    if dist.get_rank() == 2:
        time.sleep(600)
    dist.all_reduce(torch.ones(6))
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_elastic", [pytest.param(True, id="elastic", marks=pytest.mark.ci), False])
def test_collectives_are_counted_from_the_restart_or_the_new_group(start_ddplaunch, tmp_path, found, is_elastic):
    """Counts restart with a process group that replaces another, and on both nodes of an elastic job."""
    script = write_program(tmp_path, "train.py", RESTARTED)
    if is_elastic:
        port = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        words = ("--nnodes", "2:3", *port, "--join-window", "0", "--nproc", "2", "--max-restarts", "1", script, "x")
        jobs = [start_ddplaunch("run", "--node-rank", rank, *words) for rank in "01"]
    else:
        jobs = [start_ddplaunch("run", "--nproc", "3", "--max-restarts", "1", script)]
    waiting = "ranks 0, 1, 3 wait in all_reduce #4" if is_elastic else "ranks 0, 1 wait in all_reduce #1"
    for job in jobs:
        found(
            job,
            f"{waiting} of default_pg (float32[6]), entered at train.py:19; rank 2 has not entered it: train.py:18",
        )


@pytest.mark.slow
def test_groups_of_a_device_mesh(start_ddplaunch, tmp_path, found):
    """torch numbers the groups in each rank by itself; their names are the same on all."""
    text = """
        import time, torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        for _ in range(300): dist.new_group([2])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        for group in (dp, tp):
            dist.all_reduce(torch.ones(4), group=group)
        if dist.get_rank() == 3:
            time.sleep(600)
        dist.all_reduce(torch.ones(4), group=tp)
        dist.all_reduce(torch.ones(4), group=dp)
    """
    job = start_ddplaunch("run", "--nproc", "4", write_program(tmp_path, "train.py", text))
    waits = [
        "rank 1 waits in all_reduce #2 of mesh_dp (ranks 1, 3; float32[4]), entered at train.py:13; "
        "rank 3 has not entered it: train.py:11",
        "rank 2 waits in all_reduce #2 of mesh_tp (ranks 2, 3; float32[4]), entered at train.py:12; "
        "rank 3 has not entered it: train.py:11",
        "rank 0 waits in all_reduce #2 of mesh_dp (ranks 0, 2; float32[4]), entered at train.py:13; "
        "rank 2 has not entered it: it waits in all_reduce #2 of mesh_tp, train.py:12",
    ]
    results = [found(job, each) for each in waits]
    assert results[-1]["sentences"] == waits


EACH = """
    import asyncio, os, signal, sys, threading, time

    def there():
        print("there", flush=True)

    def load_batch():
        time.sleep(600)

    def on_train_epoch_end():
        load_batch()

    def send():
        time.sleep(600)

    def announce():
        while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "load_batch":
            time.sleep(0.01)
        there()

    async def leaf():
        there()
        if what == "busy":
            time.sleep(600)
        await asyncio.sleep(600)

    async def fetch():
        await leaf()

    async def feed():
        await asyncio.Event().wait()

    async def quick():
        pass

    async def main():
        feeder = asyncio.create_task(feed(), name="fee\\n\\0der")
        task = asyncio.create_task(fetch())
        await (asyncio.gather(quick(), task) if what == "gathers" else task)

    def catch(first):
        for number in range(first, signal.SIGRTMAX + 1 if first == signal.SIGRTMIN else first + 1):
            signal.signal(number, lambda number, frame: print(what, "caught", flush=True))

    what = sys.argv[1 + int(os.environ["RANK"])]
    if what == "threads":
        threading.Thread(target=send, daemon=True).start()
        threading.Thread(target=announce).start()
        on_train_epoch_end()
    if what in ("awaits", "gathers", "busy"):
        asyncio.run(main())
    if what == "catches one":
        catch(signal.SIGRTMIN + 1)
    if what == "catches all":
        catch(signal.SIGRTMIN)
    if what == "closes":
        os.closerange(3, 2000)
        file = open("victim", "w")
        for number in range(3, 1100):
            os.dup2(file.fileno(), number)
    there()
    time.sleep(600)
"""
WHAT = ("threads", "awaits", "gathers", "busy", "catches one", "catches all", "closes")


class Inspected(NamedTuple):
    """A job whose ranks do one of WHAT each, and its inspection."""

    job: BackgroundJob
    ranks: dict[str, Any]
    page: str


@pytest.fixture(scope="module", params=[FORKED, pytest.param(EXEC, marks=pytest.mark.slow)], ids=["fork", "exec"])
def inspected(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspected")
    long = write_launcher(
        folder,
        """
        from ddplaunch.observe.node import inspection_machine, rank_stack_dump

        inspection_machine.SIGNAL_CHECK_TIMEOUT_S = inspection_machine.READ_TIMEOUT_S = 20.0
        rank_stack_dump._RUNNING_DELAY_S = 20.0  # a rank of a busy machine may not run for long after the first signal
        """,
    )
    script = write_program(folder, "train.py", EACH)
    words = ("run", *request.param, "--nproc", str(len(WHAT)), script, *WHAT)
    job = BackgroundJob(folder, words, None, executable=long)
    try:
        job.wait_for("there", len(WHAT))
        page, *_, last = (run_command(ddplaunch_command("stacks", str(job.process.pid), *more)).stdout
                          for more in ((), ("--json",), ("--json",)))  # fmt: skip
        yield Inspected(job, dict(zip(WHAT, json.loads(last)["ranks"], strict=True)), page)
    finally:
        job.process.kill()
        job.assert_nothing_left()


def functions(rank, *, own: bool = True) -> list[list[str]]:
    """The functions of each thread, the innermost first."""
    threads = rank["threads"]
    return [[frame["function"] for frame in each["frames"] if frame["own"] or not own] for each in threads]


@pytest.mark.ci
def test_threads_of_a_rank(inspected):
    rank = inspected.ranks["threads"]
    main, other = functions(rank, own=False)
    assert main == ["load_batch", "on_train_epoch_end", "<module>"]
    assert "send" in other
    assert (rank["condition"], rank["threads"][0]["frames"][0]["file"]) == ("alive", "train.py")


def test_ranks_that_use_torchcomms(start_ddplaunch, run_in_fork, tmp_path):
    """Without a process group, torch has recorded nothing of what they communicate: the output says why."""
    (tmp_path / "torchcomms").mkdir()
    (tmp_path / "torchcomms" / "_comms.so").write_bytes(bytes(4096))
    text = """
        import mmap, os, time
        if os.environ["RANK"] != "1":
            file = open("torchcomms/_comms.so", "rb")
            library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        print("there", flush=True)
        time.sleep(600)
    """
    job = start_ddplaunch("run", *LIGHT, "--nproc", "3", write_program(tmp_path, "comms.py", text))
    job.wait_for("there", 3)
    page = run_in_fork("stacks", str(job.process.pid)).stdout
    expected = "note: ranks 0, 2 use torchcomms, which keeps records of its own: who waits for whom there is not known"
    assert expected in page.splitlines(), page


def test_stacks_of_waiting_tasks(inspected):
    """The page has the main task, with what it awaits, and other waiting tasks; a busy one is on the stack."""
    for each in ("awaits", "gathers"):
        assert functions(inspected.ranks[each]) == [["leaf", "fetch", "main", "<module>"], ["feed"]]
    assert functions(inspected.ranks["busy"]) == [["leaf", "fetch", "<module>"]]
    assert [thread["name"] for thread in inspected.ranks["awaits"]["threads"]] == ["", "task fee  der"]
    line = EACH.splitlines().index("        await asyncio.sleep(600)")
    assert f"leaf at train.py:{line} (running)" in inspected.page
    assert "  another task fee  der:\n" in inspected.page


def test_signals_that_the_program_catches(inspected):
    """A free signal is used; if none is free, the program gets each signal once, however many inspections."""
    assert inspected.ranks["catches one"]["threads"]
    assert inspected.ranks["catches all"]["no_stack"] == NO_SIGNAL
    assert "catches one caught" not in inspected.job.stdout()
    assert inspected.job.stdout().count("catches all caught") == 2


def test_a_program_that_closes_its_descriptors(inspected):
    assert inspected.ranks["closes"]["no_stack"] == "the program has closed the file for stacks"
    assert (inspected.job.out.parent / "victim").read_text() == ""


def test_inspections_print_nothing_and_the_job_goes_on(inspected):
    assert (inspected.job.process.poll(), inspected.job.stderr()) == (None, "")


def stacks(answer, job):
    done = answer("stacks", str(job.process.pid), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_program_other_than_python_has_no_stacks(start_ddplaunch, run_in_fork):
    """Child processes of a shell script have none either."""
    job = start_ddplaunch("run", "--nproc", "2", "--no-python", "/bin/sh", "-c", "echo there; sleep 600; true")
    job.wait_for("there", 2)
    assert {rank["no_stack"] for rank in stacks(run_in_fork, job)["ranks"]} == {NOT_PYTHON}
    assert job.stderr() == ""


def test_no_inspect_installs_no_signal_handler(start_ddplaunch, run_in_fork, tmp_path):
    """The rank has neither the signal handlers nor the descriptors that it has without the option."""
    text = """
        import os, time
        caught = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt"))
        ours = [n for n in os.listdir("/proc/self/fd") if int(n) > 500]
        print("there", int(caught, 16) >> 33 != 0, len(ours), flush=True)
        time.sleep(600)
    """
    script = write_program(tmp_path, "train.py", text)
    for option, line in ((), "there True 3"), (("--no-inspect",), "there False 0"):
        job = start_ddplaunch("run", *LIGHT, *option, "--nproc", "2", script)
        job.wait_for(line, 2)
        why = {rank["no_stack"] for rank in stacks(run_in_fork, job)["ranks"]}
        assert why == ({"inspection is disabled (--no-inspect)"} if option else {""})


def test_no_inspect_is_shown_by_the_dry_run(run_in_fork, tmp_path):
    script = write_program(tmp_path, "train.py", "")
    assert "--no-inspect" not in run_in_fork("run", "--dry-run", "--nproc", "2", script).stdout
    output = run_in_fork("run", "--dry-run", "--no-inspect", "--nproc", "2", script).stdout
    assert "--no-inspect: `ddplaunch stacks` will not work" in output


HANDLERS = """
    import os, signal, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    rank = int(os.environ["RANK"])
    if rank < 2:
        for number in range(signal.SIGRTMIN + rank, signal.SIGRTMAX + 1):
            signal.signal(number, lambda number, frame: print("caught", flush=True))
    else:
        dist.destroy_process_group()
        if os.fork() == 0:
            os._exit(0)
        os.wait()
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_with_torch_the_signal_handlers_of_a_program_are_not_called(start_ddplaunch, run_in_fork, tmp_path):
    """Rank 0 handles all signals, rank 1 leaves one, rank 2 forked after its last process group: a thread replies."""
    long = launcher_with_constant(tmp_path, INSPECTOR + ".SIGNAL_CHECK_TIMEOUT_S", 20.0, "READ_TIMEOUT_S")
    script = write_program(tmp_path, "train.py", HANDLERS)
    job = start_ddplaunch("run", "--nproc", "3", script, executable=long)  # the thread may have to wait for a core
    job.wait_for("there", 3)
    for _ in range(3):
        first, second, third = stacks(run_in_fork, job)["ranks"]
        assert first["no_stack"] == NO_SIGNAL
        assert second["threads"]
        assert [frame["function"] for frame in third["threads"][0]["frames"]] == ["<module>"]
    assert "caught" not in job.stdout()


@pytest.mark.slow
def test_an_inspection_waits_for_the_exit_code_of_a_rank(start_ddplaunch, tmp_path):
    """The kernel shows the end of a rank before its zygote has reported the exit code."""
    text = """
        import os, signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print("there", os.getpid(), flush=True)
        signal.sigwait({signal.SIGUSR1})
    """
    later = launcher_with_constant(tmp_path, INSPECTOR + ".EXIT_STATUS_TIMEOUT_S", 2.5)
    job = start_ddplaunch("run", *FORKED, "--nproc", "2", write_program(tmp_path, "train.py", text), executable=later)
    job.wait_for("there", 2)
    leaving = int(job.stdout().partition("[1] there ")[2].split()[0])
    os.kill(job.zygote(), signal.SIGSTOP)
    os.kill(leaving, signal.SIGUSR1)
    wait_until(lambda: not is_alive(leaving), "the rank's end")
    asking = start_ddplaunch("stacks", str(job.process.pid), "--json")
    with pytest.raises(subprocess.TimeoutExpired):
        asking.process.wait(1)
    os.kill(job.zygote(), signal.SIGCONT)
    assert asking.wait() == 0
    assert [(rank["condition"], rank["code"]) for rank in json.loads(asking.stdout())["ranks"]][1] == ("exited", 0)


@pytest.mark.ci
def test_the_rank_that_others_waited_for_is_the_culprit(run_ddplaunch, tmp_path):
    """It ends early in the first attempt; in the second the others wait until their timeout."""
    text = """
        import datetime, os, sys, time
        import torch, torch.distributed as dist

        def late():
            time.sleep(600)

        def wait_while(condition):
            while condition():
                time.sleep(0.01)

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
        for _ in range(3):
            dist.all_reduce(torch.ones(6))
        rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first:
            os.symlink(f"/proc/{os.getpid()}", f"process-{rank}")
        if rank == 2 and first:
            wait_while(lambda: not (os.path.islink("process-0") and os.path.islink("process-1")))
            sys.exit(0)
        elif rank == 2:
            late()
        # A rank that is ending, and has closed its connections, can no longer be inspected.
        wait_while(lambda: first and (not os.path.islink("process-2") or os.path.exists("process-2")))
        dist.all_reduce(torch.ones(6))
    """
    script = write_program(tmp_path, "train.py", text)
    done = run_ddplaunch("run", "--nproc", "3", "--max-restarts", "1", "--min-uptime", "0", script)
    assert done.returncode == 1
    first, second = done.stderr.split("ddplaunch: restart 1 of 1\n")
    assert "ddplaunch: rank 2 ended (exit code 0) and did not enter all_reduce" in first
    report = second[second.index("ddplaunch: ") :]
    expected = "rank 2 did not enter all_reduce #4, which 2 ranks waited for until the timeout (3 s): late at"
    assert report.startswith(f"ddplaunch: {expected}"), report
    assert "then rank" in report.splitlines()[1]
    assert "Traceback" in report


SLEEPS = """
    import time

    def load_batch():
        print("there", flush=True); time.sleep(600)  # in one line: a rank that has printed is there

    load_batch()
"""


def test_ctrl_backslash_shows_stacks_and_twice_stops(at_terminal, tmp_path):
    script = write_program(tmp_path, "train.py", SLEEPS)
    each = at_terminal(ddplaunch_command("run", *LIGHT, "--no-merge", "--nproc", "2", script))
    each.until(lambda each: {"[0] there", "[1] there"} <= {*each.rows})
    each.type("\x1c")
    page = each.until("load_batch at train.py:4")
    assert any("ddplaunch: inspecting the ranks; press Ctrl-\\ again to stop the job" in row for row in page)
    assert any("ranks 0, 1" in row for row in page)
    assert each.process.poll() is None
    each.type("\x1c\x1c")
    each.until("stopping 2 ranks")
    assert each.end() == 128 + signal.SIGQUIT
