"""Tests of the store's port: bound before it is announced, kept over attempts, free afterwards."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.network.reserved_port import ReservedPort, loopback_note
from tests.conftest import PROGRAMS, ddplaunch_command, free_port, is_alive, run_command, wait_until, write_program
from tests.start_modes import EXEC, FORKED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_a_missing_loopback_is_reported_at_once(tmp_path):
    write_program(tmp_path, "ends.py", "")
    words = ["unshare", "-n", *ddplaunch_command("run", *FORKED, "ends.py")]
    done = run_command(words, tmp_path)
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespaces here")
    expected = "ddplaunch: the loopback interface is down: no rank can reach 127.0.0.1; type: ip link set lo up\n"
    assert (done.returncode, done.stderr) == (0, expected)
    assert loopback_note() is None


def test_the_port_listens_from_the_start_and_can_be_left_to_rank_0():
    """No other program can take it, not even with SO_REUSEADDR, which torch's store sets too."""
    port = ReservedPort("127.0.0.1", 0, nnodes=1)
    for _ in range(2):
        listening = port.listen()
        assert listening is port.listen()
        assert listening.getsockname() == ("127.0.0.1", port.number)
        with socket.create_connection(("127.0.0.1", port.number)):
            pass
        with pytest.raises(OSError, match="in use"):
            another(port.number)
        port.stop_listening()
    with another(port.number):
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port.number))
        with pytest.raises(UsageError, match=f"--master-port {port.number} is in use by"):
            port.listen()
    port.listen()
    port.close()


def test_a_child_with_a_copy_of_the_socket_does_not_hold_the_port():
    """The kernel closes a copy late in execve(2), when os.posix_spawn has returned already."""
    port = ReservedPort("127.0.0.1", 0, nnodes=1)
    with port.listen().dup():
        port.stop_listening()
        another(port.number).close()
        copy = port.listen().dup()
    port.close()
    with copy, socket.create_connection(("127.0.0.1", port.number)):
        pass


