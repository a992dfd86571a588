"""Tests of slow ranks on hosts with a high round-trip time, where clocks can be compared less exactly."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program
from tests.constant_override import launcher_with_constant
from tests.observe.test_slow_rank import LONG, PROGRAM, SENTENCE
from tests.scaled_timeouts import scaled_timeout
from tests.skewed_clock import skewed_environment

pytestmark = [pytest.mark.ci, pytest.mark.slow]

DELAY = 20  # milliseconds, each way


@pytest.fixture
def run(network, tmp_path):
    """Run a job of one rank on each of two hosts, the second with a clock of its own; return node 0's stderr."""
    hosts = network(2).hosts
    hosts[1].cable.delay(DELAY)
    write_program(tmp_path, "program.py", PROGRAM)
    environ = clean_environment(skewed_environment(tmp_path, 50))
    executable = launcher_with_constant(tmp_path, LONG, 0.5)

    def launch(*words: str) -> str:
        shared = ("--nnodes", "2", "--nproc", "1", "--master-addr", "10.77.0.10", "--heartbeat-timeout", "2")
        processes = [
            host.start(
                ddplaunch_command("run", *shared, "--node-rank", str(number), "program.py", *words),
                executable=executable, cwd=tmp_path, env=environ if number else clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip
        output = [process.communicate(timeout=scaled_timeout(100))[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], output
        return output[0]

    return launch


def test_a_slow_rank_is_named_despite_network_delay(run):
    found = SENTENCE.search(run("1", "0.2", "30"))
    assert found
    assert found[1] == "1"
    assert abs(int(found[4]) - 200) <= 2 * DELAY


def test_a_delay_below_the_clock_error_is_not_reported(run):
    output = run("1", "0.01", "60")
    assert "their clocks are known to 2" in output
    assert "arrived last" not in output
