"""The same small tests of four ranks, by ddplaunch, torch's own test case or spawn, as BENCH_WAY says."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS, TESTS = 4, int(os.environ["BENCH_TESTS"])
WAY = os.environ["BENCH_WAY"]


def check(rank: int, number: int, store: dist.Store | None = None) -> None:
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    total = torch.tensor(rank * number)
    dist.all_reduce(total)
    assert int(total) == 6 * number
    dist.destroy_process_group()


if WAY == "ranks":

    @pytest.mark.ranks(RANKS)
    @pytest.mark.parametrize("number", range(TESTS))
    def test_all_reduce(rank: int, number: int) -> None:
        check(rank, number)


def spawned(rank: int, number: int, path: str) -> None:
    check(rank, number, dist.FileStore(path, RANKS))


if WAY == "spawn":

    @pytest.mark.parametrize("number", range(TESTS))
    def test_all_reduce_spawned(tmp_path, number: int) -> None:
        torch.multiprocessing.spawn(spawned, args=(number, str(tmp_path / "store")), nprocs=RANKS)


if WAY == "case":
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    class TestAllReduce(MultiProcessTestCase):
        @property
        def world_size(self) -> int:
            return RANKS

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def tearDown(self) -> None:
            super().tearDown()
            if os.path.exists(self.file_name):
                os.remove(self.file_name)

    def _made(number: int):
        def test(self) -> None:
            check(self.rank, number, dist.FileStore(self.file_name, RANKS))

        return test

    for number in range(TESTS):
        setattr(TestAllReduce, f"test_{number}", _made(number))
