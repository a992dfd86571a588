"""Tests of ranks in their debugger: at the job's own terminal, and by ``ddplaunch debug``."""

import signal
import subprocess
import sys

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_elapsed
from ddplaunch.features.debug import options
from tests.conftest import (
    assert_refused,
    clean_environment,
    ddplaunch_command,
    free_port,
    run_command,
    wait_until,
    write_program,
)
from tests.debugger_fixtures import AT, STEPS, TAKEN_OVER, pipe_to_debugger, wait_for_stops
from tests.debugger_fixtures import debug_job as debug_job
from tests.debugger_fixtures import debug_terminal as debug_terminal
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, LIGHT
from tests.terminal_emulator import TerminalEmulator

pytestmark = pytest.mark.slow

LOOPS = """
import os
import time

rank = int(os.environ["RANK"])
print("up", flush=True)
while not os.path.exists("over"):
    time.sleep(0.01)
"""


def test_a_breakpoint_stops_its_rank_and_has_a_prompt_below_what_the_others_print(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    write_program(tmp_path, ".pdbrc", "alias twice p 2 * %1\n")
    each = debug_terminal("run", *LIGHT, "--no-merge", "--nproc", "3", "train.py", "2")
    each.until(lambda each: each.rows[-1:] == ["(rank 2)"] and "[1] loss 1" in each.rows)
    rows = each.rows
    at = rows.index(f"ddplaunch: rank 2 is at a breakpoint: train.py:{AT}, in step")
    assert ("-> return loss" if AT == 11 else "-> breakpoint()") in rows[at:]
    each.type("p lo\t\rtwice loss\r\x1b[A\x1b[A\x01\x1b[C\x1b[C4 * \r")
    each.until("(rank 2) p 4 * loss")
    each.until(lambda each: each.rows[-1] == "(rank 2)")
    found = "\n".join(each.rows)
    assert "(rank 2) p loss\n1\n(rank 2) twice loss\n2\n(rank 2) p 4 * loss\n4\n" in found
    each.type("w\r")
    each.until(lambda each: each.rows[-1] == "(rank 2)" and "(rank 2) w" in each.rows)
    assert not any("rank_runner.py" in row or "zygote.py" in row for row in each.rows)
    each.type("r\r")
    each.until("--Return--")
    each.type("c\r")
    each.until(lambda each: sum("rank 2 is at " in row for row in each.history) == 2)
    each.until("[2] loss 1")
    each.type("\x04")
    assert each.end() == 0
    assert each.is_restored
    assert "[2] loss 2" in each.history


def test_one_prompt_for_several_ranks(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    each = debug_terminal("run", *LIGHT, "--nproc", "4", "train.py", "1", "2", "3")
    each.until(lambda each: sum("is at a breakpoint" in row for row in each.history) == 3)
    each.until("asks all")
    each.type("@all p loss\r@2\rp rank\r@0 p rank\r@1,3 p rank * 10\r@2-9 p rank\r")
    each.until("there is no rank 9: this job has ranks 0 to 3")
    each.until("rank 3: 30")
    found = "\n".join(each.history)
    assert "@all p loss\nrank 1: 0\nranks 2, 3: 1\n" in found
    assert "(rank 2) p rank\n2\n" in found
    assert (
        "(rank 2) @0 p rank\nddplaunch: rank 0 is not at a breakpoint; `ddplaunch debug --rank 0` stops it\n" in found
    )
    assert "(rank 2) @1,3 p rank * 10\nrank 1: 10\nrank 3: 30\n" in found
    each.type("@all c\r")
    each.until(lambda each: sum("is at a breakpoint" in row for row in each.history) == 6)
    each.type("@all detach\r")
    assert each.end() == 0


def test_quit_ends_the_job_with_one_line(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS + "import time; time.sleep(600)\n")
    each = debug_terminal("run", *EXEC, "--nproc", "2", "train.py", "1")
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    each.type("q\r")
    assert each.end() == 128 + signal.SIGTERM
    after = each.history[each.history.index("(rank 1) q") + 1 :]
    assert [row for row in after if not row.startswith("[0]")] == ["ddplaunch: rank 1: q in the debugger ends the job"]
    assert each.is_restored


def test_ctrl_c_at_the_prompt_ends_the_job(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    each = debug_terminal("run", *LIGHT, "--nproc", "2", "train.py", "1")
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    each.type("p lo\x03")
    assert each.end() == 130
    assert f"[1] KeyboardInterrupt: step at train.py:{AT}" in each.history
    assert each.is_restored


def test_ctrl_z_gives_the_terminal_back_and_fg_goes_on(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    words = " ".join(ddplaunch_command("run", *LIGHT, "--nproc", "2", "train.py", "1"))
    each = TerminalEmulator(["bash", "--norc", "-i"], tmp_path, {"PS1": "$ ", "DDPLAUNCH_TEST_MARK": str(tmp_path)})
    try:
        each.type(f"{words}\r")
        each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
        each.type("p 1 +")
        each.until("(rank 1) p 1 +")
        each.type("\x1a")
        each.until(lambda each: each.rows[-1] == "$")
        each.type("echo typed\r")
        each.until("typed")
        each.type("fg\r")
        each.until(lambda each: each.rows[-1].startswith("(rank 1) p 1 +"))
        each.type(" 1\rdetach\r")
        each.until("(rank 1) p 1 + 1")
        each.until(lambda each: each.rows[-1] == "$")
        each.type("exit\r")
        assert each.end() == 0
    finally:
        each.close()


@pytest.mark.ci
def test_a_client_that_ends_lets_the_ranks_run(debug_job, debug_terminal):
    job = debug_job(STEPS, "0", "1")
    expected = f"is at a breakpoint: train.py:{AT}, in step; attach with `ddplaunch debug demo`"
    wait_until(lambda: job.stderr().count(expected) == 2, expected)
    each = debug_terminal("debug", "demo")
    each.until("@1 goes to rank 1")
    each.until(lambda each: each.rows[-1] == "(rank 0)")
    each.type("\x03")
    assert each.end() == 130
    assert job.wait() == 0
    assert job.stdout().count("loss") == 4


def test_lines_from_a_pipe(debug_job, tmp_path):
    job = debug_job(STEPS, "1")
    done = pipe_to_debugger(tmp_path, "p loss\n!globals()['rank'] = 7\nc\np rank, loss\n", "demo")
    assert done.returncode == 0, done.stderr
    assert "(rank 1) p loss\n0\n" in done.stdout
    assert "(rank 1) p rank, loss\n(7, 4)\n" in done.stdout, done.stdout
    assert job.wait() == 0


def test_without_a_terminal_a_breakpoint_fails_and_the_report_names_debug(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "train.py", "1")
    assert done.returncode == 1
    assert "BdbQuit" in done.stderr
    assert "with --debug the rank waits " in done.stderr


@pytest.mark.ci
def test_a_rank_resumes_after_the_debug_timeout(debug_job):
    """The rank resumes after --debug-timeout; until then neither --timeout nor --straggler-timeout counts."""
    seconds = round(scaled_timeout(2))
    limits = ("--timeout", str(seconds), "--straggler-timeout", str(seconds))
    job = debug_job(STEPS, "1", options=("--debug", "--debug-timeout", str(2 * seconds), *limits))
    assert job.wait() == 0, job.stderr()
    assert f"rank 1 resumes: no input for {format_elapsed(2 * seconds)} (--debug-timeout)" in job.stderr()
    assert job.stderr().count("is at a breakpoint") == 1


@pytest.mark.ci
def test_a_running_rank_stops_at_its_next_line(debug_job, tmp_path):
    job = debug_job(LOOPS)
    job.wait_for("up", 2)
    done = pipe_to_debugger(tmp_path, "p rank\nw\n", "demo", "--rank", "1")
    assert done.returncode == 0, done.stderr
    assert "rank 1 is at train.py:" in done.stdout
    assert "(rank 1) p rank\n1\n" in done.stdout
    assert "rank 1 has stopped: train.py:" in job.stderr()
    absent = pipe_to_debugger(tmp_path, "", "demo", "--rank", "7")
    assert (absent.returncode, "there is no rank 7: this job has ranks 0 to 1\n" in absent.stdout) == (2, True)
    write_program(tmp_path, "over", "")
    assert job.wait() == 0


def test_a_rank_in_native_code_is_named_and_stops_when_that_returns(debug_job, tmp_path):
    native = """
        import os, subprocess, sys, threading, time
        print("up", flush=True)
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(lambda: os.path.exists("over"), True)]
                         and lock.release()).start()
        lock.acquire()
        print("on", flush=True)
    """
    job = debug_job(native)
    job.wait_for("up", 2)
    client = subprocess.Popen(
        ddplaunch_command("debug", "demo", "--rank", "1"),
        cwd=tmp_path,
        env=clean_environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin
    assert client.stdout
    output = client.stdout.readline()
    assert "rank 1 has not reached another line yet: " in output
    assert output.endswith("; it stops when that returns, Ctrl-C leaves\n")
    assert "train.py:7" in output
    write_program(tmp_path, "over", "")
    assert client.stdout.readline() == f"ddplaunch: rank 1 is at train.py:{8 if AT == 11 else 7}\n"
    client.stdin.write("c\n")
    client.stdin.close()
    assert client.wait(scaled_timeout(30)) == 0
    client.stdout.close()
    assert job.wait() == 0


def test_post_mortem_keeps_the_first_failure_and_its_frames(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS.replace("breakpoint()", "raise ValueError(f'bad {loss}')"))
    each = debug_terminal("run", "--post-mortem", *LIGHT, "--nproc", "2", "train.py", "1", columns=160)
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    assert (
        "ddplaunch: rank 1 has failed at train.py:10, in step: ValueError: bad 0; it waits in the debugger until q"
        in each.history
    )
    each.type("p loss, n\ru\rp n\r")
    each.until(lambda each: "(0, 0)" in each.rows and "(rank 1) p n" in each.rows)
    each.type("q\r")
    assert each.end() == 1
    assert any("rank 1 failed" in row and "ValueError: bad 0" in row for row in each.history), each.history
    assert each.is_restored


OTHER_WAYS = """
import io, os, pdb, sys, threading

class Forked(pdb.Pdb):  # as that of torch's dist.breakpoint()
    def interaction(self, *args, **named):
        with open("/dev/stdin") as sys.stdin:
            super().interaction(*args, **named)

def main():
    loss = 5
    pdb.set_trace()
    Forked().set_trace()
    pdb.Pdb(stdin=io.StringIO("c\\n"), stdout=io.StringIO()).set_trace()
    os.environ["PYTHONBREAKPOINT"] = "pdb.set_trace"
    breakpoint(header="look")
    thread = threading.Thread(target=breakpoint)
    thread.start()
    thread.join()
    os.environ["PYTHONBREAKPOINT"] = "0"
    breakpoint()
    print("loss", loss)

if os.environ["RANK"] == "1":
    main()
"""


@pytest.mark.ci
@pytest.mark.parametrize("how", [LIGHT, EXEC], ids=["fork", "exec"])
def test_every_way_to_stop_opens_the_prompt(debug_job, tmp_path, how):
    """Every way to stop works, and PYTHONBREAKPOINT=0 turns breakpoints off."""
    job = debug_job(OTHER_WAYS, how=how)
    done = pipe_to_debugger(tmp_path, "p loss\nc\np loss - 2\nc\np loss + 1\nc\np 2 + 5\nc\n", "demo")
    for answered in ("p loss\n5\n", "p loss - 2\n3\n", "p loss + 1\n6\n", "p 2 + 5\n7\n"):
        assert f"(rank 1) {answered}" in done.stdout, done.stdout
    assert "\nlook\n" in done.stdout
    assert done.stdout.count("rank 1 is at ") == 4
    assert job.wait() == 0
    assert "loss 5" in job.stdout()


def test_the_fork_of_a_rank_has_no_debugger(run_ddplaunch, tmp_path):
    forks = "import os\npid = os.fork()\nif not pid:\n    breakpoint()\n    print()\nos.waitpid(pid, 0)\n"
    write_program(tmp_path, "train.py", forks)
    done = run_ddplaunch("run", "--debug", *LIGHT, "--nproc", "2", "train.py")
    assert done.returncode == 0
    assert "BdbQuit" in done.stderr
    assert "is at a breakpoint" not in done.stderr
    assert "ddplaunch/core/rank" not in done.stderr


@pytest.mark.ci
def test_a_breakpoint_in_a_worker_of_the_dataloader_names_num_workers(run_ddplaunch, tmp_path):
    program = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                breakpoint()
                return torch.ones(1)

        next(iter(DataLoader(Data(), num_workers=1)))
    """
    done = run_ddplaunch("run", "--nproc", "2", write_program(tmp_path, "train.py", program))
    assert done.returncode == 1
    assert "\n  a DataLoader worker cannot be stopped in a debugger: use num_workers=0\n" in done.stderr


def test_a_failure_of_another_rank_ends_the_prompt(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS + "while rank == 0 and not os.path.exists('fail'): pass\n1 / rank\n")
    each = debug_terminal("run", *LIGHT, "--nproc", "2", "train.py", "1")
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    each.type("p lo")
    each.until("(rank 1) p lo")
    write_program(tmp_path, "fail", "")
    assert each.end() == 1
    assert each.is_restored
    assert any("rank 0 failed" in row for row in each.history)


@pytest.mark.ci
def test_a_client_takes_over_from_the_terminal(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    each = debug_terminal("run", "--run-id", "demo", *LIGHT, "--nproc", "2", "train.py", "1")
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    done = pipe_to_debugger(tmp_path, "p loss\n", "demo")
    assert "(rank 1) p loss\n0\n" in done.stdout
    assert each.end() == 0
    assert f"ddplaunch: {TAKEN_OVER}" in each.history
    assert each.is_restored


@pytest.mark.ci
def test_interact_and_what_has_no_end(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", STEPS)
    each = debug_terminal("run", *LIGHT, "--nproc", "2", "train.py", "1", columns=100)
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    each.type("interact\r")
    each.until(lambda each: each.rows[-1] == ">>>")
    each.type("for each in 'ab':\r    print(each * 3)\r\r")
    each.until(lambda each: each.rows[-1] == ">>>" and "bbb" in each.rows)
    each.type("\x04")
    each.until(lambda each: each.rows[-1] == "(rank 1)")
    each.type("interact\rexit()\r")
    each.until(lambda each: each.rows[-1] == "(rank 1)" and ">>> exit()" in each.rows)
    each.type("p 'x' * 100_000\rdetach\r")
    each.end()
    assert sum(row.count("x") for row in each.history) >= 100_000


@pytest.mark.ci
def test_a_fork_while_stepping_is_left_alone(debug_job, tmp_path):
    forks = """
        import os
        def child():
            os._exit(7)
        breakpoint()
        pid = os.fork()
        if not pid:
            child()
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """
    job = debug_job(forks)
    wait_for_stops(job, 2)
    pipe_to_debugger(tmp_path, "@all n\n@all n\n@all n\n@all p pid > 1\n", "demo")
    assert job.wait() == 0
    assert job.stdout().count("status 7") == 2


def test_post_mortem_of_a_single_rank_is_plain_pdb(debug_terminal, tmp_path):
    write_program(tmp_path, "train.py", "loss = 6\n1 / 0\n")
    each = debug_terminal("run", "--post-mortem", "--nproc", "1", "train.py")
    each.until("(Pdb)")
    each.type("p loss * 7\rq\r")
    each.until("42")
    assert each.end() == 1


@pytest.mark.ci
def test_an_editor_may_debug_the_launcher_and_with_it_the_ranks(tmp_path):
    """debugpy can run ddplaunch as the module of an entry in launch.json."""
    write_program(tmp_path, "train.py", "print('loader', type(__loader__).__name__)\n")
    listens = [sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{free_port()}"]
    done = run_command(
        [*listens, *ddplaunch_command("run", "--preload", "none", "--nproc", "2", "train.py")[1:]], tmp_path
    )
    assert (done.returncode, done.stdout.count("loader SourceFileLoader")) == (0, 2), done


def test_an_editor_may_attach_to_some_ranks(run_ddplaunch, run_in_fork, tmp_path, monkeypatch):
    """The debugpy here is a stub that prints where it would listen."""
    write_program(tmp_path, "train.py", "print('up')")
    write_program(tmp_path, "there/debugpy.py", "def listen(address):\n    return address[0], 4711\n")
    stub = {"PYTHONPATH": f"{tmp_path}/there"}
    done = run_ddplaunch("run", "--debugpy", "1", *LIGHT, "--nproc", "2", "train.py", env=stub)
    assert done.returncode == 0, done.stderr
    entry = '{"name": "rank 1", "type": "debugpy", "request": "attach", "connect": {"host": "127.0.0.1", "port": 4711}}'
    assert done.stderr == f"[1] for launch.json: {entry}\n"
    assert_refused(run_in_fork("run", "--debugpy", "x", "--nproc", "2", "train.py"), "--debugpy x: expected ranks")
    beyond = run_ddplaunch("run", "--debugpy", "0,2", "--nproc", "2", "train.py", env=stub)
    assert_refused(beyond, "--debugpy 2: the job has ranks 0 to 1")
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs debugpy, which is not installed"):
        options.Debugging(debugpy="0").debugpy_ranks()
