"""The store's port: ours before anyone hears of it, kept over attempts, free afterwards."""

from __future__ import annotations

import os
import socket

import pytest

from ddplaunch.control.port import Port, without_loopback
from ddplaunch.errors import UsageError
from tests.conftest import command, ran, write
from tests.starts import FORKED

zygote_and_exec = pytest.mark.parametrize(
    "mode", ["zygote", pytest.param("exec", marks=[pytest.mark.ci, pytest.mark.slow])]
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_no_loopback_is_said_at_once(tmp_path):
    write(tmp_path, "ends.py", "")
    words = ["unshare", "-n", *command("run", *FORKED, "ends.py")]
    done = ran(words, tmp_path)
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespaces here")
    said = "ddplaunch: the loopback interface is down: no rank can reach 127.0.0.1; type: ip link set lo up\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert without_loopback() is None


def test_each_attempt_listens_on_the_same_port():
    port = Port("127.0.0.1", 0, nnodes=1)
    for _ in range(3):
        with port.listen() as listening:
            assert listening.getsockname() == ("127.0.0.1", port.number)
            with socket.create_connection(("127.0.0.1", port.number)):
                pass
    port.close()


def test_nobody_else_is_given_a_reserved_port():
    """Not even by asking for it: the reservation alone keeps it (SO_REUSEADDR on one side is not enough)."""
    port = Port("127.0.0.1", 0, nnodes=1)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    port.close()


def test_loopback_alone_unless_there_are_other_nodes():
    here, everywhere = Port("127.0.0.1", 0, nnodes=1), Port("127.0.0.1", 0, nnodes=2)
    with here.listen() as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with everywhere.listen() as listening:
        assert listening.getsockname()[0] in ("::", "0.0.0.0")
        with socket.create_connection(("127.0.0.1", everywhere.number)):
            pass
    here.close()
    everywhere.close()


def test_a_taken_port_is_named_with_its_holder():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            Port("127.0.0.1", number, nnodes=1)
    assert f"--master-port {number} is in use by" in caught.value.message
    assert "(pid " in caught.value.message


@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours(address):
    with pytest.raises(UsageError, match=address):
        Port(address, 0, nnodes=1)


@pytest.mark.parametrize("address", ["localhost", "::1"])
@zygote_and_exec
def test_ranks_find_the_store(launch, tmp_path, address, mode):
    """At the usual 127.0.0.1 those of nearly all tests do."""
    if address == "::1" and not _has_ipv6_loopback():
        pytest.skip("no ::1 on this machine")
    script = write(
        tmp_path,
        "meet.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        print("met", int(x), "at", os.environ["MASTER_ADDR"])
        dist.destroy_process_group()
        """,
    )
    done = launch("run", "--start", mode, "--nproc", "2", "--master-addr", address, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"met 2 at {address}\n") == 2


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:{port}", "file://{folder}/store"])
@zygote_and_exec
def test_init_methods(launch, tmp_path, method, mode):
    """--backend and --init-method: the group is there before the target runs and gone after; files are removed."""
    script = write(
        tmp_path,
        "grouped.py",
        """
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
        print(dist.get_backend(), int(x))
        """,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "store").write_text("stale")
    done = launch(
        "run", "--start", mode, "--nproc", "2", "--backend", "gloo",
        "--init-method", method.format(port=port, folder=tmp_path), script,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gloo 2") == 2
    if method.startswith("file"):
        assert not (tmp_path / "store").exists()


def test_a_scripts_own_tcp_store_works(launch, tmp_path):
    """A store of the script's own on another port: it hangs where ranks are told that the agent hosts the store."""
    script = write(
        tmp_path,
        "own.py",
        """
        import os, socket, torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        first = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                first.set("port", str(free.getsockname()[1]))
        port = int(first.get("port"))
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        print("own store")
        dist.destroy_process_group()
        """,
    )
    done = launch("run", "--nproc", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("own store") == 2
