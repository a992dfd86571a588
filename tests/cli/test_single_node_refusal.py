"""Tests that a node of a job of several nodes does not train alone by mistake."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.conftest import assert_refused, clean_environment, ddplaunch_command, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC

NODE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}


def test_a_likely_node_of_several_is_refused_before_anything_starts(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "open('started', 'w')\n")
    refusal = assert_refused(run_in_fork("run", "train.py", env=NODE))
    message, every_node, one_machine = refusal.splitlines()
    assert message.startswith("Error: NODE_RANK=1, MASTER_ADDR=10.0.0.4: ")
    assert '--nnodes N --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"' in every_node
    assert "--standalone" in one_machine
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("options", "nnodes", "node_rank"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr 10.0.0.4", 2, 1),
        ("--nnodes 2", 2, 1),
        ("--standalone", 1, 0),
        ("--cluster none", 1, 0),
    ],
)
def test_the_suggested_commands_are_accepted(run_in_fork, tmp_path, options, nnodes, node_rank):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", "--json", *options.split(), "train.py", env=NODE)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["nnodes"], plan["node_rank"]) == (nnodes, node_rank)


def test_as_many_ranks_as_world_size_are_accepted(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    for nproc, code in (("2", 2), ("4", 0), ("8", 0)):
        done = run_in_fork("run", "--dry-run", "--nproc", nproc, "train.py", env={"WORLD_SIZE": "4"})
        assert done.returncode == code, done.stderr


def test_an_unknown_master_addr_is_a_note(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "import os; print(os.environ['MASTER_ADDR'])\n")
    done = run_ddplaunch("run", *EXEC, "train.py", env={"MASTER_ADDR": "gone.invalid", "MASTER_PORT": "29500"})
    assert (done.returncode, done.stdout) == (0, "127.0.0.1\n"), done.stderr
    assert done.stderr.count("ddplaunch: MASTER_ADDR=gone.invalid cannot be resolved") == 1
    own = run_in_fork("run", "--dry-run", "--json", "train.py", env={"MASTER_ADDR": "localhost"})
    assert json.loads(own.stdout)["notes"] == []


@pytest.mark.ci
@pytest.mark.slow
def test_whether_master_addr_is_this_machine_is_looked_up(network, tmp_path):
    """Names of /etc/hosts are known although the name server of this host does not answer."""
    host = network(2, dns="dead").hosts[0]
    write_program(tmp_path, "train.py", "print('trains')\n")

    def run(address: str) -> tuple[int, str]:
        done = host.start(
            ddplaunch_command("run", *EXEC, "train.py"), cwd=tmp_path, env=clean_environment({"MASTER_ADDR": address}),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        out, _ = done.communicate(timeout=scaled_timeout(60))
        return done.returncode, out

    for other in ("n1", "10.77.0.11", "fd77::11"):
        code, out = run(other)
        assert code == 2
        assert out.startswith(f"Error: MASTER_ADDR={other}: ")
    for own in ("n0", "10.77.0.10", "fd77::10"):
        assert run(own) == (0, "trains\n")
    code, out = run("gone.example")
    assert code == 0
    assert "MASTER_ADDR=gone.example" in out
