"""Tests of the end of a test run: reruns of failures, messages, and nothing left."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.suite.cleanup_process import FREEZER, FROZEN_GROUP, list_leftovers

PLUGINS = [
    word
    for name in ("rerun_failures", "run_temp_dir", "time_spent", "selection")
    for word in ("-p", f"tests.suite.{name}")
]

FLAKY = """
    import os
    import pathlib
    import pytest

    if {flaky}:
        @pytest.mark.parametrize("number", range({flaky}))
        def test_flaky(number):
            with open("order", "a") as order:
                order.write(f"{{number}} ")
            first = pathlib.Path(f"seen{{number}}")
            if not first.exists():
                first.touch()
                raise ValueError("the first time")

    if {broken}:
        @pytest.mark.parametrize("number", range({broken}))
        def test_broken(number):
            raise KeyError("every time")

    @pytest.mark.parametrize("number", range(9))
    def test_well(number):
        with open("order", "a") as order:
            order.write("well ")
    """

pytestmark = pytest.mark.slow

workers = pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.ci)], ids=["alone", "with workers"]
)


@pytest.fixture
def checks(tmp_path):
    """Run pytest with the plugins on a few small tests, independently of the run of this test."""
    machine = tmp_path / "machine"
    machine.mkdir()
    environment = clean_environment({"TMPDIR": str(machine)})
    for name in list(environment):
        if name.startswith(("PYTEST_", "DDPLAUNCH_TESTS")):
            del environment[name]
    write_program(tmp_path, "pytest.ini", "[pytest]\ntestpaths = checks\nmarkers =\n    ci: not every day\n")

    def begin(text: str, *words: str) -> subprocess.Popen[str]:
        write_program(tmp_path, "checks/some/test_some.py", text)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGINS, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


def run(begun: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = begun.communicate(timeout=scaled_timeout(60))
    return begun.returncode, output


@pytest.mark.ci
@workers
def test_a_test_that_passes_alone_is_shown_with_its_first_error(checks, workers, tmp_path):
    write_program(tmp_path, "checks/conftest.py", "import pytest\n@pytest.fixture\ndef number2():\n    return 2\n")
    code, output = run(checks(FLAKY.format(flaky=1, broken=0).replace("(number)", "(number, number2)"), *workers))
    assert code == 0, output
    assert "10 passed, 1 rerun in" in output
    times = r"failed after \d+\.\d s, passed alone in \d+\.\d s"
    assert re.search(rf"rerun: \S+::test_flaky\[0\] \({times}\): ValueError: the first time\n", output)
    assert len(re.findall("E +ValueError", output)) == 1
    assert (tmp_path / "order").read_text().split()[-1] == "0", "after all others"


@pytest.mark.ci
@workers
def test_a_test_that_fails_twice_fails_the_run(checks, workers):
    code, output = run(checks(FLAKY.format(flaky=0, broken=1), *workers))
    assert code == 1
    assert "1 failed, 9 passed in" in output
    assert output.count("E       KeyError") == 1


@pytest.mark.ci
@workers
def test_two_tests_that_fail_once_fail_the_run_and_are_not_repeated(checks, workers):
    code, output = run(checks(FLAKY.format(flaky=2, broken=0), *workers))
    assert code == 1
    assert "2 failed, 9 passed in" in output
    assert len(re.findall("E +ValueError", output)) == 2


def test_with_x_the_first_failure_is_reported_at_once(checks):
    code, output = run(checks(FLAKY.format(flaky=1, broken=0), "-x"))
    assert code == 1
    assert "1 failed" in output
    assert "rerun" not in output


LIMITED = """
    import pytest
    import time

    from tests.suite import time_limit

    time_limit.scaled_timeout = lambda seconds: 1000 * seconds

    @pytest.mark.timeout(0.1)
    def test_on_a_slow_machine():
        time.sleep(0.3)
    """


def test_the_time_limit_of_a_test_is_scaled(checks):
    _, output = run(checks(LIMITED, "-p", "tests.suite.time_limit"))
    assert "= 1 passed in" in output, "not in a rerun"


SUMMARIZED = """
    import pytest
    import time

    def test_that_takes_time():
        time.sleep(0.01)

    @pytest.mark.parametrize("number", range(3))
    def test_without_gpu(number):
        pytest.skip("no GPU here")

    @pytest.mark.ci
    def test_of_machines():
        pass
    """


@workers
def test_an_everyday_run_says_what_it_left_out_and_where_the_time_went(checks, workers):
    _, output = run(checks(SUMMARIZED, *workers))
    assert "skipped: 3 tests: no GPU here\n" in output
    assert re.search(r"pytest tests =*\nsome 1\n", output)
    assert re.search(r"\nsome +4 tests +\d+\.\d s\n", output)
    assert re.search(r"\nall +4 tests +\d+\.\d s, in \d+ s of 300 s.*\n", output)


@pytest.mark.ci
def test_a_run_over_its_budget_says_so(checks):
    _, output = run(checks(SUMMARIZED, "checks", "--budget", "0.001"))
    assert "2 passed, 3 skipped" in output
    assert "OVER THE BUDGET of 0 s" in output


LEAVES = """
    import pathlib
    import subprocess
    import tempfile

    def test_that_leaves(tmp_path):
        tempfile.mkdtemp()
        (tmp_path / "file").touch()
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path("left").touch()
        {then}
    """


def machine_is_as_before(folder: Path) -> None:
    """No temporary file is left, nor a process with a variable that names one."""
    machine = folder / "machine"
    wait_until(lambda: not list(machine.iterdir()), f"the removal of {list(machine.iterdir())}")
    assert [line for line in list_leftovers(lambda variable: str(machine) in variable).values()] == []


@pytest.mark.ci
@workers
def test_a_process_that_a_test_leaves_is_named_and_fails_the_run(checks, workers, tmp_path):
    code, output = run(checks(LEAVES.format(then=""), *workers))
    assert code == 1
    assert re.search(r"the tests left a process: \d+ sleep 1000", output)
    machine_is_as_before(tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, ()), (signal.SIGINT, ("-n", "2")), (signal.SIGKILL, ("-n", "2"))]
)
def test_a_run_that_is_interrupted_leaves_nothing(checks, workers, number, tmp_path):
    begun = checks(LEAVES.format(then="subprocess.run(['sleep', '1000'])"), *workers)
    wait_until((tmp_path / "left").exists, "the test to be under way")
    os.kill(begun.pid, number)
    code, output = run(begun)
    assert code == (2 if number == signal.SIGINT else -signal.SIGKILL), output
    machine_is_as_before(tmp_path)


FREEZES = """
    import pathlib
    import subprocess

    def test_that_freezes():
        group = pathlib.Path("{group}")
        group.mkdir()
        frozen = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (group / "cgroup.procs").write_text(str(frozen.pid))
        (group / "freezer.state").write_text("FROZEN")
        pathlib.Path("left").touch()
        frozen.wait()
    """


@pytest.mark.ci
@pytest.mark.skipif(not os.access(f"{FREEZER}/cgroup.procs", os.W_OK), reason="needs a writable cgroup v1 freezer")
def test_a_killed_run_leaves_no_frozen_process(checks, tmp_path):
    """No signal ends a process that is frozen, so the group has to be thawed by what outlives the run."""
    group = Path(FREEZER) / f"{FROZEN_GROUP}suite-{os.getpid()}"
    begun = checks(FREEZES.format(group=group))
    try:
        wait_until((tmp_path / "left").exists, "the test to be under way")
        os.kill(begun.pid, signal.SIGKILL)
        assert run(begun)[0] == -signal.SIGKILL
        machine_is_as_before(tmp_path)
        assert not group.exists()
    finally:
        if group.exists():
            (group / "freezer.state").write_text("THAWED")
