"""Tests of the pytest plugin, which runs marked tests in ranks, in a pytest of its own."""

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import run_command, write_program
from tests.features.python.test_pytest_debugger import QUIET
from tests.scaled_timeouts import scaled_timeout

HEAD = "import os, time, warnings, pytest\n\n"


def run(folder: Path, body: str) -> str:
    """Run pytest on a file with these tests; return what it prints."""
    write_program(folder, "test_it.py", HEAD + body)
    done = run_command([sys.executable, "-m", "pytest", "-rsf", *QUIET], folder, timeout=100)
    assert done.stderr == ""
    return done.stdout


def ended(output: str) -> str:
    """The last line of what pytest prints, without the time that it took."""
    return re.sub(r" in .*", "", output.splitlines()[-1].strip("= "))


@pytest.mark.ci
def test_bodies_run_in_ranks(tmp_path: Path):
    """Rank fixtures, other fixtures, parameters and classes work, all in the same ranks."""
    body = """
def test_nothing_is_imported_before_it_is_needed():
    import sys
    late = ("torch", "cloudpickle", "ddplaunch.features.python.session", "click")
    assert not [name for name in late if name in sys.modules]

@pytest.fixture
def numbers():
    return [1, 2]

def note(tmp_path, rank):
    with open(tmp_path.parent / f"pids.{rank}", "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.mark.ranks(2)
def test_one(rank, world_size, device, numbers, tmp_path):
    assert (os.environ["RANK"], world_size, str(device), numbers) == (str(rank), 2, "cpu", [1, 2])
    note(tmp_path, rank)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [1, 2])
class TestMore:
    start = 5

    def test_method(self, factor, rank, tmp_path):
        assert self.start * factor in (5, 10)
        note(tmp_path, rank)

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_expected_in_the_body(rank):
    pytest.xfail("not yet")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=(OSError, AssertionError), strict=True)
def test_expected():
    assert False

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:boom")
@pytest.mark.xfail(raises=UserWarning, strict=True)
def test_strict():
    warnings.warn("not this one")
    warnings.warn("boom")

def test_here(tmp_path):
    for rank in "01":
        lines = (tmp_path.parent / f"pids.{rank}").read_text().splitlines()
        assert len(lines) == 3 and len(set(lines)) == 1 and lines[0] != str(os.getpid())
"""
    output = run(tmp_path, body)
    assert ended(output) == "5 passed, 1 skipped, 3 xfailed"
    assert "not today" in output


@pytest.mark.ci
def test_process_groups_of_a_test_s_own(tmp_path: Path):
    """Each test can create process groups, though the store still has the keys of earlier tests."""
    body = """
import sys
import torch
import torch.distributed as dist

def check(rank):
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert int(total) == 3

@pytest.mark.ranks(2)
@pytest.mark.parametrize("leaves", [False, False, True, False])
def test_group(rank, leaves):
    assert sys.excepthook.__name__ != "_distributed_excepthook"
    for again in (True, True, False):
        dist.init_process_group("gloo")
        check(rank)
        if again or not leaves:
            dist.destroy_process_group()

@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("number", range(3))
def test_a_group_that_is_there(rank, number):
    check(rank)
    if number == 2:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        check(rank)
"""
    output = run(tmp_path, body)
    assert ended(output) == "7 passed, 1 warning"
    assert "left a process group open, or closed an existing one; the next test gets new ranks" in output


@pytest.mark.ci
def test_state_that_a_test_changes(tmp_path: Path):
    """Random generators are restored; other changes are reported, and the next test gets new ranks."""
    body = """
import random
import torch

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(2))
def test_seeds(number, rank, tmp_path):
    drawn = repr((random.random(), float(torch.rand(()))))
    random.seed(1), torch.manual_seed(2)
    kept = tmp_path.parent / f"drawn.{rank}"
    assert kept.write_text(drawn) if number == 0 else kept.read_text() == drawn

@pytest.mark.ranks(2)
def test_leaves(rank):
    if rank == 1:
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)

@pytest.mark.ranks(2)
def test_next():
    assert "LEFT" not in os.environ and torch.get_default_dtype() == torch.float32
"""
    output = run(tmp_path, body)
    assert ended(output) == "4 passed, 2 warnings"
    assert "rank 1 changed the variable LEFT;" in output
    assert "rank 1 changed the default dtype;" in output


