"""Tests of ``ddplaunch.runtime`` in a program: under ddplaunch, under torchrun, and alone."""

import re
import sys

import pytest

from tests.conftest import ddplaunch_command, run_command, run_in_terminal, torchrun_command, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

SHOWS = """
    import os, sys
    from ddplaunch import runtime

    assert "torch" not in sys.modules or os.environ.get("DDPLAUNCH_DEVICE"), "imported for nothing"
    facts = (runtime.rank(), runtime.local_rank(), runtime.world_size(), runtime.is_main(), runtime.preempted())
    print(f"{facts} {runtime.device()!r}\\n", end="")
"""


def lines(text: str) -> list[str]:
    return sorted(re.sub(r"^\[\d\] ", "", line) for line in text.splitlines())


TWO = ["(0, 0, 2, True, False) device(type='cpu')", "(1, 1, 2, False, False) device(type='cpu')"]


@pytest.mark.ci
@pytest.mark.parametrize("start", ["zygote", "exec"])
@pytest.mark.smoke
def test_under_ddplaunch(run_ddplaunch, tmp_path, start):
    done = run_ddplaunch("run", "--nproc", "2", "--start", start, write_program(tmp_path, "t.py", SHOWS))
    assert lines(done.stdout) == TWO, done.stderr


@pytest.mark.ci
def test_under_torchrun(tmp_path):
    done = run_command(torchrun_command(tmp_path, write_program(tmp_path, "t.py", SHOWS)), timeout=100)
    assert lines(done.stdout) == TWO, done.stderr


@pytest.mark.ci
def test_runtime_without_a_launcher(tmp_path):
    done = run_command([sys.executable, write_program(tmp_path, "t.py", SHOWS)], timeout=100)
    assert lines(done.stdout) == ["(0, 0, 1, True, False) device(type='cpu')"], done.stderr


STEPS = """
    import time
    from ddplaunch import runtime

    for step in runtime.progress(range(4), "epoch 1"):
        time.sleep(0.3)
    print("sum", sum(runtime.progress(n for n in range(5))))
"""


def test_progress_in_a_terminal(tmp_path):
    """One line of rank 0's that changes, and is gone in the end; our pipes do not hide that there is a terminal."""
    run = ddplaunch_command("run", *LIGHT, "--no-merge", "--nproc", "2", write_program(tmp_path, "t.py", STEPS))
    found = run_in_terminal(run, tmp_path, {"NO_COLOR": "1"})
    assert re.search(r"\[0\] epoch 1: 2/4, [\d.]+/s, \d+ s left", found), found
    assert not re.search(r"\[1\] epoch", found)
    assert found.count("sum 10") == 2


def test_progress_in_a_log(run_ddplaunch, tmp_path):
    """A line a minute, so none of this short program."""
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", write_program(tmp_path, "t.py", STEPS))
    assert (done.returncode, done.stderr, done.stdout.count("sum 10")) == (0, "", 2)


FIRST = """
    import os, sys, time
    from ddplaunch import runtime

    for name in ("a", "b"):
        with runtime.local_first() as is_first:
            print(runtime.rank(), name, is_first, os.path.exists(name), flush=True)
            time.sleep(0.3 if is_first else 0)
            open(name, "a").close()
"""


@pytest.mark.parametrize("more", [(), ("--virtual-local-rank",)])
def test_the_first_rank_of_a_node_goes_first(run_ddplaunch, tmp_path, more):
    done = run_ddplaunch("run", *LIGHT, "--no-merge", *more, "--nproc", "3", write_program(tmp_path, "t.py", FIRST))
    found = lines(done.stdout)
    assert sorted(line.split()[1:] for line in found) == sorted(
        [name, *rest] for name in "ab" for rest in (["True", "False"], ["False", "True"], ["False", "True"])
    ), done.stderr


def test_the_first_rank_goes_first_under_another_launcher(tmp_path):
    """Its ranks have the same parent; the files are gone in the end."""
    program = str(write_program(tmp_path, "t.py", FIRST))
    (tmp_path / "temporary").mkdir()
    launcher = f"""
        import os, subprocess, sys
        ranks = [
            subprocess.Popen([sys.executable, {program!r}],
                env={{**os.environ, "RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}})
            for n in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
    """
    done = run_command(
        [sys.executable, write_program(tmp_path, "launcher.py", launcher)],
        tmp_path,
        {"TMPDIR": str(tmp_path / "temporary")},
        timeout=100,
    )
    assert lines(done.stdout) == ["0 a True False", "0 b True False", "1 a False True", "1 b False True"], done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("what", "headline"),
    [
        ("raise ValueError('no labels')", "rank 0 failed with ValueError: no labels (exit code 1)"),
        (
            # An exception whose text cannot be made.
            "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})",
            "rank 0 failed with Odd: <exception str() failed>",
        ),
        ("os.kill(os.getpid(), 9)", "rank 0 was ended by SIGKILL"),
    ],
)
def test_a_failure_of_the_first_rank_reaches_the_others(run_ddplaunch, tmp_path, what, headline):
    body = f"""
        import os
        from ddplaunch import runtime

        with runtime.local_first():
            if runtime.rank() == 0:
                {what}
            print("never")
    """
    done = run_ddplaunch("run", *LIGHT, "--nproc", "3", write_program(tmp_path, "t.py", body))
    assert f"ddplaunch: {headline}" in done.stderr
    assert "never" not in done.stdout
    assert "RuntimeError" not in done.stderr.partition("then rank")[0].partition("ddplaunch: rank 0")[2]


@pytest.mark.ci
def test_waiting_for_the_first_rank_has_a_limit_and_is_named(start_ddplaunch, tmp_path):
    body = """
        import time
        from ddplaunch import runtime

        with runtime.local_first(timeout_s=600):
            print("up", flush=True)
            time.sleep(600)
    """
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", write_program(tmp_path, "t.py", body))
    job.wait_for("up")
    shown = run_command(ddplaunch_command("stacks", str(job.process.pid)), timeout=100).stdout
    assert "waits in runtime.local_first for the first rank of its node" in shown, shown

    late = body.replace("600)", "0.2)", 1)
    done = run_command(
        ddplaunch_command("run", *LIGHT, "--nproc", "2", write_program(tmp_path, "late.py", late)),
        tmp_path,
        timeout=100,
    )
    assert "TimeoutError: runtime.local_first: the first rank of this node needs more than 0.2 s" in done.stderr