def another(number: int) -> socket.socket:
    """The socket of a program that listens at a port as a store would."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", number))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def test_loopback_alone_unless_there_are_other_nodes():
    here, everywhere = ReservedPort("127.0.0.1", 0, nnodes=1), ReservedPort("127.0.0.1", 0, nnodes=2)
    assert here.listen().getsockname()[0] == "127.0.0.1"
    assert everywhere.listen().getsockname()[0] in ("::", "0.0.0.0")
    with socket.create_connection(("127.0.0.1", everywhere.number)):
        pass
    here.close()
    everywhere.close()


@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine(address):
    with pytest.raises(UsageError, match=address):
        ReservedPort(address, 0, nnodes=1)


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["zygote", pytest.param("exec", marks=pytest.mark.ci)])
def test_ranks_find_the_store(run_ddplaunch, tmp_path, mode):
    """They find it at an address of IPv6 too."""
    if not Path("/proc/net/if_inet6").exists() or "00000001 01 80" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("no ::1 on this machine")
    script = write_program(
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
    done = run_ddplaunch("run", "--start", mode, "--nproc", "2", "--master-addr", "::1", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met 2 at ::1\n") == 2


@pytest.mark.ci
def test_a_file_as_init_method(run_ddplaunch, tmp_path):
    """--backend and --init-method: the group is there before the target runs and gone after; the file is removed."""
    script = write_program(
        tmp_path,
        "grouped.py",
        """
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
        print(dist.get_backend(), int(x))
        """,
    )
    file = write_program(tmp_path, "store", "stale")
    done = run_ddplaunch("run", "--nproc", "2", "--backend", "gloo", "--init-method", f"file://{file}", script)
    assert (done.returncode, done.stdout.count("gloo 2"), file.exists()) == (0, 2, False), done.stderr


@pytest.mark.ci
def test_a_port_of_the_script_itself(run_ddplaunch, tmp_path):
    """Rank 0 opens the store there, though TORCHELASTIC_USE_AGENT_STORE makes every rank a client.

    If the port is taken, torch's C++ would ignore the error because of that variable, and both ranks would wait.
    """
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        program = f"""
        import os, socket, torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        first = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                first.set("port", str(free.getsockname()[1]))
        port = int(first.get("port"))
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        print("own store", flush=True)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = "{other.getsockname()[1]}"
        dist.init_process_group("gloo")
        """
        done = run_ddplaunch("run", "--nproc", "2", write_program(tmp_path, "own.py", program))
    assert (done.returncode, done.stdout.count("own store")) == (1, 2), done.stderr
    assert "rank 0 failed with DistNetworkError" in done.stderr


# ------------------------------------------------------------------------------------------ a process of its own


LEAVES = PROGRAMS / "leaves.py"


@pytest.mark.ci
def test_the_store_outlives_rank_0_and_is_new_in_each_attempt(start_ddplaunch):
    """Rank 0 ends by os._exit while the others still make groups; before that an attempt failed."""
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nnodes", "2", "--nproc", "2")
    words = (*where, "--max-restarts", "1", str(LEAVES), "exit")
    jobs = [start_ddplaunch("run", "--node-rank", str(number), *words) for number in (0, 1)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr()
    printed = "".join(job.stdout() for job in jobs)
    assert printed.count("the store is new, and not in a rank: True") == 8
    assert printed.count("met 6") == 3
    for job in jobs:
        job.assert_nothing_left()


@pytest.mark.ci
def test_a_rank_that_replaces_itself_and_runs_the_program_as_its_child(run_ddplaunch):
    """Rank 0 does, by execve; the other rank is an ordinary one."""
    done = run_ddplaunch("run", "--nproc", "2", str(LEAVES), "wrap")
    assert (done.returncode, done.stdout.count("met 1")) == (0, 2), done.stderr


def test_a_dry_run_shows_who_opens_the_store(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "import torch")
    for words, expected in ((("--nproc", "2"), True), (("--nproc", "2", *EXEC), False), (("--nproc", "1"), False)):
        done = run_in_fork("run", *words, "--dry-run", "--json", "train.py")
        assert f'"TORCHELASTIC_USE_AGENT_STORE": "{expected}"' in done.stdout


@pytest.mark.ci
def test_a_store_that_is_killed_ends_the_attempt(start_ddplaunch, tmp_path):
    """As when a zygote is killed. If the launcher is killed, the store ends too."""
    script = write_program(tmp_path, "waits.py", "import signal, torch\nprint('up', flush=True)\nsignal.pause()")
    job, other = (start_ddplaunch("run", "--nproc", "2", "--max-restarts", "1", script) for _ in range(2))
    first = second = 0
    for attempt in (0, 1):
        job.wait_for("up", 2 * (attempt + 1))
        first, second = second, job.store()
        os.kill(second, signal.SIGKILL)
    assert job.wait() == 137
    assert first != second
    for store in (first, second):
        assert f"the store (pid {store}) was ended by SIGKILL" in job.stderr()
    other.wait_for("up", 2)
    store = other.store()
    other.signal(signal.SIGKILL)
    assert other.wait() == -9
    for each in (job, other):
        each.assert_nothing_left()
    assert not is_alive(store)


def test_a_port_that_is_taken_between_two_attempts_ends_the_job_with_its_reason(start_ddplaunch, tmp_path):
    """Where rank 0 is to listen there itself; "node 0 was lost", exit code 69, would have scripts try again."""
    os.mkfifo(tmp_path / "gate")
    port = str(free_port())
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", "1")
    program = ("--no-python", "/bin/sh", "-c", "echo up; read line <gate; exit 3")
    jobs = [start_ddplaunch("run", *where, "--nproc", "1", "--node-rank", str(number), *program) for number in (0, 1)]
    for job in jobs:
        job.wait_for("up")
    with another(int(port)):
        (tmp_path / "gate").write_text("\n\n")
        assert [job.wait() for job in jobs] == [2, 2]
    for job in jobs:
        assert f"--master-port {port} is in use by" in job.stderr()
        job.assert_nothing_left()


def test_no_other_program_takes_the_port_while_nodes_are_waited_for(start_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", "import torch")
    port = free_port()
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", "0")
    job = start_ddplaunch("run", *where, "--nproc", "1", "train.py")
    wait_until(lambda: "1/2 nodes joined" in job.stderr(), "the first node")
    with pytest.raises(OSError, match="in use"):
        another(port)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.ci
def test_the_last_rank_of_an_elastic_job_has_a_new_store_too(start_ddplaunch, tmp_path):
    script = write_program(
        tmp_path,
        "shrinks.py",
        """
        import signal, torch.distributed as dist
        dist.init_process_group("gloo")
        print("ranks:", dist.get_world_size(), flush=True)
        while dist.get_world_size() > 1:
            signal.pause()
        """,
    )
    where = ("--nnodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc", "1")
    jobs = [start_ddplaunch("run", *where, "--node-rank", str(number), script) for number in (0, 1)]
    for job in jobs:
        job.wait_for("ranks: 2")
    os.kill(jobs[1].process.pid, signal.SIGKILL)
    assert jobs[0].wait() == 0, jobs[0].stderr()
    assert jobs[0].stdout().count("ranks: 1") == 1
    for job in jobs:
        job.assert_nothing_left()