FAILS = """
import threading, unittest

@pytest.mark.ranks(3)
def test_sum(rank):
    values = [rank, 1]
    assert sum(values) < 3, "too big"

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.ranks(2)
def test_monkeypatch(monkeypatch): pass

@pytest.mark.ranks(2)
def test_lock(lock): pass

@pytest.mark.ranks('many')
def test_many(rank): pass

@pytest.mark.ranks(2, nprocs=3)
def test_nprocs(): pass

@pytest.mark.ranks
def test_no_number(): pass

@pytest.mark.ranks(2)
async def test_async(): assert False

@pytest.mark.ranks(2)
class TestCase(unittest.TestCase):
    def test_case(self): pass

@pytest.mark.ranks(2, timeout=0.5)
def test_hang(): time.sleep(99)

def test_no_marker(rank): pass
"""


@pytest.mark.ci
def test_failures_and_refusals(tmp_path: Path):
    output = run(tmp_path, FAILS)
    assert ended(output) == "5 failed, 5 errors"
    shown = output[output.index("test_sum _") :]
    assert "\nAssertionError: too big (rank 2)\n" in shown
    above, _, _ = output.partition("short test summary info")  # which has the whole message where CI is set
    assert above.count("AssertionError: too big") == 2  # first line and traceback: not in the captured output
    assert re.search("FAILED .*::test_sum - (Failed: )?AssertionError: too big", output), output
    assert "+  where 3 = sum([2, 1])" in shown
    assert 'test_it.py", line 9, in test_sum' in shown
    for each in [
        "the fixture monkeypatch does not work in a ranks test",
        "lock cannot be sent ",
        "--nproc many: expected a number, a list like 8,8,4, or auto, gpu, cpu\n  omit it for one rank per GPU",
        "launch() got an unexpected keyword argument 'nprocs'",
        "@pytest.mark.ranks takes the number of ranks and keywords: @pytest.mark.ranks(4)",
        "@pytest.mark.ranks does not await tests: call asyncio.run in the test",
        "@pytest.mark.ranks does not work with unittest.TestCase",
        "the call timed out",
        "the fixture rank is for tests with @pytest.mark.ranks(N)",
    ]:
        assert f"\n{each}" in output, each
    assert "ddplaunch/features/python" not in output


OUTCOMES = """
os.environ["PYTHONPATH"] = os.path.dirname(__file__)

@pytest.mark.ranks(2)
@pytest.mark.timeout(2)
def test_hangs(rank):
    if rank == 1:
        time.sleep(600)

@pytest.mark.ranks(2, timeout=5, preload="late")
def test_starting(): pass

@pytest.mark.ranks(2)
def test_raises():
    with pytest.raises(ValueError):
        pass

@pytest.mark.ranks(2)
def test_good(): pass
"""


@pytest.mark.ci
def test_the_next_test_runs_after_any_outcome(tmp_path: Path):
    """A timeout, by pytest-timeout or by the marker, fails one test, and the next one runs."""
    seconds = scaled_timeout(5)
    write_program(tmp_path, "late.py", f"import time; time.sleep({seconds})")
    printed = run(tmp_path, OUTCOMES.replace("timeout=5", f"timeout={seconds}"))
    assert ended(printed) == "2 failed, 2 passed"
    assert "\nFailed: Timeout" in printed or "\nTimeout (>2.0s)" in printed
    assert "\nFailed: DID NOT RAISE" in printed
    assert "session.py:" not in printed
