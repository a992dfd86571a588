"""Tests of requests to Hydra over PMI: MPICH 5.0 and Intel MPI 2021."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ddplaunch.system.clusters import hydra_pmi
from ddplaunch.system.clusters.cluster_env import RankAssignment
from ddplaunch.system.clusters.systems.rank_launchers import mpich
from tests.system.clusters.recorded_environments import HYDRA as TASK
from tests.system.clusters.recorded_environments import require_detected

MAPPINGS = [
    # what is written; the host of each rank
    ("(vector,(0,3,1))", "012"),
    ("(vector,(0,2,3))", "000111"),
    ("(vector,(0,1,2),(1,1,1))", "001"),  # Intel
    ("(vector,(0,1,2),1)", "001"),  # MPICH, as all that follow
    ("(vector,0,(1,1,3))", "0111"),
    ("(vector,(0,1,2),(1,2,1))", "0012"),
    ("(vector,(0,1,2),1,(2,1,2))", "00122"),
    ("(vector,[(0,2,1)]x2,0)", "01010"),
    ("(vector,[(0,2,1),(2,1,2)]x2)", "01220122"),
    ("(vector,(0,2,1))", "0101"),  # begins again
]


@pytest.mark.parametrize(("written", "hosts"), MAPPINGS)
def test_a_mapping_has_the_host_of_each_rank(written: str, hosts: str) -> None:
    assert hydra_pmi.parse_mapping(written, len(hosts)) == tuple(map(int, hosts))


@pytest.mark.parametrize("written", ["", "(vector)", "(vector,)", "(0,1,2)", "(vector,(0,0,1))"])
def test_invalid_process_mappings_are_ignored(written: str) -> None:
    assert hydra_pmi.parse_mapping(written, 2) == ()


class Hydra:
    """Its end of a process's socket."""

    def __init__(self, end: socket.socket, mapping: str) -> None:
        self.requests: list[str] = []
        self.mapping, self._end, self._put = mapping, end, ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for line in self._end.makefile():
            fields = dict(field.partition("=")[::2] for field in line.split())
            self.requests.append(fields["cmd"])
            if fields["cmd"] == "put":
                self._put = fields["value"]
            value = self.mapping if fields.get("key") == "PMI_process_mapping" else self._put or "n1"
            answers = {
                "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=kvs_6_0_470486301_n0",
                "get": f"cmd=get_result rc=0 value={value}",
                "barrier_in": "cmd=barrier_out tag=0",
            }
            self._end.sendall(f"{answers.get(fields['cmd'], 'cmd=done rc=0')}\n".encode())

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._end.close()


@pytest.fixture
def hydra(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hydra]:
    """One of n1:2,n2:1."""
    ours, its = socket.socketpair()
    monkeypatch.setattr(hydra_pmi, "_fd", None)
    monkeypatch.setattr(hydra_pmi, "_cached_job", None)
    monkeypatch.setenv("PMI_FD", str(ours.fileno()))
    hydra = Hydra(its, "(vector,(0,1,2),1)")
    yield hydra
    hydra.close()
    ours.close()


def task(rank: int, local_rank: int, local_size: int) -> dict[str, str]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": 3, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return {**{name: str(number) for name, number in numbers.items()}, "PMI_FD": os.environ["PMI_FD"]}


def test_a_single_task_on_its_host_is_a_rank_if_other_hosts_have_several(hydra: Hydra) -> None:
    expected = {"rank_assignment": RankAssignment(2, 3, 0, 1), "run_id": "kvs_6_0_470486301_n0"}
    cluster_env = require_detected(mpich.detect(task(2, 0, 1)), nnodes=2, node_rank=1, address="n1", **expected)
    assert cluster_env.port
    assert mpich.detect(task(2, 0, 1)) == cluster_env, "asked once: the barrier is the job's"
    assert hydra.requests == ["get_my_kvsname", "get", "barrier_in", "get"], "no init, which is the program's"
    hydra_pmi.finalize()
    assert hydra.requests[4:] == ["finalize"]


@pytest.mark.parametrize(
    ("typed", "expected"), [("first.example", "first.example"), ("localhost", os.uname().nodename)]
)
def test_rank_0_publishes_its_host_by_the_typed_name(hydra: Hydra, typed: str, expected: str) -> None:
    found = mpich.detect({**task(0, 0, 2), "PMI_HOSTNAME": typed})
    require_detected(found, rank_assignment=RankAssignment(0, 3, 0, 2), nnodes=2, node_rank=0, address=expected)


def test_a_mapping_that_is_too_long_leaves_the_address(hydra: Hydra) -> None:
    hydra.mapping = ""
    rank = RankAssignment(1, 3, 1, 2)
    require_detected(mpich.detect(task(1, 1, 2)), rank_assignment=rank, nnodes=None, address="n1")


def test_on_one_host_hydra_is_not_asked(hydra: Hydra) -> None:
    found = mpich.detect({**TASK, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": os.environ["PMI_FD"]})
    require_detected(found, address="127.0.0.1")
    hydra_pmi.finalize()
    assert hydra.requests == []


def test_a_closed_connection_is_as_if_there_were_no_hydra(hydra: Hydra) -> None:
    hydra.close()
    require_detected(mpich.detect(task(2, 0, 1)), nnodes=3, address=None)


@pytest.mark.parametrize("fd", ["9999", "x", ""])
def test_a_pmi_fd_that_is_not_a_socket_is_ignored(fd: str, hydra: Hydra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", fd)
    assert hydra_pmi.query_hydra({"PMI_FD": fd}, 0, 2) is None
    with open(os.devnull) as other:
        monkeypatch.setenv("PMI_FD", str(other.fileno()))
        assert hydra_pmi.query_hydra({"PMI_FD": str(other.fileno())}, 0, 2) is None


def test_a_pmi_socket_of_another_process_is_not_used(hydra: Hydra) -> None:
    assert hydra_pmi.query_hydra({"PMI_FD": "8"}, 0, 2) is None
    assert hydra.requests == []
