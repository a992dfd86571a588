"""Tests of the variables by which gloo and NCCL choose network interfaces."""

import pytest

from ddplaunch.base.errors import host_name
from ddplaunch.system.network.interface_variables import find_unknown_interfaces

INTERFACES = ("lo", "eth0", "bond0.2093")


@pytest.mark.parametrize(
    ("variable", "value", "is_known"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth7,eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth7", False),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "", True),
        ("TP_SOCKET_IFNAME", "ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ib,bond", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "=bond0", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
    ],
)
def test_variables_that_name_no_interface(variable, value, is_known):
    found = find_unknown_interfaces({variable: value, "NCCL_DEBUG": "INFO"}, INTERFACES)
    assert found == ([] if is_known else [f"{variable}={value}"])


def test_a_run_with_a_variable_that_names_no_interface_has_a_note(run_ddplaunch, tmp_path):
    (tmp_path / "train.py").write_text("print('ran')\n")
    words = ("run", "--nproc", "2", "--preload", "none", "train.py")
    done = run_ddplaunch(*words, env={"GLOO_SOCKET_IFNAME": "eth77"})
    assert (done.returncode, done.stdout.count("ran")) == (0, 2)
    assert "GLOO_SOCKET_IFNAME=eth77: this machine has no such network interface" in done.stderr


def test_in_a_job_of_several_nodes_the_note_names_the_host(run_ddplaunch, tmp_path):
    """Over SSH all of them print to one terminal."""
    (tmp_path / "train.py").touch()
    words = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--join-timeout", "1")
    done = run_ddplaunch("run", *words, "--preload", "none", "train.py", env={"GLOO_SOCKET_IFNAME": "eth77"})
    assert f"GLOO_SOCKET_IFNAME=eth77: {host_name()} has no such network interface" in done.stderr
